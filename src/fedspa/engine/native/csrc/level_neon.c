/* NEON, which every 64-bit ARM CPU has, with the AES instructions where the CPU has those, too (aes_arm.c).
 *
 * It has the plain level's four lanes and its order of sums, and products and sums stay apart, so that it gives the plain
 * level's bits. */
#if defined(__aarch64__)
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#define LEVEL 3
#include "levels.h"
#include "step.h"

const struct level fedspa_level_neon = {train_agent, sum_clipped, find_logits, draw_gaussians};
#endif
