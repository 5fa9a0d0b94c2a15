/* The end of a step: theta moves along the sum of the gradients and its noise. */
#ifndef FEDSPA_UPDATE_H
#define FEDSPA_UPDATE_H

#include "work.h"

/* theta -= step_size * sum / B on the active coordinates. */
PHASE void descend(struct work *w, const struct fedspa_task *task) {
    const double step = task->step_size / (double)task->batch;
    if (4 * task->active > w->net->dimension) {
        for (int64_t i = 0; i < w->net->layout; i += 8) { /* padding is not active */
            const D8 sums = __builtin_convertvector(keep_active(load_half(w->sum + i), w->active + i), D8);
            const D8 next = __builtin_convertvector(load_half(w->theta + i), D8) - step * sums;
            store_half(w->theta + i, __builtin_convertvector(next, H));
        }
        return;
    }
    for (int64_t j = 0; j < task->active; j++) {
        const int32_t at = w->place[j];
        w->theta[at] = (float)(w->theta[at] - step * w->sum[at]);
    }
}

/* theta -= step * (units + deviation * noise), for the noise of coordinates `from` to `to`. Where there are many that lie
 * apart, those of convolutions, their noise only goes to its place: a pass over all is faster than one after the other. */
INLINE void move(struct work *w, int64_t from, int64_t to, const double *noise, double step, double deviation) {
    float *restrict theta = w->theta;
    const int32_t *restrict units = w->units;
    const double *restrict total = w->folded ? w->total : NULL;
    for (int64_t j = from; j < to; j++) {
        int64_t at = w->place[j];
        for (; at < w->placed_end; at = w->place[j]) {
            w->placed[at] = noise[j - from];
            if (++j == to) return;
        }
        if (w->straight) { /* usual at p = 1 */
            for (int64_t side = w->beside[j]; side >= 8 && j + 8 <= to; side -= 8, at += 8, j += 8) {
                D8 sums = __builtin_convertvector(*(const I8U *)(units + at), D8);
                if (total) sums += *(const D8U *)(total + at);
                const D8 noisy = sums + deviation * *(const D8U *)(noise + j - from);
                const D8 next = __builtin_convertvector(load_half(theta + at), D8) - step * noisy;
                store_half(theta + at, __builtin_convertvector(next, H));
            }
            if (j == to) return;
            at = w->place[j];
            if (at < w->placed_end) { /* theta may have a convolution after a linear layer */
                w->placed[at] = noise[j - from];
                continue;
            }
        }
        theta[at] = (float)(theta[at] - step * (units[at] + (total ? total[at] : 0) + deviation * noise[j - from]));
    }
}

/* The same for those, once all noise is there. */
PHASE void move_placed(struct work *w, double step, double deviation) {
    for (int64_t i = 0; i < w->placed_end; i += 8) {
        const H units = keep_active(load_half((const float *)w->units + i), w->active + i);
        D8 sums = __builtin_convertvector((I8)units, D8);
        if (w->folded) sums += *(const D8U *)(w->total + i);
        const D8 noisy = sums + deviation * *(const D8U *)(w->placed + i);
        const D8 next = __builtin_convertvector(load_half(w->theta + i), D8) - step * noisy;
        store_half(w->theta + i, __builtin_convertvector(next, H));
    }
}

/* As descend, with clipped gradients and noise, both in units until the noise has been added. */
PHASE void release(struct work *w, const struct fedspa_task *task, struct stream *noise, double clip_value) {
    const double step = task->step_size / (double)task->batch * clip_value / CLIP_UNITS;
    const double deviation = task->noise_per_clip * CLIP_UNITS;
    double first[GAUSS_STEP], second[GAUSS_STEP];
    for (int64_t start = 0; start < task->active; start += GAUSS_BLOCK) {
        const int64_t left = task->active - start, n = left < GAUSS_BLOCK ? left : GAUSS_BLOCK, half = (n + 1) / 2;
        for (int64_t i = 0; i < half; i += GAUSS_STEP) {
            const int64_t count = half - i < GAUSS_STEP ? half - i : GAUSS_STEP;
            const int64_t a = start + i, b = a + half, end = b + count < start + n ? b + count : start + n;
            gauss_pairs(noise, half, i, count, first, second);
            move(w, a, a + count, first, step, deviation);
            move(w, b, end, second, step, deviation);
        }
        noise->position += (uint64_t)(2 * half);
    }
    move_placed(w, step, deviation);
}

#endif
