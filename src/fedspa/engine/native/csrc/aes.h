/* AES-256 in counter mode over zeros: the words that noise and sampling are made of. */
#ifndef FEDSPA_AES_H
#define FEDSPA_AES_H

#include <stdint.h>

struct aes_key {
    uint8_t round[15][16];
    int hardware; /* 0: plain C, 1: the CPU's instructions for one block, 2: VAES on 512 bits */
};

/* `level` caps what hardware may be used (LEVEL_PLAIN forces the C code). */
void aes_expand(struct aes_key *key, const uint8_t *bytes, int level);

/* `count` blocks of key stream from block number `counter` on. */
void aes_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out);

/* One file for each kind of CPU: the best `hardware` that this one has, and the blocks by it. */
#if defined(__x86_64__) || defined(__aarch64__)
#define AES_INSTRUCTIONS 1
int aes_hardware(void);
void aes_hardware_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out);
#endif

#endif
