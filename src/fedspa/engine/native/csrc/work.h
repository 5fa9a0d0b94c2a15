/* The memory that one agent's training works in. */
#ifndef FEDSPA_WORK_H
#define FEDSPA_WORK_H

#include "conv.h"
#include "gauss.h"
#include "net.h"
#include "spread.h"
#include "strip.h"
#include "winograd.h"

#define LIST_BLOCK 8              /* output channels whose lists are built in one sweep over the deltas */
#define LISTS 16                  /* or as many, where vectors of units are turned over */
#define CHUNK_BYTES (2 << 20)     /* examples that go through the net together: as many as make weights worth fetching, */
#define CHUNK 48                  /* and no more than this */
#define SCRATCH_BYTES (192 << 10) /* convolution outputs between convolution and pooling */
#define SPREAD_BYTES (288 << 10)  /* derivatives that backward adds to again and again */

_Static_assert(CHUNK <= UNITS_ROOM, "a chunk's units must fit their integers");

/* The pieces of an operation's weights, `each` per output channel. */
struct pieces {
    int each, stride; /* stride: from a row's pieces to the next row's */
    struct piece *piece;
};

struct work {
    const struct fedspa_net *net;
    int chunk;                /* examples at most */
    float *theta, *packed, *scratch, *space;
    float *sum;               /* a step's gradients where nothing is clipped */
    int32_t *units;           /* else its clipped ones, in units of simd.h: those of the last `pending` examples, */
    double *total;            /* and of the others, exact (2^53 / CLIP_UNITS examples are not in reach) */
    int64_t pending, folded;
    float most;               /* units of a clipped coordinate */
    float **unit, **delta;    /* per buffer: values, and the loss's derivatives */
    int32_t **arg, **segment; /* per operation */
    int32_t **at, **window;   /* per operation and unit: its place in the example's output, and its window's in the input */
    int32_t **pixel;          /* per operation: from a window's first pixel to each of those that pooling picks from */
    struct pieces *pieces;    /* per operation */
    struct list lists[LISTS];
    struct spot *spots;
    struct item *spot_items, **next;
    struct square_sum *squares;
    float *factor;            /* what an example's gradient is multiplied by, to be in units: 0 where it is left out */
    int64_t *rows;            /* a chunk's records, one example's after the other's, */
    int32_t *owner;           /* and for each of them which example of the chunk it belongs to */
    float *share;             /* of a record in its example's loss */
    int several;              /* an example is several records */
    int64_t zeroed;           /* examples left out so far, of all steps */
    int32_t *place, *active;
    int all_active;
    int32_t *beside;          /* how many of the active parameters lie side by side from here on */
    uint64_t *sampling_words;
    int64_t *chosen;
    uint8_t *seen;
    struct memory *memory;    /* where all of it lies */
    int failed;
};

/* Memory that is written before it is read, or in which nobody touches what must be 0 (work_new). */
static void *take(struct work *w, int64_t bytes) {
    void *block = w->failed ? NULL : memory_take(w->memory, bytes);
    if (!block) w->failed = 1;
    return block;
}

static void *take_zeros(struct work *w, int64_t bytes) {
    void *block = take(w, bytes);
    return block ? memset(block, 0, (size_t)bytes) : NULL;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Vectors of a row. */
static int segments_of(const struct op *op) { return op->runs * op->run_padded / LANES; }

/* Records at a time: all of a person's go together. */
static int chunk_size(const struct fedspa_net *net, const struct fedspa_task *task) {
    const int64_t slots = task->counts ? task->slots : 1, records = task->records * slots;
    int64_t bytes = 0;
    for (int i = 0; i <= net->count; i++) {
        bytes += 8 * net->buffers[i].example;
        if (i < net->count && net->ops[i].pool)
            bytes += 4 * pick_words(net->ops + i, net->buffers + i + 1);
    }
    int64_t chunk = CHUNK_BYTES / bytes;
    chunk = chunk < 3 ? 3 : chunk > CHUNK ? CHUNK : chunk;
    return (int)larger(slots, chunk < records ? chunk : records > 0 ? records : 1);
}

static int64_t examples_per_scratch(const struct op *op, int64_t chunk) {
    int64_t fit = SCRATCH_BYTES / (4 * scratch_size(op));
    return fit < 1 ? 1 : fit > chunk ? chunk : fit;
}

static int examples_to_spread(const struct buffer *in, int chunk) {
    int64_t fit = SPREAD_BYTES / (4 * in->example);
    return (int)(fit < 1 ? 1 : fit > chunk ? chunk : fit);
}

static void work_free(struct work *w) {
    if (w->memory) memory_return(w->net->pool, w->memory);
}

static int work_new(struct work *w, const struct fedspa_net *net, const struct fedspa_task *task) {
    memset(w, 0, sizeof *w);
    w->net = net;
    w->memory = memory_borrow(net->pool);
    if (!w->memory) return 0;
    const int64_t chunk = w->chunk = chunk_size(net, task);
    w->several = task->counts != NULL;
    w->all_active = task->active == net->dimension;
    w->most = (float)(CLIP_UNITS * (1 - task->clip_margin));
    w->unit = take(w, (net->count + 1) * (int64_t)sizeof *w->unit);
    w->delta = take(w, (net->count + 1) * (int64_t)sizeof *w->delta);
    /* Values first, whatever the task: a block is always the same one's then, and what nobody writes to in it (borders,
     * gaps between examples) stays 0 from one training to the next. */
    for (int i = 0; i <= net->count && !w->failed; i++) {
        const int64_t bytes = 4 * (net->buffers[i].example * chunk + 2 * PAD);
        w->unit[i] = take(w, bytes);
        w->delta[i] = take(w, i > 0 ? bytes : 0); /* the first operation's input needs no deltas */
    }
    w->theta = take_zeros(w, 4 * (net->layout + PAD));
    if (task->clip == CLIP_NONE) w->sum = take(w, 4 * (net->layout + PAD));
    else {
        w->units = take(w, 4 * (net->layout + PAD));
        w->total = take(w, 8 * (net->layout + PAD));
    }
    w->active = take_zeros(w, 4 * (net->layout + PAD));
    w->packed = take(w, 4 * (net->packed + PAD));
    w->arg = take(w, net->count * (int64_t)sizeof *w->arg);
    w->segment = take(w, net->count * (int64_t)sizeof *w->segment);
    w->pixel = take(w, net->count * (int64_t)sizeof *w->pixel);
    w->pieces = take(w, net->count * (int64_t)sizeof *w->pieces);
    w->at = take(w, net->count * (int64_t)sizeof *w->at);
    w->window = take(w, net->count * (int64_t)sizeof *w->window);
    w->place = take(w, 4 * task->active);
    w->beside = take(w, 4 * task->active);
    w->squares = take(w, chunk * (int64_t)sizeof *w->squares);
    w->factor = take(w, 4 * chunk);
    w->rows = take(w, 8 * chunk);
    w->owner = take(w, 4 * chunk);
    w->share = take(w, 4 * chunk);
    w->sampling_words = take(w, 3 * 8 * stream_capacity(task->records, task->batch));
    w->chosen = take(w, 8 * (task->records + 1));
    w->seen = take(w, task->records);
    int64_t scratch = 0, space = 0, pixels = 1, windows = 1, spots = 1, spot_items = 1;
    for (int i = 0; i < net->count && !w->failed; i++) {
        const struct buffer *b = net->buffers + i;
        if (net->ops[i].kind != OP_WEIGHTED) continue;
        const struct op *op = net->ops + i;
        const int64_t units = (int64_t)b[1].height * b[1].width;
        if (op->pool) w->arg[i] = take(w, 4 * pick_words(op, b + 1) * chunk);
        w->segment[i] = take(w, 4 * segments_of(op));
        for (int s = 0; s < segments_of(op) && !w->failed; s++)
            w->segment[i][s] = s * LANES / op->run_padded * b->row + s * LANES % op->run_padded;
        const int window = op->pool_h * op->pool_w;
        w->pixel[i] = take(w, 4 * larger(window, PAD));
        for (int p = 0; p < window && !w->failed; p++)
            w->pixel[i][p] = p / op->pool_w * op->stride_h * b->row + p % op->pool_w * op->stride_w * b->channels;
        w->at[i] = take(w, 4 * (units + PAD));
        w->window[i] = take(w, 4 * (units + PAD));
        for (int u = 0; u < units && !w->failed; u++) {
            const int y = u / b[1].width, x = u % b[1].width;
            w->at[i][u] = b[1].origin + y * b[1].row + x * b[1].channels;
            w->window[i][u] = (y * op->pool_stride_h - op->pool_pad_h) * op->stride_h * b->row +
                              (x * op->pool_stride_w - op->pool_pad_w) * op->stride_w * b->channels;
        }
        windows = larger(windows, window);
        if (i > 0) {
            const int64_t block = examples_to_spread(b, (int)chunk);
            spots = larger(spots, units * block * window);
            spot_items = larger(spot_items, units * block * window * spot_capacity(op));
        }
        int64_t size = op->linear ? 0 : scratch_size(op) * examples_per_scratch(op, chunk);
        scratch = larger(scratch, size);
        if (op->winograd) space = larger(space, winograd_size(op, examples_per_scratch(op, chunk)));
        if (op->strip) { /* transformed inputs, or a kernel row of weights with what its last vector reads past it */
            space = larger(space, strip_size(op));
            space = larger(space, (int64_t)(op->run + PAD) * LANES);
        }
        pixels = larger(pixels, units);
    }
    w->scratch = take(w, 4 * (scratch + PAD));
    w->space = take(w, 4 * (space + PAD));
    w->next = take(w, windows * (int64_t)sizeof *w->next);
    w->spots = take(w, (spots + 1) * (int64_t)sizeof *w->spots);
    w->spot_items = take(w, (spot_items + PAD) * (int64_t)sizeof *w->spot_items);
    for (int i = 0; i < LISTS; i++) {
        /* More items than there can be: places after the last are written to before they are known to be needed. */
        w->lists[i].items = take(w, (pixels * chunk + PAD) * (int64_t)sizeof(struct item));
        w->lists[i].end = take(w, 4 * chunk);
        w->lists[i].example = take(w, 4 * chunk);
    }
    return !w->failed;
}

#endif
