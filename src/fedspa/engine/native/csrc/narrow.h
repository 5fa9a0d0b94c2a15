/* Forward 5 x 5 convolution of one channel to nine or ten with 2 x 2 max-pooling: what begins the usual net for small
 * images. As in strip.h, bit by bit where compilers fuse a product and a sum there, but ten channels at eight points fill
 * five vectors, where a vector a point would leave six lanes of sixteen empty.
 *
 * A strip of four pixels is walked from the top of an example to its bottom: a row of the input is multiplied by all five
 * rows of weights for the five rows of pixels that it is part of, which stay in registers until they are complete,
 * become pixels and are pooled there.
 */
#ifndef FEDSPA_NARROW_H
#define FEDSPA_NARROW_H

#include "pool.h"
#include "strip.h"

#define NARROW 10 /* channels */

INLINE int is_narrow(const struct op *op) {
    return LEVEL == 2 && op->strip && op->run == STRIP_KERNEL && op->kernel_h == STRIP_KERNEL && op->stride_h == 1 &&
           op->rows > LANES / 2 && op->rows <= NARROW && pools_pairs(op) &&
           op->used_w % GROUP == 0 && op->used_h >= 4;
}

#if LEVEL == 2
#define NARROW_VECTORS (STRIP_POINTS * NARROW / LANES)

/* The point that each lane belongs to: a point's channels lie behind those of the point before. */
static const int32_t NARROW_POINT[NARROW_VECTORS][LANES] = {
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3},
    {3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4}, {4, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6},
    {6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7},
};

/* Lane `from` of two vectors, and those behind it. */
#define FROM_LANE(LOW, HIGH, FROM) ((V)_mm512_alignr_epi32((__m512i)(HIGH), (__m512i)(LOW), FROM))
#define KEEP_PIXEL(TO, V) *(TO) = V

/* Eight points of a strip to its four pixels. */
INLINE void narrow_pixels(const V *m, V *pixel) {
    const V m1 = FROM_LANE(m[0], m[1], 10), m2 = FROM_LANE(m[1], m[1], 4), m3 = FROM_LANE(m[1], m[2], 14);
    const V m4 = FROM_LANE(m[2], m[3], 8), m5 = FROM_LANE(m[3], m[3], 2), m6 = FROM_LANE(m[3], m[4], 12);
    const V m7 = FROM_LANE(m[4], m[4], 6);
    STRIP_PIXELS(V, KEEP_PIXEL, m[0], m1, m2, m3, m4, m5, m6, m7, pixel, 1)
}

/* Two rows of the input, transformed, times all weights, added to those of the six rows of pixels they are part of that
 * are among `from` to `to`: the first row of the input is the last that the first of them needs. */
INLINE void narrow_rows(const int from, const int to, const float *points, int64_t row, const float *weights,
                        V acc[STRIP_KERNEL + 1][NARROW_VECTORS]) {
    const __m512 upper = _mm512_castps256_ps512((__m256)load_half(points));
    const __m512 lower = _mm512_castps256_ps512((__m256)load_half(points + row));
    UNROLLED(NARROW_VECTORS, v) {
        const float *now = weights;
        __asm__ volatile("" : "+r"(now)); /* else compilers load all weights at once, and have no registers for them */
        const __m512i point = _mm512_loadu_si512(NARROW_POINT[v]);
        const V a = (V)_mm512_permutexvar_ps(point, upper), b = (V)_mm512_permutexvar_ps(point, lower);
        UNROLLED(STRIP_KERNEL, r) {
            const int above = STRIP_KERNEL - 1 - r, below = STRIP_KERNEL - r;
            V w = load(now + (r * NARROW_VECTORS + v) * LANES);
            KEEP(w);
            if (above >= from && above < to) acc[above][v] = multiply_add(a, w, r > 0 ? acc[above][v] : (V){0});
            if (below >= from && below < to) acc[below][v] = multiply_add(b, w, r > 0 ? acc[below][v] : (V){0});
        }
    }
}

/* A row of the strip's units, and the picks: from unit number u on, whose words are 0 so far. */
INLINE void narrow_units(const struct op *op, const struct buffer *out, V acc[STRIP_KERNEL + 1][NARROW_VECTORS], V shift,
                         float *unit, int32_t *picks, int u) {
    V upper[GROUP], lower[GROUP], best;
    narrow_pixels(acc[0], upper);
    narrow_pixels(acc[1], lower);
    int32_t *word = picks + (int64_t)(u / PICKS) * op->rows_padded;
    I words = load_int(word);
    UNROLLED(2, j) {
        words |= pool_pixels(op, upper[2 * j], upper[2 * j + 1], lower[2 * j], lower[2 * j + 1], shift, &best) << 8 * (u % PICKS + j);
        store_first(unit + j * out->channels, best, op->rows);
    }
    store_int(word, words);
    UNROLLED(STRIP_KERNEL - 1, j) UNROLLED(NARROW_VECTORS, v) acc[j][v] = acc[j + 2][v]; /* two rows down */
}

/* One strip from top to bottom: its transformed input starts at `points`, its units at `unit`, with number u. */
PHASE void narrow_strip(const struct op *op, const struct buffer *out, const float *points, const float *weights,
                        V shift, float *unit, int32_t *picks, int u) {
    const int64_t row = strip_row(op);
    V acc[STRIP_KERNEL + 1][NARROW_VECTORS];
    narrow_rows(4, 6, points, row, weights, acc);
    UNROLLED(2, j) UNROLLED(NARROW_VECTORS, v) acc[2 + j][v] = acc[4 + j][v];
    narrow_rows(2, 6, points + 2 * row, row, weights, acc);
    UNROLLED(STRIP_KERNEL - 1, j) UNROLLED(NARROW_VECTORS, v) acc[j][v] = acc[j + 2][v];
    points += 4 * row;
    for (int y = 2; y < out->height; y++, points += 2 * row, unit += out->row, u += out->width) {
        narrow_rows(0, 6, points, row, weights, acc);
        narrow_units(op, out, acc, shift, unit, picks, u);
    }
    narrow_rows(0, 4, points, row, weights, acc);
    narrow_units(op, out, acc, shift, unit, picks, u);
    narrow_rows(0, 2, points + 2 * row, row, weights, acc);
    narrow_units(op, out, acc, shift, unit + out->row, picks, u + out->width);
}

/* One example, whose transformed input is in `space`. */
static void narrow_forward(const struct op *op, const struct buffer *out, const float *space, const float *packed,
                           const float *theta, float *to, int32_t *picks) {
    const V shift = op->bias >= 0 ? load(theta + op->bias) : (V){0};
    memset(picks, 0, 4 * (size_t)pick_words(op, out));
    for (int s = 0; s < strips_across(op); s++)
        narrow_strip(op, out, space + s * STRIP_POINTS, packed, shift, to + out->origin + 2 * s * out->channels, picks, 2 * s);
}
#endif

#endif
