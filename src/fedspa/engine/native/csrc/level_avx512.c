/* AVX-512 (F, DQ, BW, VL). */
#if defined(__x86_64__)
#define LEVEL 2
#define LEVEL_NAME fedspa_level_avx512
#include "level.h"
#endif
