/* From a list of layers to a chain of operations: shapes, fusion, buffers and the row layout; and the memory that trainings
 * work in. */
#include "net.h"

#include <stdlib.h>
#include <string.h>

#define LINE 64

struct memory *memory_borrow(struct memory_pool *pool) {
    struct memory *memory = NULL;
    for (int i = 0; i < SPARES && !memory; i++) /* a look first: an exchange takes the line from the other cores */
        if (__atomic_load_n(pool->spare + i, __ATOMIC_RELAXED))
            memory = __atomic_exchange_n(pool->spare + i, NULL, __ATOMIC_ACQUIRE);
    if (!memory) memory = calloc(1, sizeof *memory);
    if (memory) memory->used = 0;
    return memory;
}

static void discard(struct memory *memory) {
    for (int i = 0; i < memory->count; i++) free(memory->block[i]);
    free(memory->block);
    free(memory->size);
    free(memory);
}

void memory_return(struct memory_pool *pool, struct memory *memory) {
    for (int i = 0; i < SPARES; i++) {
        struct memory *none = NULL;
        if (__atomic_compare_exchange_n(pool->spare + i, &none, memory, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) return;
    }
    discard(memory);
}

void memory_free(struct memory_pool *pool) {
    for (int i = 0; i < SPARES; i++)
        if (pool->spare[i]) discard(pool->spare[i]);
}

/* Lets one more block be noted. */
static int grow(struct memory *memory) {
    const int capacity = 2 * memory->capacity + 64;
    void **block = realloc(memory->block, (size_t)capacity * sizeof *block);
    if (block) memory->block = block;
    int64_t *size = realloc(memory->size, (size_t)capacity * sizeof *size);
    if (size) memory->size = size;
    if (!block || !size) return 0;
    memory->capacity = capacity;
    return 1;
}

void *memory_take(struct memory *memory, int64_t bytes) {
    const int64_t size = (bytes + 2 * LINE - 1) / LINE * LINE;
    const int i = memory->used;
    if (i == memory->capacity && !grow(memory)) return NULL;
    if (i < memory->count && memory->size[i] < size) {
        free(memory->block[i]);
        memory->block[i] = NULL;
        memory->size[i] = 0;
    }
    if (i == memory->count || !memory->block[i]) {
        memory->block[i] = aligned_alloc(LINE, (size_t)size);
        if (i == memory->count) memory->count++;
        memory->size[i] = memory->block[i] ? size : 0;
        if (!memory->block[i]) return NULL;
        memset(memory->block[i], 0, (size_t)size);
    }
    memory->used++;
    return memory->block[i];
}

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static int larger(int a, int b) { return a > b ? a : b; }

static int pooled(int size, int kernel, int stride, int pad) {
    return size + 2 * pad < kernel ? 0 : (size + 2 * pad - kernel) / stride + 1;
}

static void shape_buffer(struct buffer *b, int channels, int height, int width) {
    b->channels = channels;
    b->height = height;
    b->width = width;
}

/* The border is known only once the next operation is. */
static void place_buffer(struct buffer *b, int pad_h, int pad_w, int spill) {
    b->pad_h = pad_h;
    b->pad_w = pad_w;
    b->row = (b->width + 2 * pad_w) * b->channels;
    b->origin = pad_h * b->row + pad_w * b->channels;
    b->example = round_up((int64_t)b->row * (b->height + 2 * pad_h) + spill + 2 * PAD, PAD);
}

/* Is there an output, and is every window where the passes look for it? A pooling's must hold a pixel of the input. */
static int fits_window(const struct fedspa_layer *l, const struct buffer *in) {
    if (l->kernel_h < 1 || l->kernel_w < 1 || l->stride_h < 1 || l->stride_w < 1) return 0;
    if (l->pad_h < 0 || l->pad_w < 0) return 0;
    if (l->kind != LAYER_CONV && (2 * l->pad_h > l->kernel_h || 2 * l->pad_w > l->kernel_w)) return 0;
    return pooled(in->height, (int)l->kernel_h, (int)l->stride_h, (int)l->pad_h) > 0 &&
           pooled(in->width, (int)l->kernel_w, (int)l->stride_w, (int)l->pad_w) > 0;
}

static void add_weighted(struct fedspa_net *net, struct op *op, const struct fedspa_layer *l, const struct buffer *in) {
    op->kind = OP_WEIGHTED;
    op->linear = l->kind == LAYER_LINEAR;
    op->outputs = (int)l->outputs;
    op->kernel_h = op->linear ? 1 : (int)l->kernel_h;
    op->kernel_w = op->linear ? 1 : (int)l->kernel_w;
    op->stride_h = op->linear ? 1 : (int)l->stride_h;
    op->stride_w = op->linear ? 1 : (int)l->stride_w;
    op->pad_h = op->linear ? 0 : (int)l->pad_h;
    op->pad_w = op->linear ? 0 : (int)l->pad_w;
    op->pool_h = op->pool_w = op->pool_stride_h = op->pool_stride_w = 1;
    op->runs = op->kernel_h;
    op->run = op->linear ? in->channels * in->height * in->width : op->kernel_w * in->channels;
    op->run_padded = (int)round_up(op->run, PAD);
    op->row_length = op->runs * op->run_padded;
    /* Rows a large power of two apart would share few sets of the nearest cache. */
    if (op->outputs > 1 && op->row_length % (8 * PAD) == 0) op->row_length += 4 * PAD;
    op->outputs_padded = (int)round_up(op->outputs, PAD);
    op->full_h = op->used_h = op->linear ? 1 : pooled(in->height, op->kernel_h, op->stride_h, op->pad_h);
    op->full_w = op->used_w = op->linear ? 1 : pooled(in->width, op->kernel_w, op->stride_w, op->pad_w);
    op->weights = net->layout;
    net->layout += (int64_t)op->outputs * op->row_length;
    op->bias = l->bias_offset < 0 ? -1 : net->layout;
    net->layout += l->bias_offset < 0 ? 0 : op->outputs_padded;
    op->packed = net->packed;
    /* Capacity for the weights as they are, as winograd.h wants 3 x 3 (16 points), or as strip.h wants five wide (8 a row). */
    const int points = op->kernel_w == 5 ? 8 * op->kernel_h : larger(op->kernel_h * op->kernel_w, 16);
    net->packed += op->linear ? 0 : (int64_t)op->outputs_padded * in->channels * points + PAD;

    for (int r = 0; r < op->outputs; r++) {
        int64_t row = op->weights + (int64_t)r * op->row_length;
        int spatial = op->linear ? in->height * in->width : op->kernel_h * op->kernel_w;
        for (int c = 0; c < in->channels; c++)
            for (int s = 0; s < spatial; s++) {
                int64_t flat = l->weight_offset + ((int64_t)r * in->channels + c) * spatial + s;
                int run = op->linear ? 0 : s / op->kernel_w, column = op->linear ? s : s % op->kernel_w;
                net->place[flat] = (int32_t)(row + (int64_t)run * op->run_padded + column * in->channels + c);
            }
        if (op->bias >= 0) net->place[l->bias_offset + r] = (int32_t)(op->bias + r);
    }
}

/* Max-pooling and ReLU straight behind a layer become part of it. */
static int fuse(struct op *op, const struct fedspa_layer *l, struct buffer *out) {
    if (op->kind != OP_WEIGHTED) return 0;
    if (l->kind == LAYER_RELU && !op->relu) {
        op->relu = 1;
        return 1;
    }
    if (l->kind != LAYER_MAXPOOL || op->pool || op->linear || l->kernel_h * l->kernel_w > 256) return 0;
    op->pool = 1;
    op->pool_h = (int)l->kernel_h;
    op->pool_w = (int)l->kernel_w;
    op->pool_stride_h = (int)l->stride_h;
    op->pool_stride_w = (int)l->stride_w;
    op->pool_pad_h = (int)l->pad_h;
    op->pool_pad_w = (int)l->pad_w;
    int height = pooled(out->height, op->pool_h, op->pool_stride_h, op->pool_pad_h);
    int width = pooled(out->width, op->pool_w, op->pool_stride_w, op->pool_pad_w);
    int last_h = (height - 1) * op->pool_stride_h - op->pool_pad_h + op->pool_h;
    int last_w = (width - 1) * op->pool_stride_w - op->pool_pad_w + op->pool_w;
    op->used_h = last_h < out->height ? last_h : out->height;
    op->used_w = last_w < out->width ? last_w : out->width;
    shape_buffer(out, out->channels, height, width);
    return 1;
}

/* Winograd's transforms pay from some channels on; its windows come in whole pairs of rows and columns. */
static void choose_forward(struct op *op, const struct buffer *in) {
    op->winograd = op->kind == OP_WEIGHTED && !op->linear && op->kernel_h == 3 && op->kernel_w == 3 && op->stride_h == 1 &&
                   op->stride_w == 1 && in->channels >= 16 && op->outputs >= 16 && op->used_h % 2 == 0 &&
                   op->used_w % 2 == 0 && op->used_w >= 4;
    op->strip = op->kind == OP_WEIGHTED && !op->linear && op->kernel_w == 5 && op->stride_w == 1 && op->used_w >= 4;
}

static int build(struct fedspa_net *net, const struct fedspa_layer *layers, int64_t count) {
    int flat = 0;
    for (int64_t i = 0; i < count; i++) {
        const struct fedspa_layer *l = layers + i;
        struct buffer *in = net->buffers + net->count, *out = in + 1;
        struct op *op = net->ops + net->count;
        if (l->kind == LAYER_FLATTEN) {
            flat = 1;
            if (net->count == 0) shape_buffer(in, in->channels * in->height * in->width, 1, 1);
            continue;
        }
        if (l->kind == LAYER_MAXPOOL && (flat || !fits_window(l, in))) return 0; /* spatial layers end where the net is flat */
        if (net->count > 0 && fuse(op - 1, l, in)) continue;
        shape_buffer(out, in->channels, in->height, in->width);
        switch (l->kind) {
        case LAYER_CONV:
            if (flat || !fits_window(l, in)) return 0;
            add_weighted(net, op, l, in);
            shape_buffer(out, op->outputs, op->full_h, op->full_w);
            break;
        case LAYER_LINEAR:
            add_weighted(net, op, l, in);
            shape_buffer(out, op->outputs, 1, 1);
            flat = 1;
            break;
        case LAYER_RELU:
            op->kind = OP_RELU;
            break;
        case LAYER_TANH:
            op->kind = OP_TANH;
            break;
        default: /* a pooling that is no part of a convolution */
            return 0;
        }
        net->count++;
    }
    for (int i = 0; i < net->count; i++) choose_forward(net->ops + i, net->buffers + i);
    for (int i = 0; i <= net->count; i++) {
        struct op *next = i < net->count && net->ops[i].kind == OP_WEIGHTED ? net->ops + i : NULL;
        /* The forward kernel takes pixels in fours: up to three beyond a row's end are read and forgotten. */
        int spill = next ? 4 * next->stride_w * net->buffers[i].channels : 0;
        place_buffer(net->buffers + i, next ? next->pad_h : 0, next ? next->pad_w : 0, spill);
    }
    struct buffer *last = net->buffers + net->count;
    net->classes = last->channels;
    return net->count > 0 && last->height == 1 && last->width == 1 && net->layout < INT32_MAX;
}

struct fedspa_net *fedspa_net_new(const struct fedspa_layer *layers, int64_t count, const int64_t *input,
                                  int64_t dimension) {
    struct fedspa_net *net = calloc(1, sizeof *net);
    if (!net) return NULL;
    net->ops = calloc((size_t)count + 1, sizeof *net->ops);
    net->buffers = calloc((size_t)count + 2, sizeof *net->buffers);
    net->place = calloc((size_t)dimension, sizeof *net->place);
    net->pool = calloc(1, sizeof *net->pool);
    net->dimension = dimension;
    if (net->ops && net->buffers && net->place && net->pool) {
        for (int i = 0; i < 3; i++) net->input[i] = (int)input[i];
        shape_buffer(net->buffers, net->input[0], net->input[1], net->input[2]);
        if (build(net, layers, count)) return net;
    }
    fedspa_net_free(net);
    return NULL;
}

int64_t fedspa_classes(const struct fedspa_net *net) { return net->classes; }

void fedspa_net_free(struct fedspa_net *net) {
    if (!net) return;
    if (net->pool) memory_free(net->pool);
    free(net->pool);
    free(net->ops);
    free(net->buffers);
    free(net->place);
    free(net);
}

int64_t task_fault(const struct fedspa_net *net, const struct fedspa_task *task) {
    for (int64_t j = 0; task->coordinates && j < task->active; j++) {
        if (task->coordinates[j] < 0 || task->coordinates[j] >= net->dimension) return FEDSPA_MASK;
        if (j && task->coordinates[j] <= task->coordinates[j - 1]) return FEDSPA_ORDER;
    }
    for (int64_t i = 0; task->numbers && i < task->records; i++)
        if (task->numbers[i] < 0 || task->numbers[i] >= task->held) return FEDSPA_RECORD;
    for (int64_t i = 0; task->counts && i < task->records; i++) {
        const int64_t count = task->counts[task->numbers ? task->numbers[i] : i];
        if (count < 1 || count > task->slots) return FEDSPA_COUNT;
    }
    return FEDSPA_OK;
}
