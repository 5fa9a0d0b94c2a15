/* AVX2 and FMA. */
#if defined(__x86_64__)
#define LEVEL 1
#define LEVEL_NAME fedspa_level_avx2
#include "level.h"
#endif
