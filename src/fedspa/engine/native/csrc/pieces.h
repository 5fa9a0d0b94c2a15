/* How the rows of an operation's gradient are cut into pieces (rows.h): once an agent, from its mask.
 *
 * Vectors without an active coordinate are left out: at p = .05 those are about half. What a piece reads should stay in
 * a near cache while all rows and pixels are walked, so where pixels have whole vectors of channels, a piece takes
 * one vector of channels at every place of the kernel.
 */
#ifndef FEDSPA_PIECES_H
#define FEDSPA_PIECES_H

#include "work.h"

#define NEAR_INPUTS (80 << 10) /* of inputs that pieces walk over and over */

INLINE int is_sliced(const struct op *op, const struct buffer *in) { return !op->linear && in->channels % PAD == 0; }

/* Vectors that are cut together, in as few pieces as they need: of a slice of the channels, or all of a row. */
INLINE int block_of(const struct op *op, const struct buffer *in) {
    const int kernel = op->kernel_h * op->kernel_w, slices = PIECE / kernel > 1 ? PIECE / kernel : 1;
    const int all = segments_of(op);
    return is_sliced(op, in) && slices * kernel < all ? slices * kernel : all;
}

/* The vector that comes n-th: a slice's places of the kernel one after the other, then the next slice's. */
INLINE int vector_at(const struct op *op, const struct buffer *in, int n) {
    if (!is_sliced(op, in)) return n;
    const int kernel = op->kernel_h * op->kernel_w;
    return n % kernel * (in->channels / LANES) + n / kernel;
}

/* Examples whose slices stay near. */
static int examples_near(const struct op *op, const struct buffer *in, int chunk) {
    if (!is_sliced(op, in)) return chunk;
    const int64_t share = larger(1, segments_of(op) / block_of(op, in));
    const int64_t fit = NEAR_INPUTS / (4 * in->example / share);
    return fit < 1 ? 1 : fit > chunk ? chunk : (int)fit;
}

/* One row's pieces. */
static void cut_row(const struct work *w, int i, int64_t row, struct piece *piece, int32_t *from, int32_t *to) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i;
    const int block = block_of(op, in), all = segments_of(op), paired = is_paired(op) ? 2 : 1;
    const int longest = longest_piece(op), pieces = (block + longest - 1) / longest;
    for (int start = 0; start < all; start += block) {
        int count = 0;
        for (int n = start; n < start + block && n < all; n++) {
            const int vector = vector_at(op, in, n);
            if (!w->all_active && !any_set(w->active + row + vector * LANES)) continue;
            for (int half = 0; half < paired; half++) from[paired * count + half] = w->segment[i][paired * vector + half];
            to[count++] = vector * LANES;
        }
        const int needed = (count + longest - 1) / longest;
        for (int p = 0, done = 0; p < pieces; p++, piece++) {
            const int size = p < needed ? (count - done + needed - p - 1) / (needed - p) : 0;
            *piece = (struct piece){size, from + paired * done, to + done};
            done += size;
        }
        from += paired * count;
        to += count;
    }
}

/* The pieces of every row; where all coordinates are active they are the same for all. Is there memory for them? */
static int cut_rows(struct work *w) {
    for (int i = 0; i < w->net->count; i++) {
        const struct op *op = w->net->ops + i;
        const struct buffer *in = w->net->buffers + i;
        if (op->kind != OP_ROWS) continue;
        const int block = block_of(op, in), all = segments_of(op), paired = is_paired(op) ? 2 : 1;
        const int longest = longest_piece(op), rows = w->all_active ? 1 : op->rows;
        struct pieces *pieces = w->pieces + i;
        pieces->each = (all + block - 1) / block * ((block + longest - 1) / longest);
        pieces->stride = w->all_active ? 0 : pieces->each;
        pieces->examples = examples_near(op, in, w->chunk);
        pieces->piece = take(w, (int64_t)rows * pieces->each * (int64_t)sizeof *pieces->piece);
        int32_t *from = take(w, 4 * (int64_t)rows * all * paired), *to = take(w, 4 * (int64_t)rows * all);
        for (int r = 0; r < rows && !w->failed; r++)
            cut_row(w, i, op->weights + (int64_t)r * op->row_length, pieces->piece + r * pieces->each,
                    from + (int64_t)r * all * paired, to + (int64_t)r * all);
    }
    return !w->failed;
}

#endif
