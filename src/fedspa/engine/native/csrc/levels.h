/* One source, compiled once per instruction set: each level file sets its target and includes step.h. */
#ifndef FEDSPA_LEVELS_H
#define FEDSPA_LEVELS_H

#include "fedspa_native.h"

struct level {
    int64_t (*train)(const struct fedspa_net *, const float *, const struct fedspa_task *, float *, double *,
                     int64_t *, const int32_t *);
    int64_t (*sum)(const struct fedspa_net *, const float *, const struct fedspa_task *, int64_t *, int64_t *);
    int64_t (*logits)(const struct fedspa_net *, const float *, const float *, int64_t, float *);
    void (*gaussian)(const uint8_t *, int64_t, int64_t, double *);
};

/* The best that this CPU has, and not above `level`. */
const struct level *fedspa_level(int64_t level);

extern const struct level fedspa_level_plain;
#if defined(__x86_64__)
extern const struct level fedspa_level_avx2, fedspa_level_avx512;
#elif defined(__aarch64__)
extern const struct level fedspa_level_neon;
#endif

#endif
