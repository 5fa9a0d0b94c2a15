/* The C interface: picks the level, and spreads the work of a round over threads. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "net.h"

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

const struct level *fedspa_level(int64_t level) {
    const int64_t best = fedspa_best_level();
    if (level > best) level = best; /* one above what the CPU has would crash */
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

/* Runs `work` on that many threads, and waits for them. Where none can be had, the caller does all of it. */
static void in_threads(int64_t threads, void *(*work)(void *), void *shared) {
    pthread_t *members = threads > 1 ? malloc((size_t)threads * sizeof *members) : NULL;
    int64_t started = 0;
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t most, before;
    sigfillset(&most); /* signals are for the threads that Python knows, but for those that a thread brings on itself */
    for (int i = 0; i < 4; i++) sigdelset(&most, own[i]);
    pthread_sigmask(SIG_SETMASK, &most, &before);
    while (members && started < threads && !pthread_create(members + started, NULL, work, shared)) started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started == 0) work(shared);
    while (started > 0) pthread_join(members[--started], NULL);
    free(members);
}

/* The number of the next piece. */
static int64_t next_of(int64_t *taken) { return __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED); }

struct round {
    struct fedspa_agent *agents;
    int64_t count, taken;
    const struct level *level;
    const float *theta;
    int32_t *stop;
};

static void *train_agents(void *shared) {
    struct round *round = shared;
    for (int64_t i; (i = next_of(&round->taken)) < round->count;) {
        struct fedspa_agent *agent = round->agents + i;
        agent->code = task_fault(agent->net, &agent->task);
        if (agent->code == FEDSPA_OK)
            agent->code = round->level->train(agent->net, round->theta, &agent->task, agent->delta, &agent->zeroed,
                                              round->stop);
        if (agent->code != FEDSPA_OK) __atomic_store_n(round->stop, 1, __ATOMIC_RELAXED); /* nobody waits for the others */
    }
    return NULL;
}

void fedspa_train(struct fedspa_agent *agents, int64_t count, int64_t level, const float *theta, int64_t threads,
                  int32_t *stop) {
    struct round round = {agents, count, 0, fedspa_level(level), theta, stop};
    in_threads(threads < count ? threads : count, train_agents, &round);
}

struct examination {
    const struct fedspa_net *net;
    const struct level *level;
    const float *theta, *x;
    int64_t count, each, taken; /* `each` records a piece */
    float *logits;
    int64_t code;
};

static void *examine(void *shared) {
    struct examination *all = shared;
    const int *input = all->net->input;
    const int64_t size = (int64_t)input[0] * input[1] * input[2];
    for (int64_t first; (first = all->each * next_of(&all->taken)) < all->count;) {
        const int64_t left = all->count - first;
        const int64_t code = all->level->logits(all->net, all->theta, all->x + first * size,
                                                left < all->each ? left : all->each,
                                                all->logits + first * all->net->classes);
        if (code != FEDSPA_OK) __atomic_store_n(&all->code, code, __ATOMIC_RELAXED);
    }
    return NULL;
}

int64_t fedspa_logits(const struct fedspa_net *net, int64_t level, const float *theta, const float *x, int64_t count,
                      int64_t threads, float *logits) {
    if (threads > count) threads = count;
    const int64_t each = threads > 1 ? (count + threads - 1) / threads : count;
    struct examination all = {net, fedspa_level(level), theta, x, count, each, 0, logits, FEDSPA_OK};
    in_threads(threads, examine, &all);
    return all.code;
}
