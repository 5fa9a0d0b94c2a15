/* The C interface of the native engine: build a net once, then train the agents of a round in a call.
 *
 * A call touches no global state but the net's spare memory, so callers may run several at once. An agent's result depends
 * on nothing but its own arguments (and, in the last bits, on the instruction set level): not on other agents or threads.
 */
#ifndef FEDSPA_NATIVE_H
#define FEDSPA_NATIVE_H

#include <stdint.h>

#define FEDSPA_ABI 15

enum { LAYER_CONV, LAYER_LINEAR, LAYER_MAXPOOL, LAYER_RELU, LAYER_TANH, LAYER_FLATTEN };

/* One layer. Offsets are places in the flat parameter vector; -1: no bias. */
struct fedspa_layer {
    int64_t kind, outputs;
    int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
    int64_t weight_offset, bias_offset;
};

enum { SAMPLE_POISSON, SAMPLE_FIXED };
enum { CLIP_NONE, CLIP_COORDINATE, CLIP_L2 };

/* One agent's work: tau steps from theta. */
struct fedspa_task {
    const float *x;       /* records x channels x height x width */
    const int64_t *y;
    const int64_t *numbers; /* where in x and y the agent's records are, or NULL: they are all there is */
    int64_t records;
    int64_t held;         /* records in x and y, where there are numbers */
    const int64_t *counts; /* where an example is a person: how many records each has, or NULL: an example is a record */
    int64_t slots;         /* of a person: records from one person to the next in x and y, of which the first count */
    const int64_t *coordinates; /* sorted, or NULL: all of them */
    int64_t active;             /* k */
    int64_t steps, batch;
    int64_t sampling, clip;
    double rate;            /* Poisson: chance of a record */
    double step_size;       /* local_lr * scale */
    double clip_value;
    double noise_per_clip;  /* standard deviation of the noise on the sum, in units of clip_value */
    double clip_margin;     /* what a clipped gradient stays below the clip value by, relatively */
    uint8_t sampling_key[32], noise_key[32];
};

enum { FEDSPA_OK, FEDSPA_STOPPED, FEDSPA_MEMORY, FEDSPA_LABEL, FEDSPA_MASK, FEDSPA_ORDER, FEDSPA_RECORD, FEDSPA_COUNT };
enum { LEVEL_PLAIN, LEVEL_AVX2, LEVEL_AVX512, LEVEL_NEON }; /* a CPU has either AVX or NEON */

struct fedspa_net;

/* A task, and where its result goes. */
struct fedspa_agent {
    const struct fedspa_net *net;
    struct fedspa_task task;
    float *delta;   /* k values */
    int64_t zeroed; /* sampled examples, over all steps, that counted as zero */
    int64_t code;
};

int64_t fedspa_abi(void);
int64_t fedspa_best_level(void);

/* NULL where the layers do not fit each other or memory ran out. Input is (channels, height, width). */
struct fedspa_net *fedspa_net_new(const struct fedspa_layer *layers, int64_t count, const int64_t *input,
                                  int64_t dimension);
void fedspa_net_free(struct fedspa_net *net);
int64_t fedspa_classes(const struct fedspa_net *net);

/* Trains every agent from theta. `stop` is polled between steps, and set where an agent fails: those that had not ended
 * by then have the code FEDSPA_STOPPED, or one of their own. */
void fedspa_train(struct fedspa_agent *agents, int64_t count, int64_t level, const float *theta, int64_t threads,
                  int32_t *stop);

/* sum: the clipped gradients of all records of a task on its coordinates, k whole numbers with 2^24 to the clip value. Of
 * the task it reads records, mask, clip and clip value. */
int64_t fedspa_sum(const struct fedspa_net *net, int64_t level, const float *theta, const struct fedspa_task *task,
                   int64_t *sum, int64_t *zeroed);

/* logits: one row of the net's outputs for each of `count` records. */
int64_t fedspa_logits(const struct fedspa_net *net, int64_t level, const float *theta, const float *x, int64_t count,
                      int64_t threads, float *logits);

/* Philox4x32-10: `count` words from block `first_block` on of a stream, which is two words of key, the domain and two
 * words of counter (fedspa/randomness/mask.py). */
void fedspa_words(const uint32_t *stream, uint64_t first_block, int64_t count, uint32_t *out);

/* out: the `active` of `dimension` coordinates that a stream picks, ascending (fedspa/randomness/mask.py). Takes a bit of
 * memory for each coordinate. */
int64_t fedspa_mask(const uint32_t *stream, int64_t dimension, int64_t active, int64_t *out);

/* Adds values in whole numbers of `unit` to the sums at their coordinates, or, without these, to the first sums. */
void fedspa_add_units(const float *values, const int64_t *coordinates, int64_t count, double unit, int64_t *sums);

/* out: `active` whole numbers from `count` words of the coder (fedspa/wire/coding.py). `starts` has the first of 2^24
 * places of each symbol, and 2^24 behind the last. 1 where the words hold more, 2 where a number needs no escape. */
int64_t fedspa_unpack(const uint32_t *words, int64_t count, const uint32_t *starts, int64_t radius, int64_t active,
                      int64_t *out);

#endif
