/* How the weights of an output channel are cut into pieces (weight_gradients.h): once per agent, from its mask. Vectors
 * without an active coordinate are left out: at p = .05 those are about half.
 */
#ifndef FEDSPA_PIECES_H
#define FEDSPA_PIECES_H

#include "work.h"

/* One output channel's pieces: as few as its vectors need, of about the same length. */
static void cut_output(const struct work *w, int i, int64_t row, struct piece *piece, int32_t *from, int32_t *to) {
    const int pieces = w->pieces[i].each;
    int count = 0;
    for (int vector = 0; vector < segments_of(w->net->ops + i); vector++) {
        if (!w->all_active && !any_set(w->active + row + vector * LANES)) continue;
        from[count] = w->segment[i][vector];
        to[count++] = vector * LANES;
    }
    const int needed = (count + PIECE - 1) / PIECE;
    for (int p = 0, done = 0; p < pieces; p++, piece++) {
        const int size = p < needed ? (count - done + needed - p - 1) / (needed - p) : 0;
        *piece = (struct piece){size, from + done, to + done};
        done += size;
    }
}

/* The pieces of every output channel; where all coordinates are active they are the same for all. Is there memory for
 * them? */
static int cut_weights(struct work *w) {
    for (int i = 0; i < w->net->count; i++) {
        const struct op *op = w->net->ops + i;
        if (op->kind != OP_WEIGHTED) continue;
        const int all = segments_of(op), outputs = w->all_active ? 1 : op->outputs;
        struct pieces *pieces = w->pieces + i;
        pieces->each = (all + PIECE - 1) / PIECE;
        pieces->stride = w->all_active ? 0 : pieces->each;
        pieces->piece = take(w, (int64_t)outputs * pieces->each * (int64_t)sizeof *pieces->piece);
        int32_t *from = take(w, 4 * (int64_t)outputs * all), *to = take(w, 4 * (int64_t)outputs * all);
        for (int o = 0; o < outputs && !w->failed; o++)
            cut_output(w, i, op->weights + (int64_t)o * op->row_length, pieces->piece + o * pieces->each,
                       from + (int64_t)o * all, to + (int64_t)o * all);
    }
    return !w->failed;
}

#endif
