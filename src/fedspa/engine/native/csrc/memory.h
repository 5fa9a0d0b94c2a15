/* The blocks that one training works in. They go back to the net at its end and serve the next agent: to ask the
 * operating system for fresh pages costs as much as several local steps.
 */
#ifndef FEDSPA_MEMORY_H
#define FEDSPA_MEMORY_H

#include <stdint.h>

struct memory {
    void **block;
    int64_t *size;
    int count, used, room;
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

#endif
