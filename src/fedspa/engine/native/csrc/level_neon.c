/* NEON, which every 64-bit ARM CPU has. */
#if defined(__aarch64__)
#define LEVEL 3
#define LEVEL_NAME fedspa_level_neon
#include "level.h"
#endif
