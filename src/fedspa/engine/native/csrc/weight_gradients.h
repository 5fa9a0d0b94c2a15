/* Weight gradients, row by row of the row layout (one output channel a row).
 *
 * A row's gradient is a sum over the pixels that carry a delta: delta times the input window there. The list of those
 * pixels is short behind max-pooling and ReLU. A piece of the row stays in registers while the list is walked; there
 * an example's gradient is clamped and added, so that it never exists as a whole. A linear layer is the case of one
 * pixel an example.
 */
#ifndef FEDSPA_WEIGHT_GRADIENTS_H
#define FEDSPA_WEIGHT_GRADIENTS_H

#include <float.h>

#include "net.h"
#include "simd.h"

struct item {
    int32_t at; /* in a row's list: where the window starts; in a pixel's: where the row of weights does */
    float delta;
};

/* Deltas of one row over some examples: those of an example lie together and end at `end`. */
struct list {
    struct item *items;
    int count, groups;
    int32_t *end, *example;
};

/* The squared norm of an example's gradient, on its active coordinates. */
struct square_sum {
    D lanes;       /* sums of squares that are yet to be added up, */
    double linear; /* and those of linear layers' bounds; not finite where a coordinate is not */
    int broken;    /* a NaN or an infinity */
};

/* A row is cut into vectors (`from`: where each starts within a window, `to`: and within the row), and these into
 * pieces. Longer pieces walk the list less often; two accumulators a vector must fit the registers. */
#if LEVEL == 2
#define PIECE 12
#else
#define PIECE 6
#endif

struct piece {
    int32_t count;
    const int32_t *from, *to;
};

#define PIECES(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) PIECES_MORE(DO)
#if LEVEL == 2
#define PIECES_MORE(DO) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#else
#define PIECES_MORE(DO)
#endif

/* sum += the list's gradient. */
INLINE void add_piece(const int n, const float *x, const struct list *l, const struct piece *s,
                      float *sum) {
    const int32_t *from = s->from, *to = s->to;
    V acc[PIECE];
    UNROLLED(n, j) acc[j] = load(sum + to[j]);
    for (int i = 0; i < l->count; i++) {
        const float *p = x + l->items[i].at;
        V d = splat(l->items[i].delta);
        UNROLLED(n, j) acc[j] += d * load(p + from[j]);
    }
    UNROLLED(n, j) store(sum + to[j], acc[j]);
}

/* One example's piece. Every pass over an example's gradient must see the same bits, or the norm would be that of
 * another vector than the one that is scaled by it: where a sum over pixels cancels, two ways to round it differ by as
 * much as its terms are large. */
INLINE const struct item *sum_example(const int n, const float *x, const struct item *item,
                                      const struct item *end, const int32_t *from, V *acc) {
    UNROLLED(n, j) acc[j] = (V){0};
    for (; item < end; item++) {
        const float *p = x + item->at;
        V d = splat(item->delta);
        UNROLLED(n, j) acc[j] = multiply_add(d, load(p + from[j]), acc[j]);
    }
    return item;
}

/* sum += each example's gradient times its factor, in units. */
INLINE void add_scaled_piece(const int n, const float *x, const struct list *l,
                             const struct piece *s, int32_t *sum, const float *factor, float most) {
    const int32_t *from = s->from, *to = s->to;
    V acc[PIECE];
    I total[PIECE];
    UNROLLED(n, j) total[j] = load_int(sum + to[j]);
    const struct item *item = l->items;
    for (int g = 0; g < l->groups; g++) {
        item = sum_example(n, x, item, l->items + l->end[g], from, acc);
        V f = splat(factor[l->example[g]]);
        UNROLLED(n, j) total[j] += to_units(f * acc[j], splat(most));
    }
    UNROLLED(n, j) store_int(sum + to[j], total[j]);
}

/* Finite, so that nothing times zero is NaN. */
INLINE float scaled_delta(float delta, float factor) {
    const float scaled = delta * factor;
    return scaled > FLT_MAX ? FLT_MAX : scaled < -FLT_MAX ? -FLT_MAX : scaled;
}

/* The same where each example has one pixel, so that there is no sum that could cancel: the delta is scaled before it is
 * multiplied. Two roundings either way, which the clip margin covers. */
INLINE void add_scaled_products(const int n, const float *x, const struct list *l,
                                const struct piece *s, int32_t *sum, const float *factor, float most) {
    const int32_t *from = s->from, *to = s->to;
    I total[PIECE];
    UNROLLED(n, j) total[j] = load_int(sum + to[j]);
    for (int i = 0; i < l->count; i++) {
        const float *p = x + l->items[i].at;
        const V d = splat(scaled_delta(l->items[i].delta, factor[l->example[i]]));
        UNROLLED(n, j) total[j] += to_units(d * load(p + from[j]), splat(most));
    }
    UNROLLED(n, j) store_int(sum + to[j], total[j]);
}

/* Adds up each example's squares. */
INLINE void norm_piece(const int n, const float *x, const struct list *l, const struct piece *s, const int32_t *active,
                       struct square_sum *sums) {
    const int32_t *from = s->from, *to = s->to;
    V acc[PIECE];
    const struct item *item = l->items;
    for (int g = 0; g < l->groups; g++) {
        item = sum_example(n, x, item, l->items + l->end[g], from, acc);
        D squares[2] = {{0}}; /* one sum would wait for itself */
        UNROLLED(n, j) squares[j % 2] = add_squares(squares[j % 2], (V)((I)acc[j] & load_int(active + to[j])));
        sums[l->example[g]].lanes += squares[0] + squares[1];
    }
}

#define PIECE_VERSIONS(N)                                                                                              \
    static void add_##N(const float *x, const struct list *l, const struct piece *s, float *sum) {                     \
        add_piece(N, x, l, s, sum);                                                                                    \
    }                                                                                                                  \
    static void add_scaled_##N(const float *x, const struct list *l, const struct piece *s, int32_t *sum,              \
                               const float *f, float most) {                                                           \
        add_scaled_piece(N, x, l, s, sum, f, most);                                                                    \
    }                                                                                                                  \
    static void scaled_products_##N(const float *x, const struct list *l, const struct piece *s, int32_t *sum,         \
                                    const float *f, float most) {                                                      \
        add_scaled_products(N, x, l, s, sum, f, most);                                                                 \
    }                                                                                                                  \
    static void norm_##N(const float *x, const struct list *l, const struct piece *s, const int32_t *active,           \
                         struct square_sum *sums) {                                                                    \
        norm_piece(N, x, l, s, active, sums);                                                                          \
    }
PIECES(PIECE_VERSIONS)

/* What can be done with a piece, by its length. */
#define PIECE_ENTRY(N) {add_##N, add_scaled_##N, scaled_products_##N, norm_##N},
static const struct piece_functions {
    void (*add)(const float *, const struct list *, const struct piece *, float *);
    void (*add_scaled)(const float *, const struct list *, const struct piece *, int32_t *, const float *, float);
    void (*scaled_products)(const float *, const struct list *, const struct piece *, int32_t *, const float *, float);
    void (*norm)(const float *, const struct list *, const struct piece *, const int32_t *, struct square_sum *);
} PIECE_FUNCTIONS[] = {PIECES(PIECE_ENTRY)};

#endif
