/* What happens to a chunk's gradients once the derivatives are known: added; scaled, clamped and added; looked at; measured. */
#ifndef FEDSPA_GRADIENTS_H
#define FEDSPA_GRADIENTS_H

#include <float.h>
#include <math.h>

#include "lists.h"

enum { GRADIENT_ADD, GRADIENT_ADD_SCALED, GRADIENT_LOOK, GRADIENT_NORM };

/* The sum of an example's deltas in a list: vectors of items, of which only the deltas count. */
INLINE float sum_deltas(const struct item *item, const struct item *end) {
    const int step = LANES / 2;
    float rest = 0;
    if (end - item < step) {
        for (; item < end; item++) rest += item->delta;
        return rest;
    }
    V sum = {0};
    I odd;
    for (int j = 0; j < LANES; j++) odd[j] = -(j % 2);
    for (; item + step <= end; item += step) sum += (V)(load_int(&item->at) & odd);
    for (; item < end; item++) rest += item->delta;
    return sum_lanes(sum) + rest;
}

static void bias_row(struct work *w, int i, const struct list *l, int64_t place, int what, float bound) {
    const struct op *op = w->net->ops + i;
    for (int g = 0, item = 0; g < l->groups; item = l->end[g++]) {
        const float v = sum_deltas(l->items + item, l->items + l->end[g]);
        if (what == GRADIENT_ADD) w->sum[place] += v;
        else if (what == GRADIENT_ADD_SCALED) w->units[place] += to_unit(w->factor[l->example[g]] * v);
        else {
            if (what == GRADIENT_NORM && w->kept[i])
                w->kept[i][l->example[g] * kept_floats(op) + place - op->weights] = v;
            if (!w->active[place]) continue;
            struct look *look = w->looks + l->example[g];
            look->squares += (double)v * v;
            look->nonzero += v != 0;
            look->above += __builtin_fabsf(v) > bound;
            look->broken |= v - v != 0;
        }
    }
}

static void one_row(struct work *w, int i, int r, const struct list *l, int what, float bound) {
    const struct op *op = w->net->ops + i;
    const float *x = w->unit[i];
    const int64_t row = op->weights + (int64_t)r * op->row_length;
    const int one_each = l->count == l->groups;
    float *kept = w->kept[i];
    for (int s = 0, n; s < segments_of(op); s += n) {
        n = piece_length(op, segments_of(op) - s, PIECE);
        const int64_t at = row + (int64_t)s * LANES;
        const int32_t *segment = w->segment[i] + s * (is_paired(op) ? 2 : 1);
        const struct piece_functions *use = piece_of(op, n);
        if (what == GRADIENT_ADD) use->add(x, l, segment, w->sum + at);
        else if (what == GRADIENT_ADD_SCALED && one_each) use->scaled_products(x, l, segment, w->units + at, w->factor);
        else if (what == GRADIENT_ADD_SCALED) use->add_scaled(x, l, segment, w->units + at, w->factor);
        else if (what == GRADIENT_LOOK) use->look(x, l, segment, w->active + at, bound, w->looks);
        else
            use->norm(x, l, segment, w->active + at, w->looks, kept ? kept + at - op->weights : NULL, kept_floats(op));
    }
    if (op->bias >= 0) bias_row(w, i, l, op->bias + r, what, bound);
}

/* A linear layer's gradient is the product of its deltas and its inputs, so where every weight is active its squares
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
        for (int r = 0; r < op->rows; r++)
            if (!op->relu || unit[r] > 0) deltas += (double)delta[r] * delta[r];
        const double norm = sqrt(inputs * deltas) * (1 + 0x1p-23) + ldexp(sqrt((double)op->rows * op->run), -149);
        w->looks[e].squares += norm * norm + (op->bias < 0 ? 0 : deltas);
        w->looks[e].broken |= !(norm < FLT_MAX);
    }
}

/* The sum gets the kept gradients of an operation, each times its example's factor. */
PHASE void add_kept(struct work *w, int i, int n) {
    const struct op *op = w->net->ops + i;
    const int64_t stride = kept_floats(op);
    int32_t *sum = w->units + op->weights;
    for (int64_t s = 0; s < stride; s += LANES) {
        I total = load_int(sum + s);
        for (int e = 0; e < n; e++)
            if (w->factor[e] != 0) total += to_units(splat(w->factor[e]) * load(w->kept[i] + e * stride + s));
        store_int(sum + s, total);
    }
}

/* `what` happens to the gradients of the examples that are not left out. */
static void gradients(struct work *w, int n, int what, float bound) {
    for (int i = w->net->count - 1; i >= 0; i--) {
        const struct op *op = w->net->ops + i;
        if (op->kind != OP_ROWS) continue;
        if (what == GRADIENT_ADD_SCALED && w->kept[i]) {
            add_kept(w, i, n);
            continue;
        }
        if (what == GRADIENT_NORM && op->linear && w->all_active) {
            bound_linear(w, i, n);
            continue;
        }
        if (what == GRADIENT_NORM && w->kept[i]) memset(w->kept[i], 0, 4 * (size_t)(n * kept_floats(op)));
#if LEVEL == 2
        const int many = w->net->buffers[i + 1].height * w->net->buffers[i + 1].width >= LANES / 2 &&
                         op->pool_h * op->pool_w <= LANES;
#else
        const int many = 0;
#endif
        for (int first = 0, rows = many ? LISTS : LIST_BLOCK; first < op->rows; first += rows) {
#if LEVEL == 2
            if (many) build_many_lists(w, i, first, n);
            else
#endif
            build_lists(w, i, first, n);
            for (int r = 0; r < rows && first + r < op->rows; r++)
                if (w->lists[r].count > 0) one_row(w, i, first + r, w->lists + r, what, bound);
        }
    }
}

#endif
