#include "stream.h"

#include <string.h>

void stream_open(struct stream *stream, const uint8_t *key, int level, uint64_t position) {
    aes_expand(&stream->key, key, level);
    stream->position = position;
}

const uint64_t *stream_words_at(const struct stream *stream, uint64_t position, int64_t count, uint64_t *words) {
    int64_t skip = (int64_t)(position % 2); /* a cipher block is two words */
    aes_blocks(&stream->key, position / 2, (skip + count + 1) / 2, (uint8_t *)words);
    return words + skip;
}

const uint64_t *stream_words(struct stream *stream, int64_t count, uint64_t *words) {
    const uint64_t *found = stream_words_at(stream, stream->position, count, words);
    stream->position += (uint64_t)count;
    return found;
}

int64_t stream_room(int64_t records, int64_t batch) {
    return (records > batch + 8 ? records : batch + 8) + 2;
}

int64_t draw_poisson(struct stream *stream, double rate, int64_t records, int64_t *chosen, uint64_t *words) {
    const uint64_t *word = stream_words(stream, records, words);
    int64_t count = 0;
    for (int64_t i = 0; i < records; i++) {
        chosen[count] = i;
        count += (double)(word[i] >> 11) * 0x1p-53 < rate; /* no branch: a surprise costs more than a store */
    }
    return count;
}

/* One batch of `count` integers below `bound`; words above the last multiple of it are drawn again, all at once. */
static void integers_below(struct stream *stream, int64_t count, uint64_t bound, uint64_t *words, uint64_t *values,
                           uint64_t *again) {
    uint64_t largest = UINT64_MAX - (UINT64_MAX % bound + 1) % bound;
    memcpy(values, stream_words(stream, count, words), 8 * (size_t)count);
    for (;;) {
        int64_t over = 0;
        for (int64_t i = 0; i < count; i++)
            if (values[i] > largest) again[over++] = (uint64_t)i;
        if (over == 0) break;
        const uint64_t *fresh = stream_words(stream, over, words);
        for (int64_t i = 0; i < over; i++) values[again[i]] = fresh[i];
    }
    for (int64_t i = 0; i < count; i++) values[i] %= bound;
}

int64_t draw_fixed(struct stream *stream, int64_t batch, int64_t records, int64_t *chosen, uint64_t *words,
                   uint8_t *seen) {
    int leave_out = 2 * batch > records;
    int64_t size = leave_out ? records - batch : batch, distinct = 0, count = 0;
    int64_t room = stream_room(records, batch);
    uint64_t *values = words + room, *again = values + room;
    memset(seen, 0, (size_t)records);
    while (distinct < size) {
        integers_below(stream, size + 8, (uint64_t)records, words, values, again);
        for (int64_t i = 0; i < size + 8 && distinct < size; i++) {
            distinct += !seen[values[i]];
            seen[values[i]] = 1;
        }
    }
    for (int64_t i = 0; i < records; i++)
        if (seen[i] != leave_out) chosen[count++] = i;
    return count;
}
