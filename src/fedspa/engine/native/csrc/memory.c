#include "memory.h"

#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define LINE 64
#define HUGE_PAGE ((int64_t)2 << 20)

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

/* Makes room for one more block to be noted. */
static int grow(struct memory *memory) {
    const int room = 2 * memory->room + 64;
    void **block = realloc(memory->block, (size_t)room * sizeof *block);
    if (block) memory->block = block;
    int64_t *size = realloc(memory->size, (size_t)room * sizeof *size);
    if (size) memory->size = size;
    if (!block || !size) return 0;
    memory->room = room;
    return 1;
}

static void *fresh(int64_t size) {
    /* Large blocks in large pages: fewer of them to ask for, and to find again. */
    const int64_t line = size < HUGE_PAGE ? LINE : HUGE_PAGE;
    void *block = aligned_alloc((size_t)line, (size_t)size);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (block && line == HUGE_PAGE) madvise(block, (size_t)size, MADV_HUGEPAGE);
#endif
    return block ? memset(block, 0, (size_t)size) : NULL;
}

void *memory_take(struct memory *memory, int64_t bytes) {
    const int64_t whole = bytes + LINE < HUGE_PAGE ? LINE : HUGE_PAGE, size = (bytes + LINE + whole - 1) / whole * whole;
    const int i = memory->used;
    if (i == memory->room && !grow(memory)) return NULL;
    if (i < memory->count && memory->size[i] < size) {
        free(memory->block[i]);
        memory->block[i] = NULL;
        memory->size[i] = 0;
    }
    if (i == memory->count || !memory->block[i]) {
        memory->block[i] = fresh(size);
        if (i == memory->count) memory->count++;
        memory->size[i] = memory->block[i] ? size : 0;
        if (!memory->block[i]) return NULL;
    }
    memory->used++;
    return memory->block[i];
}
