/* Pooling and pointwise layers. Behind a convolution, bias, max-pooling and ReLU are one pass over its scratch. */
#ifndef FEDSPA_POOL_H
#define FEDSPA_POOL_H

#include <math.h>

#include "conv.h"

INLINE int pools_pairs(const struct op *op) {
    return op->pool && op->pool_h == 2 && op->pool_w == 2 && op->pool_stride_h == 2 && op->pool_stride_w == 2 &&
           op->pool_pad_h == 0 && op->pool_pad_w == 0;
}

/* Rows of units from `first` on (a multiple of PICKS), from scratch, which starts at their first pixel, to the next
 * buffer. `arg` gets, for each unit, the number of the greatest pixel in its window: the only one that carries gradient.
 * `side` is 2 for windows of 2 x 2 pixels that do not overlap, so that the compiler knows them; 0 for all others. */
INLINE void finish_windows(const int side, const struct op *op, const struct buffer *out, int first, int rows,
                           const float *scratch, const float *theta, float *to, int32_t *arg) {
    const int width = scratch_width(op), channels = op->outputs_padded, wide = side ? side : op->pool_w;
    for (int c = 0; c < op->outputs; c += LANES) {
        const V shift = op->bias >= 0 ? load(theta + op->bias + c) : (V){0};
        const int whole = op->outputs - c >= LANES;
        int32_t *word = arg ? arg + (int64_t)first / PICKS * out->width * channels + c : NULL;
        I words = {0};
        for (int y = 0, u = 0; y < rows; y++) {
            const int above = side ? side * y : y * op->pool_stride_h - op->pool_pad_h, top = above > 0 ? above : 0;
            const int bottom = side ? top + side : above + op->pool_h < op->used_h ? above + op->pool_h : op->used_h;
            float *unit = to + out->origin + (int64_t)(first + y) * out->row + c;
            for (int x = 0; x < out->width; x++, unit += out->channels, u++) {
                const int before = side ? side * x : x * op->pool_stride_w - op->pool_pad_w, left = before > 0 ? before : 0;
                const int right = side ? left + side : before + op->pool_w < op->used_w ? before + op->pool_w : op->used_w;
                V best = load(scratch + ((int64_t)top * width + left) * channels + c);
                I where = splat_int((top - above) * wide + left - before);
                for (int i = top; i < bottom; i++)
                    for (int j = left; j < right; j++)
                        take_greater(&best, &where, load(scratch + ((int64_t)i * width + j) * channels + c),
                                     splat_int((i - above) * wide + j - before));
                best += shift;
                if (op->relu) best = rectify(best);
                if (whole) store(unit, best);
                else store_first(unit, best, op->outputs - c);
                words |= where << 8 * (u % PICKS);
                if (!word || (u % PICKS < PICKS - 1 && u + 1 < rows * out->width)) continue;
                store_int(word, words);
                words = (I){0}, word += channels;
            }
        }
    }
}

PHASE void finish_conv(const struct op *op, const struct buffer *out, int first, int rows, const float *scratch,
                       const float *theta, float *to, int32_t *arg) {
    if (pools_pairs(op)) finish_windows(2, op, out, first, rows, scratch, theta, to, arg);
    else finish_windows(0, op, out, first, rows, scratch, theta, to, arg);
}

/* The rest is plain C: layers on their own are rare, and cheap beside the convolutions. */
#define EACH_ROW(B, Y) for (int Y = 0; Y < (B)->height; Y++)

/* e^x for |x| < 40: x = n log 2 + f, a polynomial for e^f, n into the exponent. */
INLINE V exponential(V x) {
    V turned = x * 1.44269504088896341f + 0x1.8p23f; /* n in the low bits */
    V n = turned - 0x1.8p23f;
    V f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = 1.9875691500e-4f - (V){0};
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    return (V)((I)p + ((I)turned << 23)); /* the magic number's own low bits are 0 */
}

/* tanh in float32: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would lose digits. A NaN stays. */
INLINE V hyperbolic_tangent(V x) {
    I sign = (I)x & (int32_t)0x80000000, near = (V)((I)x & 0x7fffffff) < 0.625f, far = (V)((I)x & 0x7fffffff) >= 9.0f;
    V size = (V)((I)x & 0x7fffffff & ~far), z = x * x;
    V p = -5.70498872745e-3f - (V){0};
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    p = p * z * x + x;
    V q = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    I one = (I)(1.0f - (V){0});
    I magnitude = (far & one) | (~far & (I)q);
    return (V)((near & (I)p) | (~near & (magnitude | sign)));
}

static void tanh_row(const float *from, float *to, int n) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, hyperbolic_tangent(load(from + i)));
    float rest[LANES] = {0};
    memcpy(rest, from + i, 4 * (size_t)(n - i));
    store_first(to + i, hyperbolic_tangent(load(rest)), n - i);
}

static void point_forward(int kind, const struct buffer *in, const struct buffer *out, const float *a, float *b) {
    EACH_ROW(in, y) {
        const float *from = a + in->origin + (int64_t)y * in->row;
        float *to = b + out->origin + (int64_t)y * out->row;
        if (kind == OP_TANH) tanh_row(from, to, in->width * in->channels);
        else
            for (int i = 0; i < in->width * in->channels; i++) to[i] = from[i] <= 0 ? 0 : from[i];
    }
}

static void point_backward(int kind, const struct buffer *in, const struct buffer *out, const float *b,
                           const float *delta_out, float *delta_in) {
    EACH_ROW(in, y) {
        const float *unit = b + out->origin + (int64_t)y * out->row;
        const float *from = delta_out + out->origin + (int64_t)y * out->row;
        float *to = delta_in + in->origin + (int64_t)y * in->row;
        for (int i = 0; i < in->width * in->channels; i++)
            to[i] = kind == OP_TANH ? from[i] * (1 - unit[i] * unit[i]) : (unit[i] > 0 ? from[i] : 0);
    }
}

#endif
