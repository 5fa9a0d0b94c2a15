/* The deltas of a chunk in the order that backward wants them: by row for the weights' gradients, by pixel for the
 * input's. Behind max-pooling and ReLU only the greatest, living pixel of a window carries any. */
#ifndef FEDSPA_LISTS_H
#define FEDSPA_LISTS_H

#include "work.h"

static const int32_t FIRST_PIXEL[LIST_BLOCK]; /* without pooling a unit has one pixel, number 0 */

/* Where the picks of an example's unit are, from channel `first` on. */
INLINE const int32_t *picks_at(const struct work *w, int i, int e, int u, int first) {
    const struct op *op = w->net->ops + i;
    if (!op->pool) return FIRST_PIXEL;
    return w->arg[i] + e * pick_words(op, w->net->buffers + i + 1) + (int64_t)(u / PICKS) * op->outputs_padded + first;
}

/* Is this the last record of its example? */
INLINE int ends_example(const struct work *w, int e, int n) { return e + 1 == n || w->owner[e + 1] != w->owner[e]; }

/* Ends an example's part of the lists that have one, behind its last record. */
INLINE void end_example(struct work *w, int outputs, int e, int n, struct item *const *next) {
    if (!ends_example(w, e, n)) return;
    for (int r = 0; r < outputs; r++) {
        struct list *l = w->lists + r;
        int count = (int)(next[r] - l->items);
        if (count == l->count) continue;
        l->count = l->end[l->groups] = count;
        l->example[l->groups++] = w->owner[e];
    }
}

/* The deltas of up to LIST_BLOCK output channels from `first` on, as lists. Every item is written, and counted only
 * if it is alive: a branch on it would be mispredicted half the time. */
PHASE void build_lists(struct work *w, int i, int first, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int outputs = op->outputs - first < LIST_BLOCK ? op->outputs - first : LIST_BLOCK;
    const int units = out->height * out->width;
    const unsigned present = (1u << outputs) - 1;
    const int32_t *pixel = w->pixel[i];
    struct item *next[LIST_BLOCK];
    for (int r = 0; r < LIST_BLOCK; r++) {
        w->lists[r].groups = w->lists[r].count = 0;
        next[r] = w->lists[r].items;
    }
    for (int e = 0; e < n; e++) {
        if (w->factor[w->owner[e]] == 0) continue;
        for (int u = 0; u < units; u++) {
            const int32_t *word = picks_at(w, i, e, u, first);
            const int64_t at = e * out->example + w->at[i][u] + first;
            const float *delta = w->delta[i + 1] + at;
            const unsigned alive = alive_of_8(delta, w->unit[i + 1] + at, op->relu) & present;
            const int32_t start = (int32_t)(e * in->example) + w->window[i][u];
            for (int r = 0; r < outputs; r++) {
                *next[r] = (struct item){start + pixel[picked(word[r], u)], delta[r]};
                next[r] += alive >> r & 1;
            }
        }
        end_example(w, outputs, e, n, next);
    }
}

#if LEVEL == 2
/* The items of the lanes in `alive`, pushed together; 16 are written. */
INLINE void store_items(struct item *to, __mmask16 alive, __m512i at, __m512i delta) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    at = _mm512_maskz_compress_epi32(alive, at);
    delta = _mm512_maskz_compress_epi32(alive, delta);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(at, low, delta));
    _mm512_storeu_si512(to + LANES / 2,
                        _mm512_permutex2var_epi32(at, _mm512_add_epi32(low, _mm512_set1_epi32(LANES / 2)), delta));
}

/* The picks of sixteen units (or as many as `words` rows hold), channel by channel. */
INLINE void turn_picks(const int32_t *word, int64_t stride, int words, uint8_t picks[LANES][LANES]) {
    __m512i a[4], b[4];
    UNROLLED(4, j) a[j] = (__m512i)load_int(word + (j < words ? j : 0) * stride);
    UNROLLED(2, h) {
        b[h] = _mm512_unpacklo_epi32(a[2 * h], a[2 * h + 1]);
        b[2 + h] = _mm512_unpackhi_epi32(a[2 * h], a[2 * h + 1]);
    }
    UNROLLED(2, h) {
        a[2 * h] = _mm512_unpacklo_epi64(b[2 * h], b[2 * h + 1]); /* channels 2 h, 2 h + 4, … */
        a[2 * h + 1] = _mm512_unpackhi_epi64(b[2 * h], b[2 * h + 1]);
    }
    UNROLLED(4, k) {
        _mm_storeu_si128((__m128i *)picks[k], _mm512_castsi512_si128(a[k]));
        _mm_storeu_si128((__m128i *)picks[4 + k], _mm512_extracti32x4_epi32(a[k], 1));
        _mm_storeu_si128((__m128i *)picks[8 + k], _mm512_extracti32x4_epi32(a[k], 2));
        _mm_storeu_si128((__m128i *)picks[12 + k], _mm512_extracti32x4_epi32(a[k], 3));
    }
}

/* The same for up to LISTS output channels: 16 units by 16 channels are turned over, and a channel's living ones pushed together. */
PHASE void build_many_lists(struct work *w, int i, int first, int n) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int outputs = op->outputs - first < LISTS ? op->outputs - first : LISTS, units = out->height * out->width;
    const __m512i pixel = _mm512_loadu_si512(w->pixel[i]), none = _mm512_setzero_si512();
    struct item *next[LISTS];
    for (int r = 0; r < LISTS; r++) {
        w->lists[r].groups = w->lists[r].count = 0;
        next[r] = w->lists[r].items;
    }
    for (int e = 0; e < n; e++) {
        if (w->factor[w->owner[e]] == 0) continue;
        const float *delta = w->delta[i + 1] + e * out->example + first, *unit = w->unit[i + 1] + e * out->example + first;
        for (int u = 0; u < units; u += LANES) {
            V deltas[LANES];
            uint8_t picks[LANES][LANES];
            const int count = units - u < LANES ? units - u : LANES;
            for (int j = 0; j < count; j++) {
                const int32_t at = w->at[i][u + j];
                deltas[j] = load(delta + at);
                if (op->relu) deltas[j] = (V)((I)deltas[j] & (load(unit + at) > 0));
            }
            for (int j = count; j < LANES; j++) deltas[j] = (V){0};
            transpose(deltas);
            if (op->pool) turn_picks(picks_at(w, i, e, u, first), op->outputs_padded, (count + PICKS - 1) / PICKS, picks);
            const __m512i start = (__m512i)(load_int(w->window[i] + u) + (int32_t)(e * in->example));
            for (int r = 0; r < outputs; r++) {
                const __m512i pick = op->pool ? _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)picks[r])) : none;
                const __m512i within = _mm512_permutexvar_epi32(pick, pixel);
                const __mmask16 alive = _mm512_cmp_ps_mask((__m512)deltas[r], _mm512_setzero_ps(), _CMP_NEQ_UQ);
                store_items(next[r], alive, _mm512_add_epi32(start, within), (__m512i)deltas[r]);
                next[r] += __builtin_popcount(alive);
            }
        }
        end_example(w, outputs, e, n, next);
    }
}
#endif

/* The living channels of a unit among outputs `from` to `to`, as items behind `next` of the pixel that each picks. */
INLINE void sort_channels(const struct op *op, int from, int to, const float *delta, const float *unit,
                          const int32_t *word, int u, struct item **next) {
    for (int first = from; first < to; first += 8) {
        const int left = to - first;
        unsigned alive = alive_of_8(delta + first, unit + first, op->relu);
        if (left < 8) alive &= (1u << left) - 1;
        for (; alive; alive &= alive - 1) {
            const int r = first + __builtin_ctz(alive), p = word ? picked(word[r], u) : 0;
            *next[p]++ = (struct item){r * op->row_length, delta[r]};
        }
    }
}

/* For every pixel of the chunk with a delta in some channel: those channels, as items whose `at` is a row of weights.
 * Rows `from` to `to` and examples `first` to `end` only. Returns the number of pixels. */
static int64_t build_spots(struct work *w, int i, int from, int to, int first, int end) {
    const struct op *op = w->net->ops + i;
    const struct buffer *in = w->net->buffers + i, *out = in + 1;
    const int window = op->pool_h * op->pool_w, units = out->height * out->width;
    struct item *items_of_unit = w->spot_items; /* of a unit: for each pixel of its window */
    struct spot *spot = w->spots;
    for (int e = first; e < end; e++) {
        if (w->factor[w->owner[e]] == 0) continue;
        for (int u = 0; u < units; u++, items_of_unit += window * spot_capacity(op)) {
            const int64_t at = e * out->example + w->at[i][u];
            struct item **next = w->next;
            for (int p = 0; p < window; p++) next[p] = items_of_unit + p * spot_capacity(op);
            sort_channels(op, from, to, w->delta[i + 1] + at, w->unit[i + 1] + at,
                          op->pool ? picks_at(w, i, e, u, 0) : NULL, u, next);
            float *start = w->delta[i] + e * in->example + w->window[i][u];
            for (int p = 0; p < window; p++) {
                const struct item *items = items_of_unit + p * spot_capacity(op);
                *spot = (struct spot){items, start + w->pixel[i][p], (int)(next[p] - items)};
                spot += spot->count > 0;
            }
        }
    }
    return spot - w->spots;
}

#endif
