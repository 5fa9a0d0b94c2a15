/* Forward pass of a linear layer: dot products of the rows with the examples' inputs, four rows by three or four examples
 * at a time, so that every vector that is loaded is used several times. */
#ifndef FEDSPA_LINEAR_H
#define FEDSPA_LINEAR_H

#include "net.h"
#include "simd.h"

#define DOT_ROWS 4
#if LEVEL == 2
#define DOT_EXAMPLES 4
#else
#define DOT_EXAMPLES 3
#endif

#if LEVEL == 2
/* The sums over the lanes of 16 vectors: of v[i][j] in lane 4 j + i. */
INLINE V sum_sixteen(V v[4][4]) {
    __m512 a[2][4], b[4], c[2];
    UNROLLED(2, h) UNROLLED(4, i) { /* halves of examples h and h + 2 */
        const __m512 p = (__m512)v[i][h], q = (__m512)v[i][h + 2];
        a[h][i] = _mm512_add_ps(_mm512_shuffle_f32x4(p, q, 0x44), _mm512_shuffle_f32x4(p, q, 0xee));
    }
    UNROLLED(4, i) /* quarters of examples 0, 1, 2, 3 */
        b[i] = _mm512_add_ps(_mm512_permutex2var_ps(a[0][i], _mm512_set_epi32(27, 26, 25, 24, 11, 10, 9, 8, 19, 18, 17, 16, 3, 2, 1, 0), a[1][i]),
                             _mm512_permutex2var_ps(a[0][i], _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 23, 22, 21, 20, 7, 6, 5, 4), a[1][i]));
    UNROLLED(2, h) c[h] = _mm512_add_ps(_mm512_unpacklo_ps(b[2 * h], b[2 * h + 1]), _mm512_unpackhi_ps(b[2 * h], b[2 * h + 1]));
    return (V)_mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x44), _mm512_shuffle_ps(c[0], c[1], 0xee));
}
#endif

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
            UNROLLED(DOT_ROWS, i) UNROLLED(DOT_EXAMPLES, j) acc[i][j] = (V){0};
            for (int k = 0; k < op->run_padded; k += LANES) {
                V inputs[DOT_EXAMPLES];
                UNROLLED(DOT_EXAMPLES, j) inputs[j] = load(x[j] + k);
                UNROLLED(DOT_ROWS, i) {
                    const V row = load(w[i] + k);
                    UNROLLED(DOT_EXAMPLES, j) acc[i][j] += row * inputs[j];
                }
            }
#if LEVEL == 2
            V z = sum_sixteen(acc);
            if (bias) z += (V)_mm512_broadcast_f32x4((__m128)load_quarter(bias + r));
            if (op->relu) z = rectify(z);
            Q four[DOT_EXAMPLES];
            memcpy(four, &z, sizeof four);
            const __mmask8 rows = op->rows - r < DOT_ROWS ? (__mmask8)((1u << (op->rows - r)) - 1) : 0xf;
            for (int64_t j = 0; j < DOT_EXAMPLES && e + j < examples; j++)
                _mm_mask_storeu_ps(b + (e + j) * out->example + out->origin + r, rows, (__m128)four[j]);
#else
            UNROLLED(DOT_ROWS, i)
                UNROLLED(DOT_EXAMPLES, j) {
                    if (r + i >= op->rows || e + j >= examples) continue;
                    float z = sum_lanes(acc[i][j]) + (bias ? bias[r + i] : 0);
                    b[(e + j) * out->example + out->origin + r + i] = op->relu && z <= 0 ? 0 : z;
                }
#endif
        }
}

#endif
