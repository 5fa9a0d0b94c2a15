/* Forward pass of a linear layer: dot products of the rows with the examples' inputs, four rows by three examples at a
 * time, so that every vector that is loaded is used several times. */
#ifndef FEDSPA_LINEAR_H
#define FEDSPA_LINEAR_H

#include "net.h"
#include "simd.h"

#define DOT_ROWS 4
#define DOT_EXAMPLES 3

PHASE void linear_forward(const struct op *op, const struct buffer *in, const struct buffer *out, const float *a,
                           int64_t examples, const float *theta, float *b) {
    const float *bias = op->bias >= 0 ? theta + op->bias : NULL;
    for (int r = 0; r < op->rows; r += DOT_ROWS)
        for (int64_t e = 0; e < examples; e += DOT_EXAMPLES) {
            const float *w[DOT_ROWS], *x[DOT_EXAMPLES];
            /* Past the end the last one is computed again: cheaper than a second kernel for the rest. */
            for (int i = 0; i < DOT_ROWS; i++)
                w[i] = theta + op->weights + (int64_t)(r + i < op->rows ? r + i : op->rows - 1) * op->row_length;
            for (int j = 0; j < DOT_EXAMPLES; j++)
                x[j] = a + (e + j < examples ? e + j : examples - 1) * in->example;
            V acc[DOT_ROWS][DOT_EXAMPLES];
            for (int i = 0; i < DOT_ROWS; i++)
                for (int j = 0; j < DOT_EXAMPLES; j++) acc[i][j] = (V){0};
            for (int k = 0; k < op->run_padded; k += LANES) {
                V x0 = load(x[0] + k), x1 = load(x[1] + k), x2 = load(x[2] + k);
#pragma GCC unroll 4
                for (int i = 0; i < DOT_ROWS; i++) {
                    V row = load(w[i] + k);
                    acc[i][0] += row * x0;
                    acc[i][1] += row * x1;
                    acc[i][2] += row * x2;
                }
            }
            for (int i = 0; i < DOT_ROWS && r + i < op->rows; i++)
                for (int j = 0; j < DOT_EXAMPLES && e + j < examples; j++) {
                    float z = sum_lanes(acc[i][j]) + (bias ? bias[r + i] : 0);
                    b[(e + j) * out->example + out->origin + r + i] = op->relu && z <= 0 ? 0 : z;
                }
        }
}

#endif
