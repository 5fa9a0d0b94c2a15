/* Any CPU: what the compiler makes of four-lane vectors without further flags. */
#define LEVEL 0
#define LEVEL_NAME fedspa_level_plain
#include "level.h"
