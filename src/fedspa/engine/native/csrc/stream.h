/* Words of one key in order, and the two samplers on them: the same words make the same batches as in Python. */
#ifndef FEDSPA_STREAM_H
#define FEDSPA_STREAM_H

#include <stdint.h>

/* AES-256 in counter mode over zeros: the words that noise and sampling are made of. */
struct aes_key {
    uint8_t round[15][16];
    int hardware; /* 0: plain C, 1: the CPU's instructions for one block, 2: VAES on 512 bits */
};

/* `level` caps what hardware may be used (LEVEL_PLAIN forces the C code). */
void aes_expand(struct aes_key *key, const uint8_t *bytes, int level);

/* `count` blocks of key stream from block number `counter` on. */
void aes_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out);

/* The best `hardware` that this CPU has, and the blocks by it. */
#if defined(__x86_64__) || defined(__aarch64__)
#define AES_INSTRUCTIONS 1
int aes_hardware(void);
void aes_hardware_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out);
#endif

struct stream {
    struct aes_key key;
    uint64_t position; /* 64-bit words consumed */
};

void stream_open(struct stream *stream, const uint8_t *key, int level, uint64_t position);

/* `count` words from number `position` of the key on; those of the stream itself stay where they are. */
const uint64_t *stream_words_at(const struct stream *stream, uint64_t position, int64_t count, uint64_t *words);

/* The next `count` words. `words` needs capacity for count + 2: whole cipher blocks are written. */
const uint64_t *stream_words(struct stream *stream, int64_t count, uint64_t *words);

/* Chosen records, sorted; returns how many. `chosen` and `seen` have capacity for `records`, `words` for three times
 * stream_capacity(records, batch). */
int64_t draw_poisson(struct stream *stream, double rate, int64_t records, int64_t *chosen, uint64_t *words);
int64_t draw_fixed(struct stream *stream, int64_t batch, int64_t records, int64_t *chosen, uint64_t *words,
                   uint8_t *seen);
int64_t stream_capacity(int64_t records, int64_t batch);

#endif
