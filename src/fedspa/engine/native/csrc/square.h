/* Forward 5 x 5 convolution with stride 1 and several channels: F(4, 5) of strip.h along the rows, and downwards
 * F(2, 3) of the first three rows of weights plus F(2, 2) of the other two, at the points 0, 1, infinity and, for the
 * former, -1. At a point of both, their products are added before they are turned into pixels. So 56 products make
 * eight pixels instead of 200. Points as small as these lose nothing; F(4, 5) downwards would take 32, and lose a bit and a
 * half.
 *
 * Input rows and weights that strip.h has transformed are transformed again downwards, which gives convolutions two
 * rows or one row high, one for each point.
 */
#ifndef FEDSPA_SQUARE_H
#define FEDSPA_SQUARE_H

#include "strip.h"

#define SQUARE_EXAMPLES 3 /* that go through together: their points stay in a near cache */
#define SQUARE_HEIGHT 2   /* rows of pixels */
#define SQUARE_POINTS 4   /* downwards; the last is of F(2, 3) alone */
#define SQUARE_ROWS 7     /* transformed rows of both */

INLINE int squares_down(const struct op *op) { return (op->used_h + SQUARE_HEIGHT - 1) / SQUARE_HEIGHT; }

INLINE int square_start(const struct op *op, int square) {
    const int y = square * SQUARE_HEIGHT; /* the last one overlaps the one above it */
    return y + SQUARE_HEIGHT > op->used_h ? op->used_h - SQUARE_HEIGHT : y;
}

/* Floats of a row of pixels, as they lie in scratch. */
INLINE int64_t pixel_row(const struct op *op) { return (int64_t)scratch_width(op) * op->rows_padded; }

/* Floats of work space: one example's transformed rows, all squares' points, and their rows of pixels. */
INLINE int64_t square_size(const struct op *op) {
    const int64_t squares = SQUARE_EXAMPLES * squares_down(op);
    return strip_size(op) + squares * (SQUARE_ROWS * strip_row(op) + SQUARE_POINTS * pixel_row(op)) + PAD;
}

/* And of that for weights: those of strip.h. */
INLINE int64_t square_weights_size(const struct op *op) {
    return (int64_t)op->rows_padded * (op->run / STRIP_KERNEL) * STRIP_POINTS * STRIP_KERNEL;
}

/* From five rows of weights, `size` apart, to those of each point: two behind each other, or one. */
INLINE void square_points(const float *g, int64_t size, float *to) {
    const V g0 = load(g), g1 = load(g + size), g2 = load(g + 2 * size), g3 = load(g + 3 * size), g4 = load(g + 4 * size);
    const V even = 0.5f * (g0 + g2), odd = 0.5f * g1;
    store(to, g0);
    store(to + size, g3);
    store(to + 2 * size, even + odd);
    store(to + 3 * size, g3 + g4);
    store(to + 4 * size, g2);
    store(to + 5 * size, g4);
    store(to + 6 * size, even - odd);
}

/* Packed as [panel][point down][row of weights][input channel][point across][channels of the panel]; `space` has room for
 * what strip_weights wants, and for its result. */
PHASE void square_weights(const struct op *op, const float *theta, float *packed, float *space) {
    float *rows = space + (int64_t)(op->run + PAD) * LANES;
    strip_weights(op, theta, rows, space, 0);
    for (int start = 0, width; start < op->rows; start += width) {
        strip_panel_at(op->rows, start, &width);
        const int64_t size = (int64_t)op->run / STRIP_KERNEL * STRIP_POINTS * width; /* a multiple of two vectors */
        for (int64_t i = 0; i < size; i += LANES) square_points(rows + i, size, packed + i);
        rows += STRIP_KERNEL * size;
        packed += SQUARE_ROWS * size;
    }
}

/* Six transformed rows, each `size` floats (a multiple of eight), to the four points of F(2, 3), `stride` apart, and the
 * three of F(2, 2) behind them. */
INLINE void square_input(const float *from, int64_t size, float *to, int64_t stride) {
    for (int64_t i = 0; i < size; i += 8, from += 8, to += 8) {
        H d[6];
        UNROLLED(6, k) d[k] = load_half(from + k * size);
        float *second = to + SQUARE_POINTS * stride;
        store_half(to, d[0] - d[2]);
        store_half(to + stride, d[1] + d[2]);
        store_half(to + 2 * stride, d[1] - d[3]);
        store_half(to + 3 * stride, d[2] - d[1]);
        store_half(second, d[3] - d[4]);
        store_half(second + stride, d[4]);
        store_half(second + 2 * stride, d[4] - d[5]);
    }
}

/* The rows of pixels of a square's points, `stride` apart, to two. */
#define SQUARE_PIXELS(TYPE, LOAD, STORE)                                                                               \
    const TYPE zero = LOAD(m), one = LOAD(m + stride), far = LOAD(m + 2 * stride), minus = LOAD(m + 3 * stride);       \
    STORE(out, zero + (one + minus));                                                                                  \
    STORE(out + row, (one - minus) - far);

INLINE void square_pixels(const struct op *op, const float *from, int64_t stride, float *to) {
    const int64_t row = pixel_row(op);
    for (int64_t x = 0; x < row; x += op->rows_padded)
        for (int c = 0; c < op->rows; c += LANES) {
            const float *m = from + x + c;
            float *out = to + x + c;
#if LEVEL == 2
            if (op->rows - c <= LANES / 4) {
                SQUARE_PIXELS(Q, load_quarter, store_quarter)
                continue;
            }
#endif
            SQUARE_PIXELS(V, load, store)
        }
}

PHASE void square_forward(const struct op *op, const struct buffer *buffer, const float *in, int64_t examples,
                          const float *packed, float *scratch, float *space) {
    const int down = squares_down(op);
    const int64_t row = strip_row(op), pixels = pixel_row(op), squares = examples * down;
    float *points = space + strip_size(op), *found = points + SQUARE_ROWS * squares * row;
    for (int64_t e = 0; e < examples; e++) {
        strip_input(op, buffer, buffer->channels, in + e * buffer->example, space);
        for (int s = 0; s < down; s++)
            square_input(space + square_start(op, s) * row, row, points + (e * down + s) * row, squares * row);
    }
    for (int start = 0, width; start < op->rows; start += width) {
        const int panel = strip_panel_at(op->rows, start, &width);
        for (int p = 0; p < SQUARE_POINTS; p++) {
            const int runs = p + 1 < SQUARE_POINTS ? 2 : 1;
            strip_tiles(op, panel, points + p * squares * row, squares, row, runs, SQUARE_POINTS * squares * row,
                        buffer->channels, packed, found + p * squares * pixels + start);
            packed += runs * (int64_t)buffer->channels * STRIP_POINTS * width;
        }
    }
    for (int64_t e = 0; e < examples; e++)
        for (int s = 0; s < down; s++)
            square_pixels(op, found + (e * down + s) * pixels, squares * pixels,
                          scratch + e * scratch_size(op) + square_start(op, s) * pixels);
}

#endif
