/* Forward and backward of a chunk of examples. */
#ifndef FEDSPA_PASSES_H
#define FEDSPA_PASSES_H

#include <float.h>

#include "linear.h"
#include "pool.h"
#include "work.h"

/* Records as torch holds them (channels first) into the first buffer (channels last). */
PHASE void load_examples(struct work *w, const struct fedspa_task *task, const int64_t *chosen, int n) {
    const struct fedspa_net *net = w->net;
    const struct buffer *b = net->buffers;
    const int64_t plane = (int64_t)b->height * b->width, size = plane * b->channels;
    for (int e = 0; e < n; e++) {
        const float *from = task->x + chosen[e] * size;
        float *to = w->unit[0] + e * b->example + b->origin;
        for (int y = 0; y < b->height; y++, to += b->row) {
            if (b->channels == 1 || plane == 1) {
                memcpy(to, from + (int64_t)y * b->width, 4 * (size_t)b->width * (size_t)b->channels);
                continue;
            }
            for (int c = 0; c < b->channels; c++)
                for (int x = 0; x < b->width; x++) to[x * b->channels + c] = from[c * plane + y * b->width + x];
        }
    }
}

static void forward_rows(struct work *w, int i, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    if (op->linear) {
        linear_forward(op, in, out, w->unit[i], n, w->theta, w->unit[i + 1]);
        return;
    }
    const int64_t block = examples_per_scratch(op, w->chunk), size = scratch_size(op);
    const int64_t args = (int64_t)out->height * out->width * op->rows_padded;
    for (int64_t e = 0; e < n; e += block) {
        int64_t count = n - e < block ? n - e : block;
        const float *from = w->unit[i] + e * in->example, *packed = w->packed + op->packed;
        if (op->winograd) winograd_forward(op, in, from, count, packed, w->scratch, w->space);
        else if (op->strip) strip_forward(op, in, from, count, packed, w->scratch, w->space);
        else conv_forward(op, in, from, count, packed, w->scratch);
        for (int64_t j = 0; j < count; j++)
            finish_conv(op, out, w->scratch + j * size, w->theta, w->unit[i + 1] + (e + j) * out->example,
                        op->pool ? w->arg[i] + (e + j) * args : NULL);
    }
}

static void forward(struct work *w, int n) {
    for (int i = 0; i < w->net->count; i++) {
        const struct op *op = w->net->ops + i;
        const struct buffer *in = w->net->buffers + i, *out = in + 1;
        if (op->kind == OP_ROWS) {
            forward_rows(w, i, n);
            continue;
        }
        for (int e = 0; e < n; e++) {
            const float *a = w->unit[i] + e * in->example;
            float *b = w->unit[i + 1] + e * out->example;
            if (op->kind == OP_RELU || op->kind == OP_TANH) point_forward(op->kind, in, out, a, b);
            else pool_forward(op, in, out, a, b);
        }
    }
}

/* Derivatives of each example's cross-entropy: softmax minus one at the label. */
PHASE void loss_deltas(struct work *w, const struct fedspa_task *task, const int64_t *chosen, int n) {
    const int last = w->net->count, classes = w->net->classes;
    for (int e = 0; e < n; e++) {
        const float *logit = w->unit[last] + e * w->net->buffers[last].example;
        float *delta = w->delta[last] + e * w->net->buffers[last].example;
        float top = logit[0], sum = 0;
        for (int c = 1; c < classes; c++) top = logit[c] > top ? logit[c] : top;
        for (int c = 0; c < classes; c++) sum += delta[c] = expf(logit[c] - top);
        for (int c = 0; c < classes; c++) delta[c] /= sum;
        delta[task->y[chosen[e]]] -= 1;
    }
}

static const int32_t FIRST_PIXEL[LIST_BLOCK]; /* without pooling a unit has one pixel, number 0 */

/* Ends an example's part of the lists that have one. */
INLINE void end_example(struct work *w, int rows, int e, struct item *const *next) {
    for (int r = 0; r < rows; r++) {
        struct list *l = w->lists + r;
        int count = (int)(next[r] - l->items);
        if (count == l->count) continue;
        l->count = l->end[l->groups] = count;
        l->example[l->groups++] = e;
    }
}

/* The deltas of up to LIST_BLOCK rows from `first` on, as lists. Every item is written and counted only if it is alive:
 * a branch on it would be mispredicted half the time. */
PHASE void build_lists(struct work *w, int i, int first, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int rows = op->rows - first < LIST_BLOCK ? op->rows - first : LIST_BLOCK, units = out->height * out->width;
    const unsigned present = (1u << rows) - 1;
    const int32_t *pixel = w->pixel[i];
    struct item *next[LIST_BLOCK];
    for (int r = 0; r < LIST_BLOCK; r++) {
        w->lists[r].groups = w->lists[r].count = 0;
        next[r] = w->lists[r].items;
    }
    for (int e = 0; e < n; e++) {
        if (w->factor[e] == 0) continue;
        const int32_t *arg = op->pool ? w->arg[i] + (int64_t)e * units * op->rows_padded + first : FIRST_PIXEL;
        for (int u = 0; u < units; u++) {
            const int64_t at = e * out->example + w->at[i][u] + first;
            const float *delta = w->delta[i + 1] + at;
            const unsigned alive = alive_of_8(delta, w->unit[i + 1] + at, op->relu) & present;
            const int32_t start = (int32_t)(e * in->example) + w->window[i][u];
            if (rows == LIST_BLOCK)
                UNROLLED(LIST_BLOCK, r) {
                    *next[r] = (struct item){start + pixel[arg[r]], delta[r]};
                    next[r] += alive >> r & 1;
                }
            else
                for (int r = 0; r < rows; r++) {
                    *next[r] = (struct item){start + pixel[arg[r]], delta[r]};
                    next[r] += alive >> r & 1;
                }
            if (op->pool) arg += op->rows_padded;
        }
        end_example(w, rows, e, next);
    }
}

#if LEVEL == 2
/* The items of the lanes in `alive`, pushed together; 16 are written. */
INLINE void store_items(struct item *to, __mmask16 alive, __m512i at, __m512i delta) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    at = _mm512_maskz_compress_epi32(alive, at);
    delta = _mm512_maskz_compress_epi32(alive, delta);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(at, low, delta));
    _mm512_storeu_si512(to + LANES / 2,
                        _mm512_permutex2var_epi32(at, _mm512_add_epi32(low, _mm512_set1_epi32(LANES / 2)), delta));
}

/* The same for up to LISTS rows: 16 units by 16 rows are turned over, and a row's living ones pushed together. */
PHASE void build_many_lists(struct work *w, int i, int first, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int rows = op->rows - first < LISTS ? op->rows - first : LISTS, units = out->height * out->width;
    const __m512i pixel = _mm512_loadu_si512(w->pixel[i]);
    struct item *next[LISTS];
    for (int r = 0; r < LISTS; r++) {
        w->lists[r].groups = w->lists[r].count = 0;
        next[r] = w->lists[r].items;
    }
    for (int e = 0; e < n; e++) {
        if (w->factor[e] == 0) continue;
        const float *delta = w->delta[i + 1] + e * out->example + first, *unit = w->unit[i + 1] + e * out->example + first;
        for (int u = 0; u < units; u += LANES) {
            V deltas[LANES], args[LANES];
            const int count = units - u < LANES ? units - u : LANES;
            for (int j = 0; j < count; j++) {
                const int32_t at = w->at[i][u + j];
                deltas[j] = load(delta + at);
                if (op->relu) deltas[j] = (V)((I)deltas[j] & (load(unit + at) > 0));
            }
            for (int j = count; j < LANES; j++) deltas[j] = (V){0};
            transpose(deltas);
            if (op->pool) {
                const int32_t *arg = w->arg[i] + ((int64_t)e * units + u) * op->rows_padded + first;
                for (int j = 0; j < LANES; j++) args[j] = (V)load_int(arg + (j < count ? j : 0) * op->rows_padded);
                transpose(args);
            }
            const __m512i start = (__m512i)(load_int(w->window[i] + u) + (int32_t)(e * in->example));
            for (int r = 0; r < rows; r++) {
                const __m512i within = op->pool ? _mm512_permutexvar_epi32((__m512i)args[r], pixel) : _mm512_setzero_si512();
                const __mmask16 alive = _mm512_cmp_ps_mask((__m512)deltas[r], _mm512_setzero_ps(), _CMP_NEQ_UQ);
                store_items(next[r], alive, _mm512_add_epi32(start, within), (__m512i)deltas[r]);
                next[r] += __builtin_popcount(alive);
            }
        }
        end_example(w, rows, e, next);
    }
}
#endif

/* The living channels of a unit among rows `from` to `to`, as items behind `next` of the pixel that each picks. */
INLINE void sort_channels(const struct op *op, int from, int to, const float *delta, const float *unit,
                          const int32_t *arg, struct item **next) {
#if LEVEL == 2
    /* Pixel by pixel, in order: what is written past a pixel's last item is overwritten by the next one's. */
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i length = _mm512_set1_epi32(op->row_length);
    for (int p = 0; p < op->pool_h * op->pool_w; p++)
        for (int first = from; first < to; first += LANES) {
            const __m512 deltas = (__m512)load(delta + first), zero = _mm512_setzero_ps();
            const int left = to - first;
            __mmask16 here = left < LANES ? (__mmask16)((1u << left) - 1) : 0xffff;
            here = _mm512_mask_cmp_ps_mask(here, deltas, zero, _CMP_NEQ_UQ);
            if (op->relu) here = _mm512_mask_cmp_ps_mask(here, (__m512)load(unit + first), zero, _CMP_GT_OQ);
            if (arg) here = _mm512_mask_cmpeq_epi32_mask(here, (__m512i)load_int(arg + first), _mm512_set1_epi32(p));
            const __m512i row = _mm512_mullo_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(first)), length);
            store_items(next[p], here, row, (__m512i)deltas);
            next[p] += __builtin_popcount(here);
        }
#else
    for (int first = from; first < to; first += 8) {
        const int left = to - first;
        unsigned alive = alive_of_8(delta + first, unit + first, op->relu);
        if (left < 8) alive &= (1u << left) - 1;
        for (; alive; alive &= alive - 1) {
            const int r = first + __builtin_ctz(alive), p = arg ? arg[r] : 0;
            *next[p]++ = (struct item){r * op->row_length, delta[r]};
        }
    }
#endif
}

/* For every pixel of the chunk with a delta in some channel: those channels, as items whose `at` is a row of weights.
 * Rows `from` to `to` only. Returns the number of pixels. */
static int64_t build_spots(struct work *w, int i, int from, int to, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int window = op->pool_h * op->pool_w;
    struct item *room = w->spot_items; /* of a unit: for each pixel of its window as many items as there are rows */
    struct spot *spot = w->spots;
    for (int e = 0; e < n; e++) {
        if (w->factor[e] == 0) continue;
        const int32_t *arg = op->pool ? w->arg[i] + (int64_t)e * out->height * out->width * op->rows_padded : NULL;
        for (int y = 0; y < out->height; y++)
            for (int x = 0; x < out->width; x++, arg += op->pool ? op->rows_padded : 0, room += window * op->rows) {
                const int64_t at = e * out->example + out->origin + (int64_t)y * out->row + x * out->channels;
                const float *delta = w->delta[i + 1] + at, *unit = w->unit[i + 1] + at;
                struct item **next = w->next;
                for (int p = 0; p < window; p++) next[p] = room + p * op->rows;
                sort_channels(op, from, to, delta, unit, arg, next);
                float *start = w->delta[i] + e * in->example + w->window[i][y * out->width + x];
                for (int p = 0; p < window; p++) {
                    const int count = (int)(next[p] - room) - p * op->rows;
                    *spot = (struct spot){room + p * op->rows, start + w->pixel[i][p], count};
                    spot += count > 0;
                }
            }
    }
    return spot - w->spots;
}

/* The deltas of the operation's input, from those of its output: a pixel's channels together, so that its window is
 * read and written once; and one piece of some rows after the other, so that their weights stay near. */
PHASE void spread(struct work *w, int i, int n) {
    const struct op *op = w->net->ops + i;
    const int near = (int64_t)op->rows * op->row_length * 4 <= NEAR_BYTES;
    const int piece = near ? LONG_PIECE : SPREAD_PIECE, rows = near ? op->rows : SPREAD_ROWS;
    for (int from = 0; from < op->rows; from += rows) {
        const int64_t spots = build_spots(w, i, from, op->rows - from < rows ? op->rows : from + rows, n);
        for (int s = 0, length; s < segments_of(op); s += length) {
            const float *weights = w->theta + op->weights + (int64_t)s * LANES;
            const int32_t *segment = w->segment[i] + s * (is_paired(op) ? 2 : 1);
            const spread_function use = spread_of(op, segments_of(op) - s, piece, &length);
            for (const struct spot *spot = w->spots; spot < w->spots + spots; spot++)
                use(weights, spot->items, spot->count, segment, spot->window);
        }
    }
}

enum { GRADIENT_ADD, GRADIENT_ADD_SCALED, GRADIENT_ADD_CLAMPED, GRADIENT_LOOK, GRADIENT_NORM };

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
    float sum = w->sum[place];
    for (int g = 0, item = 0; g < l->groups; item = l->end[g++]) {
        const float v = sum_deltas(l->items + item, l->items + l->end[g]);
        if (what == GRADIENT_ADD) sum += v;
        else if (what == GRADIENT_ADD_SCALED) sum += w->factor[l->example[g]] * v;
        else if (what == GRADIENT_ADD_CLAMPED) sum += v < bound ? (v > -bound ? v : -bound) : bound;
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
    w->sum[place] = sum;
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
        else if (what == GRADIENT_ADD_SCALED && one_each) use->scaled_products(x, l, segment, w->sum + at, w->factor);
        else if (what == GRADIENT_ADD_SCALED) use->add_scaled(x, l, segment, w->sum + at, w->factor);
        else if (what == GRADIENT_LOOK) use->look(x, l, segment, w->active + at, bound, w->looks);
        else if (what == GRADIENT_NORM)
            use->norm(x, l, segment, w->active + at, w->looks, kept ? kept + at - op->weights : NULL, kept_floats(op));
        else if (one_each) use->add_products(x, l, segment, w->sum + at, bound);
        else use->add_clamped(x, l, segment, w->sum + at, bound);
    }
    if (op->bias >= 0) bias_row(w, i, l, op->bias + r, what, bound);
}

/* The loss's derivatives for every buffer but the first, of the examples that are not left out. */
static void propagate(struct work *w, int n) {
    for (int i = w->net->count - 1; i > 0; i--) {
        const struct op *op = w->net->ops + i;
        const struct buffer *in = w->net->buffers + i, *out = in + 1;
        memset(w->delta[i], 0, 4 * (size_t)(n * in->example));
        if (op->kind == OP_ROWS) {
            spread(w, i, n);
            continue;
        }
        for (int e = 0; e < n; e++) {
            float *to = w->delta[i] + e * in->example;
            const float *from = w->delta[i + 1] + e * out->example;
            if (op->kind == OP_RELU || op->kind == OP_TANH)
                point_backward(op->kind, in, out, w->unit[i + 1] + e * out->example, from, to);
            else
                pool_backward(op, in, out, w->unit[i] + e * in->example, from, to);
        }
    }
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
    float *sum = w->sum + op->weights;
    for (int64_t s = 0; s < stride; s += LANES) {
        V total = load(sum + s);
        for (int e = 0; e < n; e++)
            if (w->factor[e] != 0) total = multiply_add(splat(w->factor[e]), load(w->kept[i] + e * stride + s), total);
        store(sum + s, total);
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
