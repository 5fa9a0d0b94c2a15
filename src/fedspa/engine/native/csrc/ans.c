/* The decoder of entropy-coded integers, asymmetric numeral systems of 24-bit frequencies. fedspa/wire/coding.py
 * specifies it, and has another in the place of this where there is no compiled library. */
#include "fedspa_native.h"

#define BITS 24
#define CELLS_BITS 12 /* a search for an interval begins at its cell */

enum { MORE = 1, UNNEEDED_ESCAPE };

struct stack {
    const uint32_t *words;
    int64_t count;
    uint64_t state;
};

static void refill(struct stack *stack) {
    if (stack->state >> 32 == 0 && stack->count) stack->state = stack->state << 32 | stack->words[--stack->count];
}

/* Takes the interval [start, start + size) off the state, in which the state's lowest bits lie. */
static void take(struct stack *stack, uint32_t low, uint32_t start, uint32_t size) {
    stack->state = (stack->state >> BITS) * size + (low - start);
    refill(stack);
}

static uint32_t lowest(const struct stack *stack) { return (uint32_t)stack->state & (((uint32_t)1 << BITS) - 1); }

static int64_t half(struct stack *stack) {
    const uint32_t low = lowest(stack);
    take(stack, low, low & ~(uint32_t)0xFF, 0x100);
    return low >> 8;
}

int64_t fedspa_unpack(const uint32_t *words, int64_t count, const uint32_t *starts, int64_t radius, int64_t active,
                      int64_t *out) {
    struct stack stack = {words, count, 0};
    refill(&stack);
    refill(&stack);
    int32_t first[1 << CELLS_BITS], symbol = 0;
    for (uint32_t cell = 0; cell < 1 << CELLS_BITS; cell++) {
        while (starts[symbol + 1] <= cell << (BITS - CELLS_BITS)) symbol++;
        first[cell] = symbol;
    }
    for (int64_t i = 0; i < active; i++) {
        const uint32_t low = lowest(&stack);
        int32_t found = first[low >> (BITS - CELLS_BITS)];
        while (starts[found + 1] <= low) found++;
        take(&stack, low, starts[found], starts[found + 1] - starts[found]);
        out[i] = found - radius;
    }
    for (int64_t i = 0; i < active; i++) {
        if (out[i] <= radius) continue;
        const int64_t high = half(&stack);
        out[i] = (high << 16 | half(&stack)) - ((int64_t)1 << 31);
        if (-radius <= out[i] && out[i] <= radius) return UNNEEDED_ESCAPE;
    }
    return stack.state || stack.count ? MORE : FEDSPA_OK;
}
