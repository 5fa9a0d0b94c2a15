/* Backward to an operation's input: pixel by pixel, the deltas of its channels times their rows of weights, added to
 * its window.
 */
#ifndef FEDSPA_SPREAD_H
#define FEDSPA_SPREAD_H

#include "weight_gradients.h"

/* A pixel with deltas in some of its channels, and its window in the input's deltas. */
struct spot {
    const struct item *items;
    float *window;
    int count;
};

/* Backward walks the weights of many output channels: shorter pieces where all of them do not fit a near cache. */
#define SPREAD_PIECE 6
#define SPREAD_OUTPUTS 64
#define NEAR_BYTES (28 << 10)

INLINE int spread_near(const struct op *op) { return (int64_t)op->outputs * op->row_length * 4 <= NEAR_BYTES; }

/* Output channels whose items are walked together. */
INLINE int spread_outputs(const struct op *op) {
    return spread_near(op) || op->outputs < SPREAD_OUTPUTS ? op->outputs : SPREAD_OUTPUTS;
}

/* Items that a pixel has capacity for: those of that many channels, and what is written past the last of them. */
INLINE int spot_capacity(const struct op *op) { return spread_outputs(op) + PAD; }

/* One pixel's part of backward: the deltas of its channels times their rows of weights, added to its window. */
INLINE void spread_piece(const int n, const float *weights, const struct spot *spot, const int32_t *segment) {
    const struct item *items = spot->items;
    const int count = spot->count;
    float *window = spot->window;
    V acc[PIECE];
    UNROLLED(n, j) acc[j] = load(window + segment[j]);
    for (int i = 0; i < count; i++) {
        const float *row = weights + items[i].at;
        V d = splat(items[i].delta);
        UNROLLED(n, j) acc[j] += d * load(row + j * LANES);
    }
    /* In ascending order: what a vector holds behind its run is stored as it was, and overwritten by the run that it
     * belongs to. */
    UNROLLED(n, j) store(window + segment[j], acc[j]);
}

typedef void (*spread_function)(const float *, const struct spot *, const int32_t *);

#define SPREAD_FUNCTION(N)                                                                                             \
    static void spread_##N(const float *weights, const struct spot *spot, const int32_t *segment) {                    \
        spread_piece(N, weights, spot, segment);                                                                       \
    }
#define SPREAD_ENTRY(N) spread_##N,
PIECES(SPREAD_FUNCTION)
static const spread_function SPREADS[] = {PIECES(SPREAD_ENTRY)};

#endif
