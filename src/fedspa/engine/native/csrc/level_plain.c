/* Any CPU: what the compiler makes of four-lane vectors without further flags. */
#define LEVEL 0
#define TRAIN train_plain
#define GAUSSIAN gaussian_plain
#include "levels.h"
#include "step.h"

const struct level fedspa_level_plain = {TRAIN, GAUSSIAN};
