/* Forward convolution: a tile of up to 12 pixels by one vector of output channels stays in registers over the whole
 * window. Pixels come as three groups of four neighbours; the groups may lie anywhere, in other rows or other examples.
 */
#ifndef FEDSPA_CONV_H
#define FEDSPA_CONV_H

#include "net.h"
#include "simd.h"

#define GROUP 4

/* Weights are packed as panels of LANES channels: [panel][window][channels of the panel]. */

/* Accumulators are spelled out by macro: the compiler keeps them in registers only where every index is a constant. One
 * scalar of the input is spread over the vector of weights. */
#define EACH_PIXEL_1(DO) DO(0, a0[k]) DO(1, a0[k + s1]) DO(2, a0[k + s2]) DO(3, a0[k + s3])
#define EACH_PIXEL_2(DO) EACH_PIXEL_1(DO) DO(4, a1[k]) DO(5, a1[k + s1]) DO(6, a1[k + s2]) DO(7, a1[k + s3])
#define EACH_PIXEL_3(DO) EACH_PIXEL_2(DO) DO(8, a2[k]) DO(9, a2[k + s1]) DO(10, a2[k + s2]) DO(11, a2[k + s3])

#define TILE(GROUPS)                                                                                                   \
    PHASE void tile_##GROUPS(const float *const *in, int64_t spacing, int runs, int64_t run, int64_t row,              \
                             const float *w, float *const *out, int64_t out_spacing) {                                 \
        V acc[GROUPS * GROUP];                                                                                         \
        UNROLLED(GROUPS * GROUP, p) acc[p] = (V){0};                                                                   \
        const float *a0 = in[0], *a1 = in[GROUPS / 2], *a2 = in[GROUPS - 1]; /* those beyond GROUPS are not read */    \
        const int64_t s1 = spacing, s2 = 2 * spacing, s3 = 3 * spacing;                                                \
        for (int r = 0; r < runs; r++, a0 += row, a1 += row, a2 += row)                                                \
            for (int64_t k = 0; k < run; k++, w += LANES) {                                                            \
                const V weights = load(w);                                                                             \
                EACH_PIXEL_##GROUPS(TILE_STEP)                                                                         \
            }                                                                                                          \
        UNROLLED(GROUPS * GROUP, p) store(out[p / GROUP] + (p % GROUP) * out_spacing, acc[p]);                         \
    }
#define TILE_STEP(P, X) acc[P] += weights * (X);

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
TILE(1)
TILE(2)
TILE(3)
#pragma GCC diagnostic pop

typedef void (*tile_function)(const float *const *, int64_t, int, int64_t, int64_t, const float *, float *const *,
                              int64_t);
static const tile_function TILES[] = {tile_1, tile_2, tile_3}; /* by groups */

PHASE void pack_weights(const struct op *op, const float *theta, float *packed) {
    for (int start = 0; start < op->outputs; start += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            const float *row = theta + op->weights + (int64_t)(start + lane) * op->row_length;
            float *to = packed + lane;
            for (int r = 0; r < op->runs; r++, row += op->run_padded)
                for (int k = 0; k < op->run; k++, to += LANES) *to = start + lane < op->outputs ? row[k] : 0.0f;
        }
        packed += (int64_t)LANES * op->runs * op->run;
    }
}

/* Pixels of the convolution's output, as they lie in scratch: channels padded, at least a group to a row. */
INLINE int scratch_width(const struct op *op) { return op->used_w < GROUP ? GROUP : op->used_w; }

INLINE int64_t scratch_size(const struct op *op) {
    return (int64_t)op->used_h * scratch_width(op) * op->outputs_padded;
}

/* Which pixel of its window a unit of a pooling picks is a byte, and a word holds those of four units of a channel: rows
 * of channels, one for every four units. */
#define PICKS 4

INLINE int64_t pick_words(const struct op *op, const struct buffer *out) {
    return (int64_t)(out->height * out->width + PICKS - 1) / PICKS * op->outputs_padded;
}

INLINE int picked(int32_t word, int unit) { return word >> 8 * (unit % PICKS) & 0xff; }

/* `in`: the examples' input buffers; `scratch`: their outputs, one after the other, without bias. */
PHASE void conv_forward(const struct op *op, const struct buffer *buffer, const float *in, int64_t examples,
                         const float *packed, float *scratch) {
    const int width = scratch_width(op), across = (width + GROUP - 1) / GROUP;
    const int64_t groups = (int64_t)op->used_h * across, total = groups * examples;
    const int64_t spacing = (int64_t)op->stride_w * buffer->channels, size = scratch_size(op);
    for (int start = 0; start < op->outputs; start += LANES) {
        for (int64_t first = 0; first < total; first += 3) {
            const float *a[3];
            float *c[3];
            const int count = total - first < 3 ? (int)(total - first) : 3;
            for (int j = 0; j < count; j++) {
                const int64_t g = first + j;
                int64_t example = g / groups;
                int y = (int)(g % groups) / across, x = (int)(g % groups) % across * GROUP;
                if (x + GROUP > width) x = width - GROUP; /* the last group of a row overlaps the one before it */
                a[j] = in + example * buffer->example + (int64_t)y * op->stride_h * buffer->row + x * spacing;
                c[j] = scratch + example * size + ((int64_t)y * width + x) * op->outputs_padded + start;
            }
            TILES[count - 1](a, spacing, op->runs, op->run, buffer->row, packed, c, op->outputs_padded);
        }
        packed += (int64_t)LANES * op->runs * op->run;
    }
}

/* Forward pass of a linear layer: dot products of the weights with the examples' inputs, four outputs by three or four examples
 * at a time, so that every vector that is loaded is used several times. */
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
