/* Words of one key in order, and the two samplers on them: the same words make the same batches as in Python. */
#ifndef FEDSPA_STREAM_H
#define FEDSPA_STREAM_H

#include <stdint.h>

#include "aes.h"

struct stream {
    struct aes_key key;
    uint64_t position; /* 64-bit words consumed */
};

void stream_open(struct stream *stream, const uint8_t *key, int level, uint64_t position);

/* `count` words from number `position` of the key on; those of the stream itself stay where they are. */
const uint64_t *stream_words_at(const struct stream *stream, uint64_t position, int64_t count, uint64_t *words);

/* The next `count` words. `words` needs room for count + 2: whole cipher blocks are written. */
const uint64_t *stream_words(struct stream *stream, int64_t count, uint64_t *words);

/* Chosen records, sorted; returns how many. `chosen` and `seen` have room for `records`, `words` for three times
 * stream_room(records, batch). */
int64_t draw_poisson(struct stream *stream, double rate, int64_t records, int64_t *chosen, uint64_t *words);
int64_t draw_fixed(struct stream *stream, int64_t batch, int64_t records, int64_t *chosen, uint64_t *words,
                   uint8_t *seen);
int64_t stream_room(int64_t records, int64_t batch);

#endif
