/* One source, compiled once per instruction set: a file level_*.c sets LEVEL and includes this. The target is set here and
 * not on the command line, so that no other file needs such a CPU. At the plain level and on ARM products and sums stay
 * apart: compilers like to make one instruction of them here and not there, and the same sum must come out with the same
 * bits everywhere (multiply_add in simd.h). NEON then has the plain level's bits, with its four lanes and its order. */
#if LEVEL == 1
#define TARGET "avx2,fma"
#elif LEVEL == 2
#define TARGET "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"
#endif
#define PRAGMA(TEXT) _Pragma(#TEXT)
#define PUSH_TARGET(NAMES) PRAGMA(clang attribute push(__attribute__((target(NAMES))), apply_to = function))
#define SET_TARGET(NAMES) PRAGMA(GCC target(NAMES))
#if defined(TARGET) && defined(__clang__)
PUSH_TARGET(TARGET)
#elif defined(TARGET)
SET_TARGET(TARGET)
#elif defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "step.h"

const struct level LEVEL_NAME = {train_agent, sum_clipped, find_logits};
#if defined(TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif
