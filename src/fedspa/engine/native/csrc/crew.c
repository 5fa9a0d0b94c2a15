/* The agents of a round on several threads: whoever is free takes the next. */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "levels.h"
#include "net.h"

struct crew {
    struct fedspa_agent *agents;
    int64_t count, next;
    const struct level *level;
    const float *theta;
    volatile int32_t *stop;
};

/* What would lead outside of the agent's memory, or move a coordinate twice. */
static int64_t fault(const struct fedspa_agent *agent) {
    const struct fedspa_task *task = &agent->task;
    for (int64_t j = 0; task->coordinates && j < task->active; j++) {
        if (task->coordinates[j] < 0 || task->coordinates[j] >= agent->net->dimension) return FEDSPA_MASK;
        if (j && task->coordinates[j] <= task->coordinates[j - 1]) return FEDSPA_ORDER;
    }
    for (int64_t i = 0; task->rows && i < task->records; i++)
        if (task->rows[i] < 0 || task->rows[i] >= task->held) return FEDSPA_ROWS;
    return FEDSPA_OK;
}

static void *take_agents(void *shared) {
    struct crew *crew = shared;
    for (int64_t i; (i = __atomic_fetch_add(&crew->next, 1, __ATOMIC_RELAXED)) < crew->count;) {
        struct fedspa_agent *agent = crew->agents + i;
        agent->code = fault(agent);
        if (agent->code == FEDSPA_OK)
            agent->code = crew->level->train(agent->net, crew->theta, &agent->task, agent->delta, &agent->clip,
                                             &agent->zeroed, crew->stop);
        if (agent->code != FEDSPA_OK) *crew->stop = 1; /* the round has failed: nobody waits for the others */
    }
    return NULL;
}

void fedspa_train(struct fedspa_agent *agents, int64_t count, int64_t level, const float *theta, int64_t threads,
                  volatile int32_t *stop) {
    struct crew crew = {agents, count, 0, fedspa_level(level), theta, stop};
    if (threads > count) threads = count;
    pthread_t *members = threads > 1 ? malloc((size_t)threads * sizeof *members) : NULL;
    int64_t started = 0;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads that Python knows */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (members && started < threads && !pthread_create(members + started, NULL, take_agents, &crew)) started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started == 0) take_agents(&crew);
    while (started > 0) pthread_join(members[--started], NULL);
    free(members);
}
