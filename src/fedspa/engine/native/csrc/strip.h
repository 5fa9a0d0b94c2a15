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

/* A vector of channels, or a half or a quarter of one where no more are left: 20 channels as 16 and 4 save a tenth of a
 * step beside 16 and 16 (small-cnn, on images of one channel and of three). */
enum { PANEL_ONE, PANEL_HALF, PANEL_QUARTER };

INLINE int strip_panel_at(int outputs, int start, int *width) {
#if LEVEL == 2
    if (outputs - start <= LANES / 4) return *width = LANES / 4, PANEL_QUARTER;
    if (outputs - start <= LANES / 2) return *width = LANES / 2, PANEL_HALF;
#else
    (void)outputs, (void)start;
#endif
    return *width = LANES, PANEL_ONE;
}

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

/* From five weights, `spacing` apart, to eight points, `apart`; a vector of them at a time. */
#define STRIP_WEIGHTS(NAME, TYPE, LOAD, STORE)                                                                         \
    INLINE void NAME(const float *g, int64_t spacing, float *to, int64_t apart) {                                      \
        const TYPE g0 = LOAD(g), g1 = LOAD(g + spacing), g2 = LOAD(g + 2 * spacing), g3 = LOAD(g + 3 * spacing);       \
        const TYPE g4 = LOAD(g + 4 * spacing), even = (g0 + g4) + g2, odd = g1 + g3;                                   \
        const TYPE rising = (g0 + 16 * g4) + 4 * g2, rising_odd = 2 * g1 + 8 * g3;                                     \
        const TYPE falling = (16 * g0 + g4) + 4 * g2, falling_odd = 8 * g1 + 2 * g3;                                   \
        STORE(to, 0.25f * g0);                                                                                         \
        STORE(to + apart, (float)(1 / 18.0) * (even + odd));                                                           \
        STORE(to + 2 * apart, (float)(1 / 18.0) * (even - odd));                                                       \
        STORE(to + 3 * apart, (float)(1 / 360.0) * (rising + rising_odd));                                             \
        STORE(to + 4 * apart, (float)(1 / 360.0) * (rising - rising_odd));                                             \
        STORE(to + 5 * apart, (float)(1 / 45.0) * (falling + falling_odd));                                            \
        STORE(to + 6 * apart, (float)(1 / 45.0) * (falling - falling_odd));                                            \
        STORE(to + 7 * apart, 0.25f * g4);                                                                             \
    }
STRIP_WEIGHTS(strip_points, V, load, store)
#if LEVEL == 2
STRIP_WEIGHTS(strip_points_half, H, load_half, store_half)
STRIP_WEIGHTS(strip_points_quarter, Q, load_quarter, store_quarter)
#endif

/* Packed as [panel][kernel row][input channel][point][channels of the panel];
 * `space` has room for a kernel row's weights turned over: run_padded vectors. */
PHASE void strip_weights(const struct op *op, const float *theta, float *packed, float *space) {
    const int channels = op->run / STRIP_KERNEL;
    for (int start = 0, width; start < op->outputs; start += width) {
        strip_panel_at(op->outputs, start, &width);
        const int present = op->outputs - start < width ? op->outputs - start : width;
        for (int r = 0; r < op->runs; r++) {
            const float *row = theta + op->weights + (int64_t)start * op->row_length + (int64_t)r * op->run_padded;
#if LEVEL == 2
            for (int k = 0; k < op->run; k += LANES) {
                V block[LANES];
                for (int lane = 0; lane < LANES; lane++)
                    block[lane] = lane < present ? load(row + lane * op->row_length + k) : (V){0};
                transpose(block);
                for (int j = 0; j < LANES; j++) store(space + (k + j) * LANES, block[j]);
            }
#else
            for (int k = 0; k < op->run; k++)
                for (int lane = 0; lane < LANES; lane++)
                    space[k * LANES + lane] = lane < present ? row[lane * op->row_length + k] : 0;
#endif
            for (int c = 0; c < channels; c++, packed += STRIP_POINTS * width) {
                const float *weights = space + c * LANES;
                const int64_t spacing = (int64_t)channels * LANES;
#if LEVEL == 2
                if (width == LANES / 4) strip_points_quarter(weights, spacing, packed, LANES / 4);
                else if (width == LANES / 2) strip_points_half(weights, spacing, packed, LANES / 2);
                else
#endif
                strip_points(weights, spacing, packed, LANES);
            }
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

/* Eight points back to four pixels. */
#define STRIP_PIXELS(TYPE, STORE, M0, M1, M2, M3, M4, M5, M6, M7, TO, SPACING)           \
    TYPE s1 = M1 + M2, d1 = M1 - M2, s2 = M3 + M4, d2 = M3 - M4, s3 = M5 + M6, d3 = M5 - M6; \
    STORE(TO, M0 + (s1 + (s2 + s3)));                                                    \
    STORE(TO + SPACING, (d1 + 2 * d2) + 0.5f * d3);                                      \
    STORE(TO + 2 * SPACING, (s1 + 4 * s2) + 0.25f * s3);                                 \
    STORE(TO + 3 * SPACING, (d1 + 8 * d2) + (0.125f * d3 + M7));

#define STRIP_STEP(P)                      \
    v = LOAD_WEIGHTS(w + P * width);       \
    KEEP(v);                               \
    acc[P][0] += v * a0[P];                \
    acc[P][1] += v * a1[P];                \
    acc[P][2] += v * a2[P];

#define STRIP_TILE(NAME, TYPE, STORE, WIDTH)                                                                           \
    PHASE void NAME(const float *const *in, int runs, int channels, int64_t row, const float *weights,                 \
                    float *const *out, int64_t out_spacing) {                                                          \
        TYPE m[STRIP_POINTS][3], acc[POINTS_AT_ONCE][3], v;                                                            \
        const int width = WIDTH;                                                                                       \
        for (int first = 0; first < STRIP_POINTS; first += POINTS_AT_ONCE) {                                           \
            const float *w = weights + first * WIDTH;                                                                  \
            UNROLLED(POINTS_AT_ONCE, p) acc[p][0] = acc[p][1] = acc[p][2] = (TYPE){0};                                 \
            for (int r = 0; r < runs; r++) {                                                                           \
                const float *a0 = in[0] + r * row + first, *a1 = in[1] + r * row + first, *a2 = in[2] + r * row + first; \
                for (int c = 0; c < channels; c++, w += STRIP_POINTS * WIDTH) {                                        \
                    EACH_POINT(STRIP_STEP)                                                                             \
                    a0 += STRIP_POINTS, a1 += STRIP_POINTS, a2 += STRIP_POINTS;                                        \
                }                                                                                                      \
            }                                                                                                          \
            UNROLLED(POINTS_AT_ONCE, p) UNROLLED(3, j) m[first + p][j] = acc[p][j];                                    \
        }                                                                                                              \
        UNROLLED(3, j) {                                                                                               \
            STRIP_PIXELS(TYPE, STORE, m[0][j], m[1][j], m[2][j], m[3][j], m[4][j], m[5][j], m[6][j], m[7][j], out[j],  \
                         out_spacing)                                                                                  \
        }                                                                                                              \
    }

#define LOAD_WEIGHTS load
STRIP_TILE(strip_tile_one, V, store, LANES)
#undef LOAD_WEIGHTS
#if LEVEL == 2
#define LOAD_WEIGHTS load_half
STRIP_TILE(strip_tile_half, H, store_half, 8)
#undef LOAD_WEIGHTS

/* Four channels: a vector holds them at four points. */
PHASE void strip_tile_quarter(const float *const *in, int runs, int channels, int64_t row, const float *w,
                              float *const *out, int64_t out_spacing) {
    V acc[3][2] = {{{0}}};
    const __m512i low = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i high = _mm512_set_epi32(7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4);
    for (int r = 0; r < runs; r++)
        for (int64_t c = 0; c < (int64_t)channels * STRIP_POINTS; c += STRIP_POINTS, w += 2 * LANES) {
            V first = load(w), second = load(w + LANES);
            KEEP(first);
            KEEP(second);
            UNROLLED(3, j) {
                const __m512 points = _mm512_castps256_ps512((__m256)load_half(in[j] + r * row + c));
                acc[j][0] += first * (V)_mm512_permutexvar_ps(low, points);
                acc[j][1] += second * (V)_mm512_permutexvar_ps(high, points);
            }
        }
    UNROLLED(3, j) {
        Q m[STRIP_POINTS];
        memcpy(m, acc[j], sizeof m);
        STRIP_PIXELS(Q, store_quarter, m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], out[j], out_spacing)
    }
}
#endif

INLINE void strip_tile(int panel, const float *const *in, int runs, int channels, int64_t row, const float *w,
                       float *const *out, int64_t out_spacing) {
#if LEVEL == 2
    if (panel == PANEL_QUARTER) strip_tile_quarter(in, runs, channels, row, w, out, out_spacing);
    else if (panel == PANEL_HALF) strip_tile_half(in, runs, channels, row, w, out, out_spacing);
    else
#endif
        strip_tile_one(in, runs, channels, row, w, out, out_spacing);
    (void)panel;
}

/* The pixels of `rows` rows of strips, `step` floats from one to the next, for one panel: under `runs` rows of weights, the
 * input's being `row` apart. */
INLINE void strip_tiles(const struct op *op, int panel, const float *from, int64_t rows, int64_t step, int runs,
                        int64_t row, int channels, const float *packed, float *to) {
    const int across = strips_across(op);
    const int64_t below = (int64_t)scratch_width(op) * op->outputs_padded, total = rows * across;
    const float *a[3];
    float *c[3];
    int strip = 0, filled = 0;
    for (int64_t s = 0; s < total; s++) {
        a[filled] = from + (int64_t)strip * channels * STRIP_POINTS;
        c[filled++] = to + (int64_t)strip_start(op, strip) * op->outputs_padded;
        if (++strip == across) strip = 0, to += below, from += step;
        if (s + 1 == total)
            for (; filled < 3; filled++) a[filled] = a[filled - 1], c[filled] = c[filled - 1]; /* repeats a strip */
        if (filled < 3) continue;
        strip_tile(panel, a, runs, channels, row, packed, c, op->outputs_padded);
        filled = 0;
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
    const int64_t row = strip_row(op), step = op->stride_h * row;
    for (int start = 0, width; start < op->outputs; start += width) {
        const int panel = strip_panel_at(op->outputs, start, &width);
        strip_tiles(op, panel, space + first * step, rows, step, op->runs, row, buffer->channels, packed, scratch + start);
        packed += (int64_t)width * op->runs * buffer->channels * STRIP_POINTS;
    }
}

#endif
