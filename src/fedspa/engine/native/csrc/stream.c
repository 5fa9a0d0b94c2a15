/* AES-256 (FIPS 197) in plain C and by the instructions of x86 and ARM, which all give the same bytes; and the samplers.
 *
 * The counter is a 128-bit big-endian block number whose upper half stays 0: 2^64 blocks are out of reach.
 */
#include "stream.h"

#include <string.h>

#include "fedspa_native.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
#endif
#endif

/* AES-NI, and VAES on 512 bits. */
#if defined(__x86_64__)
int aes_hardware(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_AES)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & (1u << 9)) ? 2 : 1;
}

__attribute__((target("aes,sse4.1"))) static inline __m128i counter_block(uint64_t counter) {
    return _mm_set_epi64x((long long)__builtin_bswap64(counter), 0);
}

/* Eight blocks at a time: an AES round takes about four cycles, and two can start in each. */
__attribute__((target("aes,sse4.1"))) static void aesni_blocks(const struct aes_key *key, uint64_t counter,
                                                              int64_t count, uint8_t *out) {
    __m128i k[15], s[8];
    for (int r = 0; r < 15; r++) k[r] = _mm_loadu_si128((const __m128i *)key->round[r]);
    for (; count > 0; count -= 8, counter += 8, out += 128) {
        for (int i = 0; i < 8; i++) s[i] = _mm_xor_si128(counter_block(counter + (uint64_t)i), k[0]);
        for (int r = 1; r < 14; r++)
            for (int i = 0; i < 8; i++) s[i] = _mm_aesenc_si128(s[i], k[r]);
        for (int i = 0; i < 8; i++) s[i] = _mm_aesenclast_si128(s[i], k[14]);
        if (count >= 8) {
            for (int i = 0; i < 8; i++) _mm_storeu_si128((__m128i *)(out + 16 * i), s[i]);
        } else {
            for (int i = 0; i < count; i++) _mm_storeu_si128((__m128i *)(out + 16 * i), s[i]);
        }
    }
}

/* 32 blocks at a time in eight registers; what is left over goes to AES-NI. */
__attribute__((target("aes,vaes,avx512f,avx512bw"))) static void vaes_blocks(const struct aes_key *key,
                                                                            uint64_t counter, int64_t count,
                                                                            uint8_t *out) {
    __m512i k[15], s[8];
    const __m512i reverse = _mm512_broadcast_i32x4(_mm_set_epi64x(0x08090a0b0c0d0e0f, 0x0001020304050607));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    for (int r = 0; r < 15; r++) k[r] = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)key->round[r]));
    __m512i next = _mm512_add_epi64(_mm512_set1_epi64((long long)counter), _mm512_set_epi64(3, 0, 2, 0, 1, 0, 0, 0));
    for (; count >= 32; count -= 32, counter += 32, out += 512) {
        for (int i = 0; i < 8; i++) {
            /* The low half of each lane is the (zero) upper half of the big-endian counter. */
            s[i] = _mm512_shuffle_epi8(_mm512_maskz_mov_epi64(0xaa, next), reverse);
            s[i] = _mm512_xor_si512(s[i], k[0]);
            next = _mm512_add_epi64(next, four);
        }
        for (int r = 1; r < 14; r++)
            for (int i = 0; i < 8; i++) s[i] = _mm512_aesenc_epi128(s[i], k[r]);
        for (int i = 0; i < 8; i++)
            _mm512_storeu_si512(out + 64 * i, _mm512_aesenclast_epi128(s[i], k[14]));
    }
    aesni_blocks(key, counter, count, out);
}

void aes_hardware_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out) {
    if (key->hardware == 2) vaes_blocks(key, counter, count, out);
    else aesni_blocks(key, counter, count, out);
}
#endif

/* The AES instructions of ARMv8, which nearly all 64-bit ARM CPUs have. */
#if defined(__aarch64__)
int aes_hardware(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP) & HWCAP_AES) != 0;
#elif defined(__APPLE__)
    int present = 0;
    size_t size = sizeof present;
    return sysctlbyname("hw.optional.arm.FEAT_AES", &present, &size, NULL, 0) == 0 && present != 0;
#else
    return 0;
#endif
}

#if defined(__clang__)
#define WITH_AES __attribute__((target("aes")))
#else
#define WITH_AES __attribute__((target("+crypto")))
#endif

/* Eight blocks at a time: a round takes some cycles, and several can be under way. The instruction adds a round's key before
 * it substitutes bytes, so that the last key is added by hand. */
WITH_AES void aes_hardware_blocks(const struct aes_key *key, uint64_t counter, int64_t count, uint8_t *out) {
    uint8x16_t k[15], s[8];
    for (int r = 0; r < 15; r++) k[r] = vld1q_u8(key->round[r]);
    for (; count > 0; count -= 8, counter += 8, out += 128) {
        for (int i = 0; i < 8; i++) {
            const uint64_t low = __builtin_bswap64(counter + (uint64_t)i); /* big-endian; its upper half is 0 */
            s[i] = vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(0), vcreate_u64(low)));
        }
        for (int r = 0; r < 13; r++)
            for (int i = 0; i < 8; i++) s[i] = vaesmcq_u8(vaeseq_u8(s[i], k[r]));
        for (int i = 0; i < 8; i++) s[i] = veorq_u8(vaeseq_u8(s[i], k[13]), k[14]);
        if (count >= 8) {
            for (int i = 0; i < 8; i++) vst1q_u8(out + 16 * i, s[i]);
        } else {
            for (int i = 0; i < count; i++) vst1q_u8(out + 16 * i, s[i]);
        }
    }
}
#endif

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

void stream_open(struct stream *stream, const uint8_t *key, int level, uint64_t position) {
    aes_expand(&stream->key, key, level);
    stream->position = position;
}

const uint64_t *stream_words_at(const struct stream *stream, uint64_t position, int64_t count, uint64_t *words) {
    int64_t skip = (int64_t)(position % 2); /* a cipher block is two words */
    aes_blocks(&stream->key, position / 2, (skip + count + 1) / 2, (uint8_t *)words);
    return words + skip;
}

const uint64_t *stream_words(struct stream *stream, int64_t count, uint64_t *words) {
    const uint64_t *found = stream_words_at(stream, stream->position, count, words);
    stream->position += (uint64_t)count;
    return found;
}

int64_t stream_capacity(int64_t records, int64_t batch) {
    return (records > batch + 8 ? records : batch + 8) + 2;
}

int64_t draw_poisson(struct stream *stream, double rate, int64_t records, int64_t *chosen, uint64_t *words) {
    const uint64_t *word = stream_words(stream, records, words);
    int64_t count = 0;
    for (int64_t i = 0; i < records; i++) {
        chosen[count] = i;
        count += (double)(word[i] >> 11) * 0x1p-53 < rate; /* no branch: a surprise costs more than a store */
    }
    return count;
}

/* One batch of `count` integers below `bound`; words above the last multiple of it are drawn again, all at once. */
static void integers_below(struct stream *stream, int64_t count, uint64_t bound, uint64_t *words, uint64_t *values,
                           uint64_t *again) {
    uint64_t largest = UINT64_MAX - (UINT64_MAX % bound + 1) % bound;
    memcpy(values, stream_words(stream, count, words), 8 * (size_t)count);
    for (;;) {
        int64_t over = 0;
        for (int64_t i = 0; i < count; i++)
            if (values[i] > largest) again[over++] = (uint64_t)i;
        if (over == 0) break;
        const uint64_t *fresh = stream_words(stream, over, words);
        for (int64_t i = 0; i < over; i++) values[again[i]] = fresh[i];
    }
    for (int64_t i = 0; i < count; i++) values[i] %= bound;
}

int64_t draw_fixed(struct stream *stream, int64_t batch, int64_t records, int64_t *chosen, uint64_t *words,
                   uint8_t *seen) {
    int leave_out = 2 * batch > records;
    int64_t size = leave_out ? records - batch : batch, distinct = 0, count = 0;
    int64_t capacity = stream_capacity(records, batch);
    uint64_t *values = words + capacity, *again = values + capacity;
    memset(seen, 0, (size_t)records);
    while (distinct < size) {
        integers_below(stream, size + 8, (uint64_t)records, words, values, again);
        for (int64_t i = 0; i < size + 8 && distinct < size; i++) {
            distinct += !seen[values[i]];
            seen[values[i]] = 1;
        }
    }
    for (int64_t i = 0; i < records; i++)
        if (seen[i] != leave_out) chosen[count++] = i;
    return count;
}
