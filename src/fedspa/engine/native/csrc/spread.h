/* Backward to an operation's input: pixel by pixel, the deltas of its channels times their rows of weights, added to
 * its window.
 */
#ifndef FEDSPA_SPREAD_H
#define FEDSPA_SPREAD_H

#include "weight_gradients.h"

/* A pixel with deltas in some of its channels, and its window in the input's deltas. */
struct spot {
    const struct item *items, *below; /* below: of the pixel one row further down, where the two go together */
    float *window;
    int count, below_count;
};

/* Backward walks the weights of many output channels: shorter pieces where all of them do not fit a near cache. */
#define SPREAD_PIECE 6
#define SPREAD_OUTPUTS 64
#define NEAR_BYTES (28 << 10)
#define COLUMN_RUNS 5

INLINE int spread_near(const struct op *op) { return (int64_t)op->outputs * op->row_length * 4 <= NEAR_BYTES; }

/* Output channels whose items are walked together. */
INLINE int spread_outputs(const struct op *op) {
    return spread_near(op) || op->outputs < SPREAD_OUTPUTS ? op->outputs : SPREAD_OUTPUTS;
}

/* Items that a pixel has room for: those of that many channels, and what is written past the last of them. */
INLINE int spot_room(const struct op *op) { return spread_outputs(op) + PAD; }

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

#if LEVEL == 2
/* The same for a column of `height` units that each pick from two pixels, one above the other, of a kernel five high with
 * runs of `length` vectors and, with `tail`, up to four floats more. The windows of a unit's two pixels share all but one
 * row, and those of two units all but two: a row stays in registers from the first unit that adds to it to the last. It
 * takes a tenth off a step of the MNIST CNN and of small-cnn at p = .05; kernels three high gain nothing by it. */
INLINE void spread_column(const int length, const int tail, const float *weights, const struct spot *spot, int height,
                          const int32_t *segment) {
    const int runs = COLUMN_RUNS;
    const int stride = length + tail; /* vectors in memory, of which the tail fills a quarter */
    V acc[24];
    Q rest[6];
#define COLUMN_ROWS(FROM, TO, VECTOR, QUARTER)                                                                         \
    UNROLLED(6, r) {                                                                                                   \
        if (r < FROM || r >= TO) continue;                                                                             \
        UNROLLED(length, j) VECTOR(spot->window + segment[r * stride + j], acc[r * length + j]);                       \
        if (tail) QUARTER(spot->window + segment[r * stride + length], rest[r]);                                       \
    }
#define COLUMN_LOAD(FROM, V) V = load(FROM)
#define COLUMN_LOAD_QUARTER(FROM, V) V = load_quarter(FROM)
    COLUMN_ROWS(0, runs - 1, COLUMN_LOAD, COLUMN_LOAD_QUARTER)
    for (const struct spot *end = spot + height; spot < end; spot++) {
        COLUMN_ROWS(runs - 1, runs + 1, COLUMN_LOAD, COLUMN_LOAD_QUARTER)
        UNROLLED(2, lower) {
            const struct item *items = lower ? spot->below : spot->items;
            const struct item *last = items + (lower ? spot->below_count : spot->count);
            for (; items < last; items++) {
                const float *row = weights + items->at;
                const V d = splat(items->delta);
                const Q few = items->delta - (Q){0};
                UNROLLED(runs, r) {
                    UNROLLED(length, j) acc[(r + lower) * length + j] += d * load(row + (r * stride + j) * LANES);
                    if (tail) rest[r + lower] += few * load_quarter(row + (r * stride + length) * LANES);
                }
            }
        }
        COLUMN_ROWS(0, 2, store, store_quarter)
        UNROLLED(runs - 1, r) { /* two rows up: the next unit's window */
            UNROLLED(length, j) acc[r * length + j] = acc[(r + 2) * length + j];
            if (tail) rest[r] = rest[r + 2];
        }
    }
    spot--;
    UNROLLED(runs - 1, r) {
        UNROLLED(length, j) store(spot->window + segment[(r + 2) * stride + j], acc[r * length + j]);
        if (tail) store_quarter(spot->window + segment[(r + 2) * stride + length], rest[r]);
    }
}
#endif

typedef void (*column_function)(const float *, const struct spot *, int, const int32_t *);
typedef void (*spread_function)(const float *, const struct spot *, const int32_t *);

#define SPREAD_FUNCTION(N)                                                                                             \
    static void spread_##N(const float *weights, const struct spot *spot, const int32_t *segment) {                    \
        spread_piece(N, weights, spot, segment);                                                                       \
    }
#define SPREAD_ENTRY(N) spread_##N,
PIECES(SPREAD_FUNCTION)
static const spread_function SPREADS[] = {PIECES(SPREAD_ENTRY)};

#if LEVEL == 2
#define SPREAD_COLUMN(LENGTH, TAIL)                                                                                    \
    static void spread_column_##LENGTH##_##TAIL(const float *weights, const struct spot *spot, int height,             \
                                                const int32_t *segment) {                                              \
        spread_column(LENGTH, TAIL, weights, spot, height, segment);                                                   \
    }
SPREAD_COLUMN(1, 0) SPREAD_COLUMN(1, 1) SPREAD_COLUMN(2, 0) SPREAD_COLUMN(2, 1) SPREAD_COLUMN(3, 0) SPREAD_COLUMN(3, 1)
SPREAD_COLUMN(4, 0)
/* By the vectors of a run, the tail's among them; then by whether there is one. */
static const column_function COLUMNS[][2] = {{spread_column_1_0, NULL},
                                             {spread_column_2_0, spread_column_1_1},
                                             {spread_column_3_0, spread_column_2_1},
                                             {spread_column_4_0, spread_column_3_1}};
#endif

/* Backward for a column of units, or NULL where that is not possible: each picks from two rows of pixels that no other
 * picks from, whose windows are a row apart, and all weights are near. */
INLINE column_function spread_column_of(const struct op *op) {
#if LEVEL == 2
    const int length = op->run_padded / LANES, tail = length > 1 && op->run % LANES > 0 && op->run % LANES <= LANES / 4;
    if (op->pool_h != 2 || op->pool_stride_h != 2 || op->stride_h != 1) return NULL;
    if (op->pool_pad_h > 0 || op->pool_pad_w > 0) return NULL; /* padding has no window */
    if (spread_near(op) && op->runs == COLUMN_RUNS && length <= 4) return COLUMNS[length - 1][tail];
#endif
    (void)op;
    return NULL;
}

#endif
