/* Forward pass of a linear layer: dot products of the weights with the examples' inputs, four outputs by three or four examples
 * at a time, so that every vector that is loaded is used several times. */
#ifndef FEDSPA_LINEAR_H
#define FEDSPA_LINEAR_H

#include "net.h"
#include "simd.h"

#define DOT_OUTPUTS 4
#if LEVEL == 2 || LEVEL == 3 /* which have 32 registers */
#define DOT_EXAMPLES 4
#else
#define DOT_EXAMPLES 3
#endif

PHASE void linear_forward(const struct op *op, const struct buffer *in, const struct buffer *out, const float *a,
                           int64_t examples, const float *theta, float *b) {
    const float *bias = op->bias >= 0 ? theta + op->bias : NULL;
    for (int r = 0; r < op->outputs; r += DOT_OUTPUTS)
        for (int64_t e = 0; e < examples; e += DOT_EXAMPLES) {
            const float *w[DOT_OUTPUTS], *x[DOT_EXAMPLES];
            /* Past the end the last one is computed again: cheaper than a second kernel for the rest. */
            for (int i = 0; i < DOT_OUTPUTS; i++)
                w[i] = theta + op->weights + (int64_t)(r + i < op->outputs ? r + i : op->outputs - 1) * op->row_length;
            for (int j = 0; j < DOT_EXAMPLES; j++)
                x[j] = a + (e + j < examples ? e + j : examples - 1) * in->example;
            V acc[DOT_OUTPUTS][DOT_EXAMPLES];
            UNROLLED(DOT_OUTPUTS, i) UNROLLED(DOT_EXAMPLES, j) acc[i][j] = (V){0};
            for (int k = 0; k < op->run_padded; k += LANES) {
                V inputs[DOT_EXAMPLES];
                UNROLLED(DOT_EXAMPLES, j) inputs[j] = load(x[j] + k);
                UNROLLED(DOT_OUTPUTS, i) {
                    const V row = load(w[i] + k);
                    UNROLLED(DOT_EXAMPLES, j) acc[i][j] += row * inputs[j];
                }
            }
            UNROLLED(DOT_OUTPUTS, i)
                UNROLLED(DOT_EXAMPLES, j) {
                    if (r + i >= op->outputs || e + j >= examples) continue;
                    float z = sum_lanes(acc[i][j]) + (bias ? bias[r + i] : 0);
                    b[(e + j) * out->example + out->origin + r + i] = op->relu && z <= 0 ? 0 : z;
                }
        }
}

#endif
