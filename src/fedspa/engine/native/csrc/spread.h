/* Backward to an operation's input: pixel by pixel, the deltas of its channels times their rows of weights, added to
 * its window.
 */
#ifndef FEDSPA_SPREAD_H
#define FEDSPA_SPREAD_H

#include "rows.h"

/* A pixel with deltas in some of its channels, and its window in the input's deltas. */
struct spot {
    const struct item *items;
    float *window;
    int count;
};

/* Backward walks the weights of many rows: shorter pieces where those of all rows would not fit the nearest cache. */
#define SPREAD_PIECE 6
#define SPREAD_ROWS 64
/* Where they do fit, it needs one accumulator a vector only, and takes longer pieces. */
#define LONG_PIECE 24
#define SPREAD_UNROLLED(N, I) _Pragma("GCC unroll 24") for (int I = 0; I < N; I++)
#define NEAR_BYTES (28 << 10)

/* In ascending order: what a vector holds behind its run is stored as it was, and overwritten by the run it belongs to. */
INLINE void store_window(const int paired, float *p, const int32_t *segment, int j, V v) {
#if LEVEL == 2
    if (paired) {
        store_half(p + segment[2 * j], (H)_mm512_castps512_ps256((__m512)v));
        store_half(p + segment[2 * j + 1], (H)_mm512_extractf32x8_ps((__m512)v, 1));
        return;
    }
#endif
    (void)paired;
    store(p + segment[j], v);
}

/* One pixel's part of backward: the deltas of its channels times their rows of weights, added to its window. */
INLINE void spread_piece(const int n, const int paired, const float *weights, const struct item *items, int count,
                         const int32_t *segment, float *window) {
    V acc[LONG_PIECE];
    SPREAD_UNROLLED(n, j) acc[j] = load_window(paired, window, segment, j);
    for (int i = 0; i < count; i++) {
        const float *row = weights + items[i].at;
        V d = splat(items[i].delta);
        SPREAD_UNROLLED(n, j) acc[j] += d * load(row + j * LANES);
    }
    SPREAD_UNROLLED(n, j) store_window(paired, window, segment, j, acc[j]);
}

typedef void (*spread_function)(const float *, const struct item *, int, const int32_t *, float *);

#define SPREAD_FUNCTION(N) SPREAD_VERSION(N, 0, )
#define PAIRED_SPREAD_FUNCTION(N) SPREAD_VERSION(N, 1, paired_)
#define SPREAD_VERSION(N, PAIRED, PREFIX)                                                                              \
    static void PREFIX##spread_##N(const float *weights, const struct item *items, int count, const int32_t *s,        \
                                   float *window) {                                                                    \
        spread_piece(N, PAIRED, weights, items, count, s, window);                                                     \
    }
#define SPREAD_ENTRY(N) spread_##N,
#define PAIRED_SPREAD_ENTRY(N) paired_spread_##N,

PIECES(SPREAD_FUNCTION)
static const spread_function SPREADS[] = {PIECES(SPREAD_ENTRY)};
#if LEVEL == 2
FEW_PIECES(PAIRED_SPREAD_FUNCTION)
static const spread_function PAIRED_SPREADS[] = {FEW_PIECES(PAIRED_SPREAD_ENTRY)};
SPREAD_FUNCTION(16)
SPREAD_FUNCTION(20)
SPREAD_FUNCTION(24)
#endif

/* Backward for the next piece, of `left` vectors and at most `most`; `length` says how many it takes. */
INLINE spread_function spread_of(const struct op *op, int left, int most, int *length) {
#if LEVEL == 2
    if (most == LONG_PIECE && !is_paired(op)) {
        if (left >= 24) return *length = 24, spread_24;
        if (left >= 20) return *length = 20, spread_20;
        if (left >= 16) return *length = 16, spread_16;
    }
#endif
    const int longest = longest_piece(op) < most ? longest_piece(op) : most;
    *length = left < longest ? left : longest;
#if LEVEL == 2
    if (is_paired(op)) return PAIRED_SPREADS[*length - 1];
#endif
    return SPREADS[*length - 1];
}

#endif
