/* Any CPU: what the compiler makes of four-lane vectors without further flags.
 *
 * Where the CPU has a fused multiply-add as a matter of course, compilers like to make one of a product and a sum, here
 * and not there; the same sum must come out with the same bits everywhere (multiply_add in simd.h). */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif
#define LEVEL 0
#include "levels.h"
#include "step.h"

const struct level fedspa_level_plain = {train_agent, sum_clipped, find_logits, draw_gaussians};
