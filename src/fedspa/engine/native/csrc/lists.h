/* The deltas of a chunk in the order that backward wants them: by row for the weights' gradients, by pixel for the
 * input's. Behind max-pooling and ReLU only the greatest, living pixel of a window carries any. */
#ifndef FEDSPA_LISTS_H
#define FEDSPA_LISTS_H

#include "work.h"

static const int32_t FIRST_PIXEL[LIST_BLOCK]; /* without pooling a unit has one pixel, number 0 */

/* Where the picks of an example's unit are, from channel `first` on. */
INLINE const int32_t *picks_at(const struct work *w, int i, int e, int u, int first) {
    const struct op *op = w->net->ops + i;
    if (!op->pool) return FIRST_PIXEL;
    return w->arg[i] + e * pick_words(op, w->net->buffers + i + 1) + (int64_t)(u / PICKS) * op->outputs_padded + first;
}

/* Ends an example's part of the lists that have one. */
INLINE void end_example(struct work *w, int outputs, int e, struct item *const *next) {
    for (int r = 0; r < outputs; r++) {
        struct list *l = w->lists + r;
        int count = (int)(next[r] - l->items);
        if (count == l->count) continue;
        l->count = l->end[l->groups] = count;
        l->example[l->groups++] = e;
    }
}

/* The deltas of up to LIST_BLOCK output channels from `first` on, as lists. Every item is written, and counted only
 * if it is alive: a branch on it would be mispredicted half the time. */
PHASE void build_lists(struct work *w, int i, int first, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int outputs = op->outputs - first < LIST_BLOCK ? op->outputs - first : LIST_BLOCK;
    const int units = out->height * out->width;
    const unsigned present = (1u << outputs) - 1;
    const int32_t *pixel = w->pixel[i];
    struct item *next[LIST_BLOCK];
    for (int r = 0; r < LIST_BLOCK; r++) {
        w->lists[r].groups = w->lists[r].count = 0;
        next[r] = w->lists[r].items;
    }
    for (int e = 0; e < n; e++) {
        if (w->factor[e] == 0) continue;
        for (int u = 0; u < units; u++) {
            const int32_t *word = picks_at(w, i, e, u, first);
            const int64_t at = e * out->example + w->at[i][u] + first;
            const float *delta = w->delta[i + 1] + at;
            const unsigned alive = alive_of_8(delta, w->unit[i + 1] + at, op->relu) & present;
            const int32_t start = (int32_t)(e * in->example) + w->window[i][u];
            for (int r = 0; r < outputs; r++) {
                *next[r] = (struct item){start + pixel[picked(word[r], u)], delta[r]};
                next[r] += alive >> r & 1;
            }
        }
        end_example(w, outputs, e, next);
    }
}

/* The living channels of a unit among outputs `from` to `to`, as items behind `next` of the pixel that each picks. */
INLINE void sort_channels(const struct op *op, int from, int to, const float *delta, const float *unit,
                          const int32_t *word, int u, struct item **next) {
    for (int first = from; first < to; first += 8) {
        const int left = to - first;
        unsigned alive = alive_of_8(delta + first, unit + first, op->relu);
        if (left < 8) alive &= (1u << left) - 1;
        for (; alive; alive &= alive - 1) {
            const int r = first + __builtin_ctz(alive), p = word ? picked(word[r], u) : 0;
            *next[p]++ = (struct item){r * op->row_length, delta[r]};
        }
    }
}

/* For every pixel of the chunk with a delta in some channel: those channels, as items whose `at` is a row of weights.
 * Rows `from` to `to` and examples `first` to `end` only. Returns the number of pixels. */
static int64_t build_spots(struct work *w, int i, int from, int to, int first, int end) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int window = op->pool_h * op->pool_w, units = out->height * out->width;
    struct item *room = w->spot_items; /* of a unit: for each pixel of its window */
    struct spot *spot = w->spots;
    for (int e = first; e < end; e++) {
        if (w->factor[e] == 0) continue;
        for (int u = 0; u < units; u++, room += window * spot_room(op)) {
            const int64_t at = e * out->example + w->at[i][u];
            struct item **next = w->next;
            for (int p = 0; p < window; p++) next[p] = room + p * spot_room(op);
            sort_channels(op, from, to, w->delta[i + 1] + at, w->unit[i + 1] + at,
                          op->pool ? picks_at(w, i, e, u, 0) : NULL, u, next);
            float *start = w->delta[i] + e * in->example + w->window[i][u];
            for (int p = 0; p < window; p++) {
                const struct item *items = room + p * spot_room(op);
                *spot = (struct spot){items, start + w->pixel[i][p], (int)(next[p] - items)};
                spot += spot->count > 0;
            }
        }
    }
    return spot - w->spots;
}

#endif
