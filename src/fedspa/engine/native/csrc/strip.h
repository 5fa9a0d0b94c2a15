/* Forward convolution with kernels five wide and stride 1 by Winograd's F(4, 5) along the rows (Winograd 1980; Toom and
 * Cook's points 0, ±1, ±2, ±1/2 and infinity): 8 products make four neighbouring pixels instead of 20. The products of
 * three strips of four pixels stay in registers over the whole window and are turned into pixels there. In float32 it
 * loses between one and two bits.
 *
 * The coefficients of the data are integers or powers of two; those of the weights are rounded once.
 */
#ifndef FEDSPA_STRIP_H
#define FEDSPA_STRIP_H

#include "conv.h"

#define STRIP_POINTS 8
#define STRIP_KERNEL 5

/* From eight pixels to eight points: a column a pixel. */
static const float STRIP_DATA[STRIP_POINTS][STRIP_POINTS] = {
    {4, 0, 0, 0, 0, 0, 0, 0},         {0, -4, 4, 2, -2, 4, -4, -4},   {-21, -4, -4, 1, 1, 8, 8, 0},
    {0, 17, -17, -10, 10, -5, 5, 21}, {21, 17, 17, -5, -5, -10, -10, 0}, {0, -4, 4, 8, -8, 1, -1, -21},
    {-4, -4, -4, 4, 4, 2, 2, 0},      {0, 0, 0, 0, 0, 0, 0, 4},
};

INLINE int strips_across(const struct op *op) { return (op->used_w + GROUP - 1) / GROUP; }

INLINE int strip_start(const struct op *op, int strip) {
    int x = strip * GROUP; /* the last strip of a row overlaps the one before it */
    return x + GROUP > op->used_w ? op->used_w - GROUP : x;
}

/* Floats of transformed input from one of its rows to the next, and of an example. */
INLINE int64_t strip_row(const struct op *op) {
    return (int64_t)strips_across(op) * (op->run / STRIP_KERNEL) * STRIP_POINTS;
}

INLINE int strip_rows(const struct op *op) { return (op->used_h - 1) * op->stride_h + op->kernel_h; }

INLINE int64_t strip_size(const struct op *op) { return strip_rows(op) * strip_row(op); }

/* From five weights, `spacing` apart, to eight points, LANES apart. */
INLINE void strip_points(const float *g, int64_t spacing, float *to) {
    const V g0 = load(g), g1 = load(g + spacing), g2 = load(g + 2 * spacing), g3 = load(g + 3 * spacing);
    const V g4 = load(g + 4 * spacing), even = (g0 + g4) + g2, odd = g1 + g3;
    const V rising = (g0 + 16 * g4) + 4 * g2, rising_odd = 2 * g1 + 8 * g3;
    const V falling = (16 * g0 + g4) + 4 * g2, falling_odd = 8 * g1 + 2 * g3;
    store(to, 0.25f * g0);
    store(to + LANES, (float)(1 / 18.0) * (even + odd));
    store(to + 2 * LANES, (float)(1 / 18.0) * (even - odd));
    store(to + 3 * LANES, (float)(1 / 360.0) * (rising + rising_odd));
    store(to + 4 * LANES, (float)(1 / 360.0) * (rising - rising_odd));
    store(to + 5 * LANES, (float)(1 / 45.0) * (falling + falling_odd));
    store(to + 6 * LANES, (float)(1 / 45.0) * (falling - falling_odd));
    store(to + 7 * LANES, 0.25f * g4);
}

/* Packed as [panel][kernel row][input channel][point][channels of the panel];
 * `space` has capacity for a kernel row's weights turned over: `run` vectors. */
PHASE void strip_weights(const struct op *op, const float *theta, float *packed, float *space) {
    const int channels = op->run / STRIP_KERNEL;
    for (int start = 0; start < op->outputs; start += LANES) {
        const int present = op->outputs - start < LANES ? op->outputs - start : LANES;
        for (int r = 0; r < op->runs; r++) {
            const float *row = theta + op->weights + (int64_t)start * op->row_length + (int64_t)r * op->run_padded;
            for (int k = 0; k < op->run; k++)
                for (int lane = 0; lane < LANES; lane++)
                    space[k * LANES + lane] = lane < present ? row[lane * op->row_length + k] : 0;
            for (int c = 0; c < channels; c++, packed += STRIP_POINTS * LANES)
                strip_points(space + c * LANES, (int64_t)channels * LANES, packed);
        }
    }
}

/* One example's input to [row][strip][channel][point]. */
INLINE void strip_input(const struct op *op, const struct buffer *buffer, const int64_t channels, const float *in,
                        float *to) {
    H column[STRIP_POINTS];
    UNROLLED(STRIP_POINTS, k) column[k] = load_half(STRIP_DATA[k]);
    const int rows = strip_rows(op), across = strips_across(op);
    for (int y = 0; y < rows; y++, in += buffer->row)
        for (int s = 0; s < across; s++) {
            const float *pixel = in + strip_start(op, s) * channels;
            for (const float *end = pixel + channels; pixel < end; pixel++, to += STRIP_POINTS) {
                H even = column[0] * pixel[0], odd = column[1] * pixel[channels];
                even += column[2] * pixel[2 * channels], odd += column[3] * pixel[3 * channels];
                even += column[4] * pixel[4 * channels], odd += column[5] * pixel[5 * channels];
                even += column[6] * pixel[6 * channels], odd += column[7] * pixel[7 * channels];
                store_half(to, even + odd);
            }
        }
}

/* Eight points by three strips where there are registers for them, else four by three, twice. Spelled out by macro, as
 * in conv.h. */
#define EACH_POINT(DO) DO(0) DO(1) DO(2) DO(3) EACH_POINT_MORE(DO)
#if LEVEL == 2
#define POINTS_AT_ONCE 8
#define EACH_POINT_MORE(DO) DO(4) DO(5) DO(6) DO(7)
#else
#define POINTS_AT_ONCE 4
#define EACH_POINT_MORE(DO)
#endif

#define STRIP_STEP(P)      \
    v = load(w + P * LANES); \
    KEEP(v);               \
    acc[P][0] += v * a0[P]; \
    acc[P][1] += v * a1[P]; \
    acc[P][2] += v * a2[P];

/* Three strips of four pixels under one panel of weights: products at eight points, then back to pixels. */
PHASE void strip_tile(const float *const *in, int runs, int channels, int64_t row, const float *weights,
                      float *const *out, int64_t spacing) {
    V m[STRIP_POINTS][3], acc[POINTS_AT_ONCE][3], v;
    for (int first = 0; first < STRIP_POINTS; first += POINTS_AT_ONCE) {
        const float *w = weights + first * LANES;
        UNROLLED(POINTS_AT_ONCE, p) acc[p][0] = acc[p][1] = acc[p][2] = (V){0};
        for (int r = 0; r < runs; r++) {
            const float *a0 = in[0] + r * row + first, *a1 = in[1] + r * row + first, *a2 = in[2] + r * row + first;
            for (int c = 0; c < channels; c++, w += STRIP_POINTS * LANES) {
                EACH_POINT(STRIP_STEP)
                a0 += STRIP_POINTS, a1 += STRIP_POINTS, a2 += STRIP_POINTS;
            }
        }
        UNROLLED(POINTS_AT_ONCE, p) UNROLLED(3, j) m[first + p][j] = acc[p][j];
    }
    UNROLLED(3, j) {
        const V s1 = m[1][j] + m[2][j], d1 = m[1][j] - m[2][j], s2 = m[3][j] + m[4][j], d2 = m[3][j] - m[4][j];
        const V s3 = m[5][j] + m[6][j], d3 = m[5][j] - m[6][j];
        store(out[j], m[0][j] + (s1 + (s2 + s3)));
        store(out[j] + spacing, (d1 + 2 * d2) + 0.5f * d3);
        store(out[j] + 2 * spacing, (s1 + 4 * s2) + 0.25f * s3);
        store(out[j] + 3 * spacing, (d1 + 8 * d2) + (0.125f * d3 + m[7][j]));
    }
}

/* One example's input, transformed. */
PHASE void strip_transform(const struct op *op, const struct buffer *buffer, const float *in, float *space) {
    if (buffer->channels == 1) strip_input(op, buffer, 1, in, space);
    else strip_input(op, buffer, buffer->channels, in, space);
}

/* The rows of pixels from `first` on of one example whose transformed input is in `space`, without bias. */
PHASE void strip_forward(const struct op *op, const struct buffer *buffer, int first, int rows, const float *packed,
                         float *scratch, const float *space) {
    const int across = strips_across(op), channels = buffer->channels;
    const int64_t row = strip_row(op), below = (int64_t)scratch_width(op) * op->outputs_padded, total = (int64_t)rows * across;
    for (int start = 0; start < op->outputs; start += LANES, packed += (int64_t)LANES * op->runs * channels * STRIP_POINTS) {
        const float *from = space + first * op->stride_h * row, *a[3];
        float *to = scratch + start, *c[3];
        int strip = 0, filled = 0;
        for (int64_t s = 0; s < total; s++) {
            a[filled] = from + (int64_t)strip * channels * STRIP_POINTS;
            c[filled++] = to + (int64_t)strip_start(op, strip) * op->outputs_padded;
            if (++strip == across) strip = 0, to += below, from += op->stride_h * row;
            if (s + 1 == total)
                for (; filled < 3; filled++) a[filled] = a[filled - 1], c[filled] = c[filled - 1]; /* repeats a strip */
            if (filled < 3) continue;
            strip_tile(a, op->runs, channels, row, packed, c, op->outputs_padded);
            filled = 0;
        }
    }
}

#endif
