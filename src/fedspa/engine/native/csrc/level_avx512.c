/* AVX-512 (F, DQ, BW, VL). The target is set here and not on the command line, so that no other file needs this CPU. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif
#define LEVEL 2
#include "levels.h"
#include "step.h"

const struct level fedspa_level_avx512 = {train_agent, sum_clipped, find_logits, draw_gaussians};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
