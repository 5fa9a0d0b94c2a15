/* The native engine's streams at one level (-DLEVEL=, with that target's flags), one function each, for tests. */
#if LEVEL == 0 || LEVEL == 3
#pragma GCC optimize("fp-contract=off") /* as level.h has it */
#endif
#include <string.h>

#include "gauss.h"

void probe_words(const uint8_t *key, int64_t level, int64_t position, int64_t count, uint64_t *words) {
    struct stream stream;
    uint64_t room[66];
    stream_open(&stream, key, (int)level, (uint64_t)position);
    for (int64_t done = 0; done < count; done += 64) {
        const int64_t n = count - done < 64 ? count - done : 64;
        memcpy(words + done, stream_words(&stream, n, room), 8 * (size_t)n);
    }
}

void probe_gaussian(const uint8_t *key, int64_t level, int64_t position, int64_t count, double *values) {
    struct stream stream;
    double block[GAUSS_BLOCK];
    stream_open(&stream, key, (int)level, (uint64_t)position);
    for (int64_t start = 0; start < count; start += GAUSS_BLOCK) {
        const int64_t n = count - start < GAUSS_BLOCK ? count - start : GAUSS_BLOCK;
        const int64_t half = (n + 1) / 2; /* as `release` makes a block */
        for (int64_t i = 0; i < half; i += GAUSS_STEP)
            gauss_pairs(&stream, half, i, half - i < GAUSS_STEP ? half - i : GAUSS_STEP, block + i, block + half + i);
        stream.position += (uint64_t)(2 * half);
        memcpy(values + start, block, 8 * (size_t)n);
    }
}

/* `chosen`, `words` and `seen` have room for what stream.h says. */
int64_t probe_draw(const uint8_t *key, int64_t level, int64_t skip, int64_t fixed, int64_t records, int64_t batch,
                   int64_t *chosen, uint64_t *words, uint8_t *seen) {
    struct stream stream;
    stream_open(&stream, key, (int)level, (uint64_t)skip);
    return fixed ? draw_fixed(&stream, batch, records, chosen, words, seen)
                 : draw_poisson(&stream, (double)batch / (double)records, records, chosen, words);
}

/* Two values of each radius and angle; returns how many lanes disagree. */
int64_t probe_pairs(const uint64_t *words, int64_t count, double *values) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        L radii = {0}, angles = {0};
        D first, second;
        radii += (int64_t)words[2 * i], angles += (int64_t)words[2 * i + 1];
        box_muller(radii, angles, &first, &second);
        for (int j = 1; j < LANES / 2; j++) wrong += first[j] != first[0] || second[j] != second[0];
        values[2 * i] = first[0], values[2 * i + 1] = second[0];
    }
    return wrong;
}
