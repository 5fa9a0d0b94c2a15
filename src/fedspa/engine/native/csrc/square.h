/* Forward 5 x 5 convolution with stride 1 and several channels: F(4, 5) of strip.h along the rows and down the columns, so
 * that 64 products make 16 pixels instead of 400. Input rows and weights that strip.h has transformed are transformed
 * again downwards, which gives eight convolutions one row high; their rows of pixels are then turned into four. In
 * float32 it loses about one bit and a half more than strip.h alone.
 */
#ifndef FEDSPA_SQUARE_H
#define FEDSPA_SQUARE_H

#include "strip.h"

#define SQUARE_EXAMPLES 6 /* that go through together: their points stay in a near cache */

INLINE int squares_down(const struct op *op) { return (op->used_h + GROUP - 1) / GROUP; }

INLINE int square_start(const struct op *op, int square) {
    int y = square * GROUP; /* the last square of a column overlaps the one above it */
    return y + GROUP > op->used_h ? op->used_h - GROUP : y;
}

/* Floats of a row of pixels, as they lie in scratch. */
INLINE int64_t pixel_row(const struct op *op) { return (int64_t)scratch_width(op) * op->rows_padded; }

/* Floats of work space: one example's transformed rows, all squares' points, and their rows of pixels. */
INLINE int64_t square_size(const struct op *op) {
    const int64_t squares = SQUARE_EXAMPLES * squares_down(op);
    return strip_size(op) + STRIP_POINTS * squares * (strip_row(op) + pixel_row(op)) + PAD;
}

/* And of that for weights: those of strip.h. */
INLINE int64_t square_weights_size(const struct op *op) {
    return (int64_t)op->rows_padded * (op->run / STRIP_KERNEL) * STRIP_POINTS * STRIP_KERNEL;
}

/* Packed as [panel][point down][input channel][point across][channels of the panel]; `space` has room for what
 * strip_weights wants, and for its result. */
PHASE void square_weights(const struct op *op, const float *theta, float *packed, float *space) {
    float *rows = space + (int64_t)(op->run + PAD) * LANES;
    strip_weights(op, theta, rows, space);
    for (int start = 0, width; start < op->rows; start += width) {
        strip_panel_at(op->rows, start, &width);
        const int64_t size = (int64_t)op->run / STRIP_KERNEL * STRIP_POINTS * width; /* a multiple of two vectors */
        for (int64_t i = 0; i < size; i += LANES) strip_points(rows + i, size, packed + i, size);
        rows += STRIP_KERNEL * size;
        packed += STRIP_POINTS * size;
    }
}

/* Eight transformed rows to eight points, each `size` floats (a multiple of eight) and `stride` to the next. */
INLINE void square_input(const float *from, int64_t size, float *to, int64_t stride) {
    for (int64_t i = 0; i < size; i += 8, from += 8, to += 8) {
        H d[STRIP_POINTS];
        UNROLLED(STRIP_POINTS, k) d[k] = load_half(from + k * size);
        const H e1 = 17 * d[4] - 4 * (d[2] + d[6]), o1 = 17 * d[3] - 4 * (d[1] + d[5]);
        const H e2 = (d[2] - 5 * d[4]) + 4 * d[6], o2 = (2 * d[1] - 10 * d[3]) + 8 * d[5];
        const H e3 = (8 * d[2] - 10 * d[4]) + 2 * d[6], o3 = (4 * d[1] - 5 * d[3]) + d[5];
        store_half(to, 4 * (d[0] - d[6]) + 21 * (d[4] - d[2]));
        store_half(to + stride, e1 + o1);
        store_half(to + 2 * stride, e1 - o1);
        store_half(to + 3 * stride, e2 + o2);
        store_half(to + 4 * stride, e2 - o2);
        store_half(to + 5 * stride, e3 + o3);
        store_half(to + 6 * stride, e3 - o3);
        store_half(to + 7 * stride, 4 * (d[7] - d[1]) + 21 * (d[3] - d[5]));
    }
}

/* One square's eight rows of pixels, `stride` apart, to four. */
INLINE void square_pixels(const struct op *op, const float *from, int64_t stride, float *to) {
    const int64_t row = pixel_row(op);
    for (int64_t x = 0; x < row; x += op->rows_padded)
        for (int c = 0; c < op->rows; c += LANES) {
            const float *m = from + x + c;
            float *out = to + x + c;
#if LEVEL == 2
            if (op->rows - c <= LANES / 4) {
                Q v[STRIP_POINTS];
                UNROLLED(STRIP_POINTS, k) v[k] = load_quarter(m + k * stride);
                STRIP_PIXELS(Q, store_quarter, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], out, row)
                continue;
            }
#endif
            V v[STRIP_POINTS];
            UNROLLED(STRIP_POINTS, k) v[k] = load(m + k * stride);
            STRIP_PIXELS(V, store, v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], out, row)
        }
}

PHASE void square_forward(const struct op *op, const struct buffer *buffer, const float *in, int64_t examples,
                          const float *packed, float *scratch, float *space) {
    const int down = squares_down(op);
    const int64_t row = strip_row(op), pixels = pixel_row(op), squares = examples * down;
    float *points = space + strip_size(op), *found = points + STRIP_POINTS * squares * row;
    for (int64_t e = 0; e < examples; e++) {
        strip_input(op, buffer, buffer->channels, in + e * buffer->example, space);
        for (int s = 0; s < down; s++)
            square_input(space + square_start(op, s) * row, row, points + (e * down + s) * row, squares * row);
    }
    for (int start = 0, width; start < op->rows; start += width) {
        const int panel = strip_panel_at(op->rows, start, &width);
        for (int p = 0; p < STRIP_POINTS; p++, packed += buffer->channels * STRIP_POINTS * width)
            strip_tiles(op, panel, points + p * squares * row, squares, row, 1, 0, buffer->channels, packed,
                        found + p * squares * pixels + start);
    }
    for (int64_t e = 0; e < examples; e++)
        for (int s = 0; s < down; s++)
            square_pixels(op, found + (e * down + s) * pixels, squares * pixels,
                          scratch + e * scratch_size(op) + square_start(op, s) * pixels);
}

#endif
