/* AES-256 (FIPS 197): the key, and the version in plain C. aes_x86.c and aes_arm.c have those by instructions; all give the
 * same bytes.
 *
 * The counter is a 128-bit big-endian block number whose upper half stays 0: 2^64 blocks are out of reach.
 */
#include "aes.h"

#include <string.h>

#include "fedspa_native.h"

/* The S-box, computed rather than typed: inverses in GF(2^8) by walking the generator 3 and its inverse. */
static uint8_t rotate(uint8_t v, int by) { return (uint8_t)(v << by | v >> (8 - by)); }

static uint8_t twice(uint8_t v) { return (uint8_t)(v << 1 ^ (v >> 7) * 0x1b); }

static void make_sbox(uint8_t *sbox) {
    uint8_t p = 1, q = 1;
    do {
        p = p ^ twice(p); /* times 3 */
        q ^= q << 1;      /* over 3 */
        q ^= q << 2;
        q ^= q << 4;
        if (q & 0x80) q ^= 0x09;
        sbox[p] = q ^ rotate(q, 1) ^ rotate(q, 2) ^ rotate(q, 3) ^ rotate(q, 4) ^ 0x63;
    } while (p != 1);
    sbox[0] = 0x63;
}

static int hardware_level(int level) {
    int best = 0;
#ifdef AES_INSTRUCTIONS
    /* Asked once: a virtual machine's CPU is asked through its host, which takes as long as a tenth of a local step. */
    static int known; /* one more than the answer */
    best = __atomic_load_n(&known, __ATOMIC_RELAXED) - 1;
    if (best < 0) __atomic_store_n(&known, 1 + (best = aes_hardware()), __ATOMIC_RELAXED);
#endif
    return level == LEVEL_PLAIN ? 0 : level == LEVEL_AVX512 ? best : best < 1 ? best : 1;
}

void aes_expand(struct aes_key *key, const uint8_t *bytes, int level) {
    uint8_t sbox[256], *w = key->round[0];
    make_sbox(sbox);
    memcpy(w, bytes, 32);
    uint8_t constant = 1;
    for (int i = 8; i < 60; i++) {
        uint8_t t[4];
        memcpy(t, w + 4 * (i - 1), 4);
        if (i % 8 == 0) {
            uint8_t first = t[0];
            t[0] = sbox[t[1]] ^ constant;
            t[1] = sbox[t[2]];
            t[2] = sbox[t[3]];
            t[3] = sbox[first];
            constant = twice(constant);
        } else if (i % 8 == 4) {
            for (int j = 0; j < 4; j++) t[j] = sbox[t[j]];
        }
        for (int j = 0; j < 4; j++) w[4 * i + j] = w[4 * (i - 8) + j] ^ t[j];
    }
    key->hardware = hardware_level(level);
}

/* Byte by byte. Slow, and its table look-ups take data-dependent time: for CPUs without AES instructions only. */
static void plain_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out) {
    uint8_t sbox[256];
    make_sbox(sbox);
    for (int64_t n = 0; n < count; n++, counter++, out += 16) {
        uint8_t s[16] = {0}, t[16];
        for (int i = 0; i < 8; i++) s[15 - i] = (uint8_t)(counter >> (8 * i));
        for (int i = 0; i < 16; i++) s[i] ^= key->round[0][i];
        for (int r = 1; r <= 14; r++) {
            for (int i = 0; i < 16; i++) t[i] = sbox[s[(i + 4 * (i % 4)) % 16]]; /* SubBytes and ShiftRows */
            for (int column = 0; column < 16; column += 4) {
                const uint8_t *v = t + column;
                uint8_t all = v[0] ^ v[1] ^ v[2] ^ v[3];
                for (int i = 0; i < 4; i++)
                    s[column + i] = r == 14 ? v[i] : (uint8_t)(v[i] ^ all ^ twice(v[i] ^ v[(i + 1) % 4]));
            }
            for (int i = 0; i < 16; i++) s[i] ^= key->round[r][i];
        }
        memcpy(out, s, 16);
    }
}

void aes_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out) {
#ifdef AES_INSTRUCTIONS
    if (key->hardware) {
        aes_hardware_blocks(key, counter, count, out);
        return;
    }
#endif
    plain_blocks(key, counter, count, out);
}
