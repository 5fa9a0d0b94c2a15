/* Runs what a test writes to its standard input, each at the plain level and at the CPU's best, and writes what came out:
 * so that the library can be tried on a machine, or an emulator of one, that has no Python. All integers have 64 bits. */
#include <stdio.h>
#include <stdlib.h>

#include "fedspa_native.h"
#define LEVEL 3
#include "streams_probe.c"

static void *take(int64_t bytes) {
    void *room = malloc((size_t)bytes + 1);
    if (!room || (bytes && fread(room, (size_t)bytes, 1, stdin) != 1)) exit(2);
    return room;
}

static void give(const void *from, int64_t bytes) {
    if (bytes && fwrite(from, (size_t)bytes, 1, stdout) != 1) exit(3);
}

/* Words of a key, then values of a Gaussian: by NEON, from the words of that level. */
static void draw(int64_t level, const uint8_t *key, const int64_t *about) {
    const int64_t position = about[0], count = about[1];
    uint64_t *words = malloc(8 * (size_t)count);
    double *values = malloc(8 * (size_t)count);
    probe_words(key, level, position, count, words);
    probe_gaussian(key, level, position, count, values);
    give(words, 8 * count);
    give(values, 8 * count);
    free(words);
    free(values);
}

struct sizes {
    int64_t layers, input[3], dimension, x, y, numbers, coordinates;
};

/* A training; then, of a private one, the sum of all its records; then the logits of all that are held. */
static void train(int64_t level, const struct fedspa_net *net, struct fedspa_task task, const float *theta, int64_t held) {
    const int64_t classes = fedspa_classes(net), k = task.active;
    float *delta = malloc(4 * (size_t)k), *logits = malloc(4 * (size_t)(held * classes));
    int64_t *sum = calloc((size_t)k, 8), zeroed = 0;
    int32_t stop = 0;
    struct fedspa_agent agent = {.net = net, .task = task, .delta = delta};
    fedspa_train(&agent, 1, level, theta, 1, &stop);
    if (task.clip != CLIP_NONE) agent.code |= fedspa_sum(net, level, theta, &task, sum, &zeroed) << 8;
    agent.code |= fedspa_logits(net, level, theta, task.x, held, 1, logits) << 16;
    give(&agent.code, 8);
    give(&agent.zeroed, 8);
    give(&zeroed, 8);
    give(delta, 4 * k);
    give(sum, 8 * k);
    give(logits, 4 * held * classes);
    free(delta);
    free(sum);
    free(logits);
}

int main(void) {
    const int64_t best = fedspa_best_level(), hardware = aes_hardware(), levels[2] = {LEVEL_PLAIN, best};
    int64_t kind;
    give(&best, 8);
    give(&hardware, 8);
    while (fread(&kind, 8, 1, stdin) == 1) {
        if (kind == 0) {
            uint8_t *key = take(32);
            int64_t *about = take(16);
            for (int i = 0; i < 2; i++) draw(levels[i], key, about);
            free(key);
            free(about);
            continue;
        }
        struct sizes *n = take(sizeof *n);
        struct fedspa_layer *layers = take(n->layers * (int64_t)sizeof *layers);
        float *theta = take(4 * n->dimension), *x = take(4 * n->x);
        int64_t *y = take(8 * n->y), *numbers = take(8 * n->numbers), *coordinates = take(8 * n->coordinates);
        struct fedspa_task *task = take(sizeof *task);
        task->x = x; /* addresses of another process until here */
        task->y = y;
        task->numbers = n->numbers ? numbers : NULL;
        task->coordinates = n->coordinates ? coordinates : NULL;
        struct fedspa_net *net = fedspa_net_new(layers, n->layers, n->input, n->dimension);
        if (!net) exit(4);
        for (int i = 0; i < 2; i++) train(levels[i], net, *task, theta, n->y);
        fedspa_net_free(net);
        void *taken[] = {n, layers, theta, x, y, numbers, coordinates, task};
        for (int i = 0; i < 8; i++) free(taken[i]);
    }
    return 0;
}
