/* Forward and backward of a chunk of examples. */
#ifndef FEDSPA_PASSES_H
#define FEDSPA_PASSES_H

#include "lists.h"
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
        if ((b->channels == 1 && b->pad_w == 0) || plane == 1) {
            memcpy(to, from, 4 * (size_t)size);
            continue;
        }
        for (int y = 0; y < b->height; y++, to += b->row) {
            if (b->channels == 1) {
                memcpy(to, from + (int64_t)y * b->width, 4 * (size_t)b->width * (size_t)b->channels);
                continue;
            }
            for (int c = 0; c < b->channels; c++)
                for (int x = 0; x < b->width; x++) to[x * b->channels + c] = from[c * plane + y * b->width + x];
        }
    }
}

/* A convolution five wide: as much of an example at a time as stays in the nearest cache between convolution and pooling. */
static void forward_strips(struct work *w, int i, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int pairs = pools_pairs(op), at_once = pairs ? PICKS : out->height;
    for (int e = 0; e < n; e++) {
        strip_transform(op, in, w->unit[i] + e * in->example, w->space);
        for (int y = 0; y < out->height; y += at_once) {
            const int rows = out->height - y < at_once ? out->height - y : at_once;
            strip_forward(op, in, pairs ? 2 * y : 0, pairs ? 2 * rows : op->used_h, w->packed + op->packed, w->scratch,
                          w->space);
            finish_conv(op, out, y, rows, w->scratch, w->theta, w->unit[i + 1] + e * out->example,
                        op->pool ? w->arg[i] + e * pick_words(op, out) : NULL);
        }
    }
}

static void forward_weighted(struct work *w, int i, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    if (op->linear) {
        linear_forward(op, in, out, w->unit[i], n, w->theta, w->unit[i + 1]);
        return;
    }
    if (op->strip) {
        forward_strips(w, i, n);
        return;
    }
    const int64_t block = examples_per_scratch(op, w->chunk), size = scratch_size(op);
    for (int64_t e = 0; e < n; e += block) {
        int64_t count = n - e < block ? n - e : block;
        const float *from = w->unit[i] + e * in->example, *packed = w->packed + op->packed;
        if (op->winograd) winograd_forward(op, in, from, count, packed, w->scratch, w->space);
        else conv_forward(op, in, from, count, packed, w->scratch);
        for (int64_t j = 0; j < count; j++)
            finish_conv(op, out, 0, out->height, w->scratch + j * size, w->theta,
                        w->unit[i + 1] + (e + j) * out->example, op->pool ? w->arg[i] + (e + j) * pick_words(op, out) : NULL);
    }
}

static void forward(struct work *w, int n) {
    for (int i = 0; i < w->net->count; i++) {
        const struct op *op = w->net->ops + i;
        const struct buffer *in = w->net->buffers + i, *out = in + 1;
        if (op->kind == OP_WEIGHTED) {
            forward_weighted(w, i, n);
            continue;
        }
        for (int e = 0; e < n; e++) {
            const float *a = w->unit[i] + e * in->example;
            float *b = w->unit[i + 1] + e * out->example;
            point_forward(op->kind, in, out, a, b);
        }
    }
}

static int is_class(const struct fedspa_net *net, int64_t label) { return label >= 0 && label < net->classes; }

/* Derivatives of each record's cross-entropy, as a part of its example's: softmax minus one at the label. */
PHASE void loss_deltas(struct work *w, const struct fedspa_task *task, int n) {
    const int last = w->net->count, classes = w->net->classes;
    for (int e = 0; e < n; e++) {
        const float *logit = w->unit[last] + e * w->net->buffers[last].example;
        float *delta = w->delta[last] + e * w->net->buffers[last].example;
        float top = logit[0], sum = 0;
        for (int c = 1; c < classes; c++) top = logit[c] > top ? logit[c] : top;
        for (int c = 0; c < classes; c++) sum += delta[c] = expf(logit[c] - top);
        for (int c = 0; c < classes; c++) delta[c] /= sum;
        if (is_class(w->net, task->y[w->rows[e]])) delta[task->y[w->rows[e]]] -= 1;
        for (int c = 0; c < classes && w->several; c++) delta[c] *= w->share[e];
    }
}

/* The deltas of the operation's input, from those of its output: a pixel's channels together, so that its window is
 * read and written once; and one piece of some output channels after the other, so that their weights stay near. */
PHASE void spread(struct work *w, int i, int first, int end) {
    const struct op *op = w->net->ops + i;
    const int piece = spread_near(op) ? PIECE : SPREAD_PIECE, outputs = spread_outputs(op);
    for (int from = 0; from < op->outputs; from += outputs) {
        const int to = op->outputs - from < outputs ? op->outputs : from + outputs;
        const int64_t spots = build_spots(w, i, from, to, first, end);
        for (int s = 0, left; (left = segments_of(op) - s) > 0; s += piece) {
            const spread_function use = SPREADS[(left < piece ? left : piece) - 1];
            for (const struct spot *spot = w->spots; spot < w->spots + spots; spot++)
                use(w->theta + op->weights + (int64_t)s * LANES, spot, w->segment[i] + s);
        }
    }
}

/* The loss's derivatives for every buffer but the first, of the examples that are not left out. */
static void propagate(struct work *w, int n) {
    for (int i = w->net->count - 1; i > 0; i--) {
        const struct op *op = w->net->ops + i;
        const struct buffer *in = w->net->buffers + i, *out = in + 1;
        memset(w->delta[i], 0, 4 * (size_t)(n * in->example));
        if (op->kind == OP_WEIGHTED) {
            const int block = examples_to_spread(in, w->chunk);
            for (int e = 0; e < n; e += block) spread(w, i, e, n - e < block ? n : e + block);
            continue;
        }
        for (int e = 0; e < n; e++) {
            float *to = w->delta[i] + e * in->example;
            const float *from = w->delta[i + 1] + e * out->example;
            point_backward(op->kind, in, out, w->unit[i + 1] + e * out->example, from, to);
        }
    }
}

#endif
