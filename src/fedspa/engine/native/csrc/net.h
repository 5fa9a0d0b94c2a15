/* The net as the step sees it: a chain of operations over buffers, and where each parameter lives.
 *
 * Activations are channels-last, so that a convolution's window is one contiguous run per kernel row, and a buffer
 * carries the zero border that the convolution after it wants. Parameters live in rows: one row per output channel, one
 * run per kernel row, each run padded to PAD floats. Gradients and the local theta use that layout; `place` leads from
 * a parameter's index in the flat theta to it. What lies in the padding of theta is 0; in a gradient's it is junk.
 */
#ifndef FEDSPA_NET_H
#define FEDSPA_NET_H

#include <stdint.h>

#include "fedspa_native.h"

#define PAD 16 /* floats; the widest vector of any level */

struct buffer {
    int channels, height, width, pad_h, pad_w;
    int row;         /* floats from one image row to the next, border included */
    int origin;      /* where pixel (0, 0) starts */
    int64_t example; /* floats from one example to the next; at least 2 PAD of them never hold a value */
};

enum { OP_WEIGHTED, OP_RELU, OP_TANH };

/* OP_WEIGHTED is a convolution or a linear layer (a convolution with one pixel and one run), with the max-pooling and the
 * ReLU behind it if there are any. They commute, so their order does not matter. */
struct op {
    int kind, linear;
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w; /* of the convolution */
    int pool, pool_h, pool_w, pool_stride_h, pool_stride_w, pool_pad_h, pool_pad_w;
    int winograd, strip; /* forward by winograd.h, by strip.h */
    int relu;
    int outputs, runs, run, run_padded, row_length; /* row_length: from row to row */
    int used_h, used_w;                          /* the convolution's pixels that anything reads */
    int full_h, full_w;
    int64_t weights, bias;                       /* in the row layout; bias -1: none */
    int64_t packed;                              /* of the weights as the forward pass reads them */
    int outputs_padded;
};

/* The blocks that one training works in. They go back to the net at its end and serve the next agent: to ask the
 * operating system for fresh pages costs as much as several local steps.
 */
struct memory {
    void **block;
    int64_t *size;
    int count, used, capacity;
};

#define SPARES 64 /* more trainings at once than there are cores to run them; what does not fit is freed */

/* What no training uses at the moment: places that are taken and filled by one atomic instruction each. A lock could be
 * held by a thread that a fork leaves behind, and the child would wait for it for ever. */
struct memory_pool {
    struct memory *spare[SPARES];
};

/* NULL where there is no memory. Every borrowed one must be given back. */
struct memory *memory_borrow(struct memory_pool *pool);
void memory_return(struct memory_pool *pool, struct memory *memory);
void memory_free(struct memory_pool *pool);

/* The next block, on a cache line of its own, or NULL. A new one has all bytes 0, one that served before what was left in
 * it. An empty request still gets a line. */
void *memory_take(struct memory *memory, int64_t bytes);

struct fedspa_net {
    int count;           /* operations; buffer i is the input of operation i */
    struct op *ops;
    struct buffer *buffers;
    int input[3];
    int classes;
    int64_t dimension;   /* d */
    int64_t layout;      /* floats of the row layout */
    int64_t packed;      /* floats of all packed weights */
    int32_t *place;
    struct memory_pool *pool;
};

/* What in a task would lead outside of its memory, or move a coordinate twice: a code, FEDSPA_OK where nothing does. */
int64_t task_fault(const struct fedspa_net *net, const struct fedspa_task *task);

/* What is compiled once per instruction set (level.h). */
struct level {
    int64_t (*train)(const struct fedspa_net *, const float *, const struct fedspa_task *, float *, int64_t *,
                     const int32_t *);
    int64_t (*sum)(const struct fedspa_net *, const float *, const struct fedspa_task *, int64_t *, int64_t *);
    int64_t (*logits)(const struct fedspa_net *, const float *, const float *, int64_t, float *);
};

/* The best that this CPU has, and not above `level`. */
const struct level *fedspa_level(int64_t level);

extern const struct level fedspa_level_plain;
#if defined(__x86_64__)
extern const struct level fedspa_level_avx2, fedspa_level_avx512;
#elif defined(__aarch64__)
extern const struct level fedspa_level_neon;
#endif

#endif
