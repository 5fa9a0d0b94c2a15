/* What happens to a chunk's gradients once the derivatives are known: added; scaled, clamped and added; measured. */
#ifndef FEDSPA_GRADIENTS_H
#define FEDSPA_GRADIENTS_H

#include <float.h>
#include <math.h>

#include "lists.h"

/* How the weights of an output channel are cut into pieces (weight_gradients.h): once per agent, from its mask. Vectors
 * without an active coordinate are left out: at p = .05 those are about half.
 */
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

enum { GRADIENT_ADD, GRADIENT_ADD_SCALED, GRADIENT_NORM };

/* Piece p of a row. */
INLINE void one_piece(struct work *w, int i, int r, int p, const struct list *l, int what) {
    const struct op *op = w->net->ops + i;
    const struct pieces *pieces = w->pieces + i;
    const struct piece *piece = pieces->piece + (int64_t)r * pieces->stride + p;
    if (piece->count == 0) return;
    const float *x = w->unit[i];
    const int64_t row = op->weights + (int64_t)r * op->row_length;
    const struct piece_functions *use = PIECE_FUNCTIONS + piece->count - 1;
    if (what == GRADIENT_ADD) use->add(x, l, piece, w->sum + row);
    else if (what == GRADIENT_ADD_SCALED && op->linear && !w->several) /* by the layer: by the list, company would decide the rounding */
        use->scaled_products(x, l, piece, w->units + row, w->factor, w->most);
    else if (what == GRADIENT_ADD_SCALED) use->add_scaled(x, l, piece, w->units + row, w->factor, w->most);
    else use->norm(x, l, piece, w->active + row, w->squares);
}

INLINE V alive_deltas(const struct op *op, const float *delta, const float *unit, int32_t at) {
    const V d = load(delta + at);
    return op->relu ? (V)((I)d & (load(unit + at) > 0)) : d;
}

/* The biases' gradients: an example's deltas summed over its records' pixels, a vector of channels at a time. What a vector holds
 * behind the last channel goes to the padding. */
PHASE void bias_gradients(struct work *w, int i, int n, int what) {
    const struct op *op = w->net->ops + i;
    const struct buffer *out = w->net->buffers + i + 1;
    const int units = out->height * out->width;
    for (int first = 0, end; first < n; first = end) {
        const int example = w->owner[first];
        for (end = first + 1; end < n && w->owner[end] == example;) end++;
        if (w->factor[example] == 0) continue;
        for (int r = 0; r < op->outputs; r += LANES) {
            const int64_t at = op->bias + r;
            if (!any_set(w->active + at)) continue;
            V sum = {0}, other = {0}; /* one sum would wait for itself */
            for (int e = first; e < end; e++) {
                const float *delta = w->delta[i + 1] + e * out->example + r;
                const float *unit = w->unit[i + 1] + e * out->example + r;
                int u = 0;
                for (; u + 2 <= units; u += 2) {
                    sum += alive_deltas(op, delta, unit, w->at[i][u]);
                    other += alive_deltas(op, delta, unit, w->at[i][u + 1]);
                }
                if (u < units) sum += alive_deltas(op, delta, unit, w->at[i][u]);
            }
            sum += other;
            if (what == GRADIENT_ADD) store(w->sum + at, load(w->sum + at) + sum);
            else if (what == GRADIENT_ADD_SCALED)
                store_int(w->units + at, load_int(w->units + at) + to_units(splat(w->factor[example]) * sum, splat(w->most)));
            else {
                D *lanes = &w->squares[example].lanes;
                *lanes = add_squares(*lanes, (V)((I)sum & load_int(w->active + at)));
            }
        }
    }
}

/* A linear layer's gradient, of a record, is the product of its deltas and its inputs, so where every weight is active its squares
 * add up to the product of theirs: an upper bound for the rounded products, which are larger by at most 2^-24 of
 * themselves or 2^-150. With a bias, the deltas are gradients themselves. A bound beyond float32, where a product may
 * have overflowed, counts as broken. */
PHASE void bound_linear(struct work *w, int i, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    for (int e = 0; e < n; e++) {
        if (w->factor[e] == 0) continue;
        const float *x = w->unit[i] + e * in->example, *delta = w->delta[i + 1] + e * out->example;
        const float *unit = w->unit[i + 1] + e * out->example;
        D squares = {0};
        double inputs = 0, deltas = 0;
        int j = 0;
        for (; j + LANES <= op->run; j += LANES) squares = add_squares(squares, load(x + j));
        for (; j < op->run; j++) inputs += (double)x[j] * x[j];
        inputs += sum_doubles(squares);
        for (int r = 0; r < op->outputs; r++)
            if (!op->relu || unit[r] > 0) deltas += (double)delta[r] * delta[r];
        const double norm = sqrt(inputs * deltas) * (1 + 0x1p-23) + ldexp(sqrt((double)op->outputs * op->run), -149);
        w->squares[e].linear += norm * norm + (op->bias < 0 ? 0 : deltas);
        w->squares[e].broken |= !(norm < FLT_MAX);
    }
}

/* The weights of one operation: a block of output channels after the other, and within it piece by piece. */
static void block_gradients(struct work *w, int i, int n, int what) {
    const struct op *op = w->net->ops + i;
#if LEVEL == 2
    const struct buffer *out = w->net->buffers + i + 1;
    const int many = out->height * out->width >= LANES / 2 && op->pool_h * op->pool_w <= LANES;
#else
    const int many = 0;
#endif
    for (int first = 0, block = many ? LISTS : LIST_BLOCK; first < op->outputs; first += block) {
#if LEVEL == 2
        if (many) build_many_lists(w, i, first, n);
        else
#endif
        build_lists(w, i, first, n);
        for (int p = 0; p < w->pieces[i].each; p++)
            for (int o = 0; o < block && first + o < op->outputs; o++)
                if (w->lists[o].count > 0) one_piece(w, i, first + o, p, w->lists + o, what);
    }
}

/* `what` happens to the gradients of the examples that are not left out. */
static void gradients(struct work *w, int n, int what) {
    for (int i = w->net->count - 1; i >= 0; i--) {
        const struct op *op = w->net->ops + i;
        if (op->kind != OP_WEIGHTED) continue;
        if (what == GRADIENT_NORM && op->linear && w->all_active && !w->several) {
            bound_linear(w, i, n);
            continue;
        }
        if (op->bias >= 0) bias_gradients(w, i, n, what);
        block_gradients(w, i, n, what);
    }
}

#endif
