/* The local steps of one agent (Algorithm 1, lines 6–11): sample, per-example gradients, clip, sum, noise, step. */
#ifndef FEDSPA_STEP_H
#define FEDSPA_STEP_H

#include <float.h>

#include "gradients.h"
#include "passes.h"

/* What turns a gradient into units, with CLIP_UNITS of them to `size`. */
static float units_per(double size) {
    const double factor = CLIP_UNITS / size;
    return factor < FLT_MAX ? (float)factor : FLT_MAX;
}

/* Leaves out the examples that have a NaN in `values` (per buffer, from `first` on), or one so large that a gradient
 * may overflow: their gradients are no use to anyone. Returns how many. */
PHASE int leave_out_wild(struct work *w, float *const *values, int first, int n) {
    int wild = 0;
    for (int i = first; i <= w->net->count; i++) {
        const int64_t size = w->net->buffers[i].example;
        if (!any_wild(values[i], n * size)) continue; /* nearly always: examples lie one behind the other */
        for (int e = 0; e < n; e++) {
            if (w->factor[w->owner[e]] == 0 || !any_wild(values[i] + e * size, size)) continue;
            w->factor[w->owner[e]] = 0;
            wild++;
        }
    }
    return wild;
}

/* Leaves out the examples whose label is no class: a private sum answers, whatever a record says. Returns how many. */
static int leave_out_strange(struct work *w, const struct fedspa_task *task, int n) {
    int zeroed = 0;
    for (int e = 0; e < n; e++) {
        if (w->factor[w->owner[e]] == 0 || is_class(w->net, task->y[w->rows[e]])) continue;
        w->factor[w->owner[e]] = 0;
        zeroed++;
    }
    return zeroed;
}

/* The factor of each example from the norm of its gradient, under l2. A gradient that is not finite counts as zero. */
static void set_factors(struct work *w, int n, const struct fedspa_task *task) {
    for (int e = 0; e < n; e++) {
        const struct square_sum *sum = w->squares + e;
        const double squares = sum->linear + sum_doubles(sum->lanes), norm = sqrt(squares);
        const int usable = !sum->broken && isfinite(squares);
        w->zeroed += !usable;
        /* The margin covers the rounding of the factor and of its products (2^-24 each) and of the norm in float64
         * (2^-53 per coordinate). */
        const double kept = 1 - task->clip_margin;
        w->factor[e] = usable ? units_per(norm > task->clip_value * kept ? norm / kept : task->clip_value) : 0;
    }
}

/* A convolution's weights as its forward pass wants them. */
static void prepare_weights(struct work *w, const struct op *op) {
    float *packed = w->packed + op->packed;
    if (op->winograd) winograd_weights(op, w->theta, packed);
    else if (op->strip) strip_weights(op, w->theta, packed, w->space);
    else pack_weights(op, w->theta, packed);
}

/* Moves the units so far to the total, which has capacity for all; what it held before a step's first move is old. */
PHASE void fold(struct work *w) {
    for (int64_t i = 0; i < w->net->layout; i += LANES) /* PAD behind the layout */
        for (int j = 0; j < LANES; j++) { /* padding stays 0 */
            const int32_t units = w->units[i + j] & w->active[i + j];
            w->total[i + j] = (w->folded ? w->total[i + j] : 0) + units;
        }
    memset(w->units, 0, 4 * (size_t)w->net->layout);
    w->folded = 1;
    w->pending = 0;
}

/* An empty sum. */
static void clear(struct work *w, const struct fedspa_task *task) {
    memset(task->clip == CLIP_NONE ? (void *)w->sum : w->units, 0, 4 * (size_t)w->net->layout);
    w->pending = w->folded = 0;
}

/* Which records belong to the next chunk, for as many of the `left` examples as have capacity; sets how many records and
 * returns how many examples. */
static int lay_out(struct work *w, const struct fedspa_task *task, const int64_t *chosen, int64_t left, int *records) {
    int n = 0, e = 0;
    for (; e < left && e < w->chunk; e++) {
        const int64_t count = task->counts ? task->counts[chosen[e]] : 1, first = chosen[e] * (task->counts ? task->slots : 1);
        if (n + count > w->chunk) break;
        for (int64_t j = 0; j < count; j++, n++) {
            w->rows[n] = first + j;
            w->owner[n] = e;
            w->share[n] = 1 / (float)count;
        }
    }
    *records = n;
    return e;
}

/* Adds the clipped gradients of a chunk of n examples, which were laid out as so many records, to the sum. */
static void add_chunk(struct work *w, const struct fedspa_task *task, int n, int records) {
    if (w->pending + n > UNITS_ROOM && task->clip != CLIP_NONE) fold(w);
    w->pending += n;
    load_examples(w, task, w->rows, records);
    forward(w, records);
    loss_deltas(w, task, records);
    for (int e = 0; e < n; e++) w->factor[e] = task->clip == CLIP_NONE ? 1 : units_per(task->clip_value);
    const int wild = leave_out_wild(w, w->unit, 0, records) + leave_out_strange(w, task, records);
    propagate(w, records);
    if (task->clip == CLIP_NONE) {
        gradients(w, records, GRADIENT_ADD);
        /* Nothing is clipped, so nothing is left out either: a broken example breaks the step, as in torch. */
        if (wild)
            for (int64_t i = 0; i < w->net->layout; i++) w->sum[i] = NAN;
        return;
    }
    if (task->clip == CLIP_COORDINATE) {
        /* A gradient is clamped before anything could see a NaN in it, which would become the bound. */
        w->zeroed += wild + leave_out_wild(w, w->delta, 1, records);
    } else {
        for (int e = 0; e < n; e++) w->squares[e] = (struct square_sum){.broken = w->factor[e] == 0};
        gradients(w, records, GRADIENT_NORM);
        set_factors(w, n, task);
    }
    gradients(w, records, GRADIENT_ADD_SCALED);
}

/* theta -= step_size * sum / B on the active coordinates. */
PHASE void descend(struct work *w, const struct fedspa_task *task) {
    const double step = task->step_size / (double)task->batch;
    for (int64_t j = 0; j < task->active; j++) {
        const int32_t at = w->place[j];
        w->theta[at] = (float)(w->theta[at] - step * w->sum[at]);
    }
}

/* theta -= step * (units + deviation * noise), for the noise of coordinates `from` to `to`: eight at a time where they lie
 * side by side, as those of linear layers do at p = 1. */
INLINE void move(struct work *w, int64_t from, int64_t to, const double *noise, double step, double deviation) {
    float *restrict theta = w->theta;
    const int32_t *restrict units = w->units;
    const double *restrict total = w->folded ? w->total : NULL;
    for (int64_t j = from; j < to; j++) {
        int64_t at = w->place[j];
        for (int64_t side = w->beside[j]; side >= 8 && j + 8 <= to; side -= 8, at += 8, j += 8) {
            D8 sums = __builtin_convertvector(*(const I8U *)(units + at), D8);
            if (total) sums += *(const D8U *)(total + at);
            const D8 noisy = sums + deviation * *(const D8U *)(noise + j - from);
            const D8 next = __builtin_convertvector(load_half(theta + at), D8) - step * noisy;
            store_half(theta + at, __builtin_convertvector(next, H));
        }
        if (j == to) return;
        at = w->place[j];
        theta[at] = (float)(theta[at] - step * (units[at] + (total ? total[at] : 0) + deviation * noise[j - from]));
    }
}

/* As descend, with clipped gradients and noise, both in units until the noise has been added. */
PHASE void release(struct work *w, const struct fedspa_task *task, struct stream *noise) {
    const double step = task->step_size / (double)task->batch * task->clip_value / CLIP_UNITS;
    const double deviation = task->noise_per_clip * CLIP_UNITS;
    double first[GAUSS_STEP], second[GAUSS_STEP];
    for (int64_t start = 0; start < task->active; start += GAUSS_BLOCK) {
        const int64_t left = task->active - start, n = left < GAUSS_BLOCK ? left : GAUSS_BLOCK, half = (n + 1) / 2;
        for (int64_t i = 0; i < half; i += GAUSS_STEP) {
            const int64_t count = half - i < GAUSS_STEP ? half - i : GAUSS_STEP;
            const int64_t a = start + i, b = a + half, end = b + count < start + n ? b + count : start + n;
            gauss_pairs(noise, half, i, count, first, second);
            move(w, a, a + count, first, step, deviation);
            move(w, b, end, second, step, deviation);
        }
        noise->position += (uint64_t)(2 * half);
    }
}

/* The parameters in rows, and what follows from the mask. Is there memory for it? */
static int place_parameters(struct work *w, const struct fedspa_task *task, const float *theta) {
    for (int64_t i = 0; i < w->net->dimension; i++) w->theta[w->net->place[i]] = theta[i];
    for (int64_t j = 0; j < task->active; j++) {
        w->place[j] = w->net->place[task->coordinates ? task->coordinates[j] : j];
        w->active[w->place[j]] = -1;
    }
    for (int64_t j = task->active - 1; j >= 0; j--) {
        const int follows = j + 1 < task->active && w->place[j + 1] == w->place[j] + 1;
        w->beside[j] = follows ? w->beside[j + 1] + 1 : 1;
    }
    return cut_weights(w);
}

/* May the task go on? Only where nothing is private is a label that is no class an error: elsewhere it would tell. */
static int labels_fit(const struct fedspa_net *net, const struct fedspa_task *task) {
    for (int64_t i = 0; i < task->records && task->clip == CLIP_NONE; i++) {
        const int64_t example = task->numbers ? task->numbers[i] : i;
        for (int64_t j = 0; j < (task->counts ? task->counts[example] : 1); j++)
            if (!is_class(net, task->y[example * (task->counts ? task->slots : 1) + j])) return 0;
    }
    return 1;
}

static void prepare_all_weights(struct work *w) {
    for (int i = 0; i < w->net->count; i++)
        if (w->net->ops[i].kind == OP_WEIGHTED && !w->net->ops[i].linear) prepare_weights(w, w->net->ops + i);
}

/* A step's sum of clipped gradients. */
static void add_batch(struct work *w, const struct fedspa_task *task, int64_t batch) {
    clear(w, task);
    prepare_all_weights(w);
    const int64_t chunks = (batch + w->chunk - 1) / w->chunk; /* of about the same size */
    for (int64_t c = 0, from = 0; from < batch; c++) {
        const int64_t left = (task->counts ? batch : (c + 1) * batch / chunks) - from;
        int records;
        const int n = lay_out(w, task, w->chosen + from, left, &records);
        add_chunk(w, task, n, records);
        from += n;
    }
}

static int64_t sum_clipped(const struct fedspa_net *net, const float *theta, const struct fedspa_task *task,
                           int64_t *sum, int64_t *zeroed) {
    if (!labels_fit(net, task)) return FEDSPA_LABEL;
    struct work w;
    const int made = work_new(&w, net, task) && place_parameters(&w, task, theta);
    if (made) {
        for (int64_t i = 0; i < task->records; i++) w.chosen[i] = task->numbers ? task->numbers[i] : i;
        add_batch(&w, task, task->records);
        for (int64_t j = 0; j < task->active; j++) {
            const int32_t at = w.place[j];
            sum[j] = w.units[at] + (w.folded ? (int64_t)w.total[at] : 0);
        }
        *zeroed = w.zeroed;
    }
    work_free(&w);
    return made ? FEDSPA_OK : FEDSPA_MEMORY;
}

static int64_t find_logits(const struct fedspa_net *net, const float *theta, const float *x, int64_t count, float *logits) {
    const struct fedspa_task task = {.x = x, .records = count, .active = net->dimension};
    const int64_t size = net->buffers[net->count].example;
    struct work w;
    const int made = work_new(&w, net, &task) && place_parameters(&w, &task, theta);
    if (made) {
        prepare_all_weights(&w);
        for (int64_t i = 0; i < count; i++) w.chosen[i] = i;
        for (int64_t start = 0; start < count; start += w.chunk) {
            const int n = (int)(count - start < w.chunk ? count - start : w.chunk);
            load_examples(&w, &task, w.chosen + start, n);
            forward(&w, n);
            for (int e = 0; e < n; e++, logits += net->classes)
                memcpy(logits, w.unit[net->count] + e * size, 4 * (size_t)net->classes);
        }
    }
    work_free(&w);
    return made ? FEDSPA_OK : FEDSPA_MEMORY;
}

static int64_t train_agent(const struct fedspa_net *net, const float *theta, const struct fedspa_task *task,
                           float *delta, int64_t *zeroed, const int32_t *stop) {
    if (!labels_fit(net, task)) return FEDSPA_LABEL;
    struct work w;
    if (!work_new(&w, net, task) || !place_parameters(&w, task, theta)) {
        work_free(&w);
        return FEDSPA_MEMORY;
    }
    struct stream sampling, noise;
    stream_open(&sampling, task->sampling_key, LEVEL, 0);
    stream_open(&noise, task->noise_key, LEVEL, 0);
    int64_t step = 0;
    for (; step < task->steps && !__atomic_load_n(stop, __ATOMIC_RELAXED); step++) {
        int64_t batch = task->sampling == SAMPLE_POISSON
                            ? draw_poisson(&sampling, task->rate, task->records, w.chosen, w.sampling_words)
                            : draw_fixed(&sampling, task->batch, task->records, w.chosen, w.sampling_words, w.seen);
        if (task->numbers)
            for (int64_t i = 0; i < batch; i++) w.chosen[i] = task->numbers[w.chosen[i]];
        add_batch(&w, task, batch);
        if (task->clip == CLIP_NONE) descend(&w, task);
        else release(&w, task, &noise);
    }
    for (int64_t j = 0; j < task->active; j++)
        delta[j] = w.theta[w.place[j]] - theta[task->coordinates ? task->coordinates[j] : j];
    *zeroed = w.zeroed;
    work_free(&w);
    return step < task->steps ? FEDSPA_STOPPED : FEDSPA_OK;
}

#endif
