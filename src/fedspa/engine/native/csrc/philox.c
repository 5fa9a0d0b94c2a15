/* The public streams of a round, and what is done once for each value that travels: masks, words of Philox4x32-10, and
 * sums of updates. fedspa/randomness/mask.py and mask.py specify them, and are the twins of their tests. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fedspa_native.h"

#define BLOCKS 16 /* worked on at once, so that compilers make vectors of the rounds */
#define WORDS (4 * BLOCKS)

/* The words of BLOCKS blocks from `block` on. `stream` is two words of key, the domain and two words of counter. */
static void some_words(const uint32_t *stream, uint64_t block, uint32_t *out) {
    uint32_t a[BLOCKS], b[BLOCKS], c[BLOCKS], d[BLOCKS], key0 = stream[0], key1 = stream[1];
    for (int i = 0; i < BLOCKS; i++) {
        a[i] = (uint32_t)(block + (uint64_t)i);
        b[i] = stream[2];
        c[i] = stream[3];
        d[i] = stream[4];
    }
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u)
        for (int i = 0; i < BLOCKS; i++) {
            const uint64_t first = (uint64_t)a[i] * 0xD2511F53u, second = (uint64_t)c[i] * 0xCD9E8D57u;
            a[i] = (uint32_t)(second >> 32) ^ b[i] ^ key0;
            b[i] = (uint32_t)second;
            c[i] = (uint32_t)(first >> 32) ^ d[i] ^ key1;
            d[i] = (uint32_t)first;
        }
    for (int i = 0; i < BLOCKS; i++) {
        out[4 * i] = a[i];
        out[4 * i + 1] = b[i];
        out[4 * i + 2] = c[i];
        out[4 * i + 3] = d[i];
    }
}

void fedspa_words(const uint32_t *stream, uint64_t first_block, int64_t count, uint32_t *out) {
    uint32_t found[WORDS];
    for (; count > 0; count -= WORDS, out += WORDS, first_block += BLOCKS) {
        some_words(stream, first_block, found);
        memcpy(out, found, sizeof *out * (size_t)(count < WORDS ? count : WORDS));
    }
}

int64_t fedspa_mask(const uint32_t *stream, int64_t dimension, int64_t active, int64_t *out) {
    const int outside = active > dimension / 2;
    int64_t missing = outside ? dimension - active : active;
    const int64_t marks = (dimension + 63) / 64;
    uint64_t *marked = calloc((size_t)marks, sizeof *marked);
    if (!marked) return FEDSPA_MEMORY;
    uint32_t low_bits = 0, found[WORDS];
    while (low_bits < (uint64_t)dimension - 1) low_bits = low_bits << 1 | 1;
    for (uint64_t block = 0; missing > 0; block += BLOCKS) {
        some_words(stream, block, found);
        const int64_t enough = missing < WORDS ? missing : 0; /* else no draw of these can be one too many */
        for (int i = 0; i < WORDS && (!enough || missing > 0); i++) {
            const uint32_t draw = found[i] & low_bits;
            const uint64_t inside = draw < dimension, bit = inside << (draw & 63);
            uint64_t *mark = marked + (inside ? draw >> 6 : 0);
            missing -= inside & !(*mark & bit);
            *mark |= bit;
        }
    }
    for (int64_t i = 0; i < marks; i++) {
        uint64_t left = outside ? ~marked[i] : marked[i];
        if (i == marks - 1 && dimension % 64) left &= ((uint64_t)1 << (dimension % 64)) - 1;
        for (; left; left &= left - 1) *out++ = 64 * i + __builtin_ctzll(left);
    }
    free(marked);
    return FEDSPA_OK;
}

void fedspa_add_units(const float *values, const int64_t *coordinates, int64_t count, double unit, int64_t *sums) {
    const double per_unit = 1 / unit; /* a power of two */
    for (int64_t i = 0; i < count; i++)
        sums[coordinates ? coordinates[i] : i] += llrint((double)values[i] * per_unit);
}
