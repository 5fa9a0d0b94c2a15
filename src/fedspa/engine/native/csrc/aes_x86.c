/* AES-NI, and VAES on 512 bits: the key stream of aes.c by the instructions of an x86 CPU. */
#include "aes.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

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
