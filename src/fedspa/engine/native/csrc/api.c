/* The C interface: picks the level. */
#include "levels.h"
#include "net.h"
#include "stream.h"

#include <stdlib.h>

int64_t fedspa_abi(void) { return FEDSPA_ABI; }

int64_t fedspa_best_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return LEVEL_AVX512;
    if (fma) return LEVEL_AVX2;
#elif defined(__aarch64__)
    return LEVEL_NEON;
#endif
    return LEVEL_PLAIN;
}

/* A level above what the CPU has would crash: take the best there is instead. */
static int64_t at_most_best(int64_t level) {
    const int64_t best = fedspa_best_level();
    return level < best ? level : best;
}

const struct level *fedspa_level(int64_t level) {
    level = at_most_best(level);
#if defined(__x86_64__)
    if (level >= LEVEL_AVX512) return &fedspa_level_avx512;
    if (level >= LEVEL_AVX2) return &fedspa_level_avx2;
#elif defined(__aarch64__)
    if (level >= LEVEL_NEON) return &fedspa_level_neon;
#endif
    (void)level;
    return &fedspa_level_plain;
}

int64_t fedspa_sum(const struct fedspa_net *net, int64_t level, const float *theta, const struct fedspa_task *task,
                   int64_t *sum, int64_t *zeroed) {
    const int64_t code = task_fault(net, task);
    return code == FEDSPA_OK ? fedspa_level(level)->sum(net, theta, task, sum, zeroed) : code;
}

void fedspa_words(const uint8_t *key, int64_t level, int64_t position, int64_t count, uint64_t *words) {
    struct stream stream;
    uint64_t room[66];
    stream_open(&stream, key, (int)at_most_best(level), (uint64_t)position);
    for (int64_t done = 0; done < count; done += 64) {
        int64_t n = count - done < 64 ? count - done : 64;
        const uint64_t *word = stream_words(&stream, n, room);
        for (int64_t i = 0; i < n; i++) words[done + i] = word[i];
    }
}

void fedspa_gaussian(const uint8_t *key, int64_t level, int64_t position, int64_t count, double *values) {
    fedspa_level(level)->gaussian(key, position, count, values);
}

int64_t fedspa_draw(const uint8_t *key, int64_t level, int64_t skip, int64_t sampling, int64_t records, int64_t batch,
                    int64_t *chosen) {
    struct stream stream;
    uint64_t *words = malloc(3 * 8 * (size_t)stream_room(records, batch));
    uint8_t *seen = malloc((size_t)records + 1);
    int64_t count = -1;
    if (words && seen) {
        stream_open(&stream, key, (int)at_most_best(level), (uint64_t)skip);
        count = sampling == SAMPLE_POISSON
                    ? draw_poisson(&stream, (double)batch / (double)records, records, chosen, words)
                    : draw_fixed(&stream, batch, records, chosen, words, seen);
    }
    free(words);
    free(seen);
    return count;
}
