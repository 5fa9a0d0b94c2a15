/* The key stream of aes.c by the AES instructions of ARMv8, which nearly all 64-bit ARM CPUs have. */
#include "aes.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
#endif

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
