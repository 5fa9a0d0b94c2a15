/* Forward 3 x 3 convolution with stride 1 by Winograd's F(2 x 2, 3 x 3) (Lavin and Gray 2016): 16 products make four
 * output pixels instead of 36. Windows of 4 x 4 pixels and the weights are transformed by additions, multiplied point by
 * point over the channels (with the ordinary tile kernel), and transformed back. In float32 it loses about one bit.
 *
 *     Y = A'[(G g G') * (B' d B)]A,   rows of B': (1 0 -1 0) (0 1 1 0) (0 -1 1 0) (0 1 0 -1)
 *     G: (1 0 0) (1/2 1/2 1/2) (1/2 -1/2 1/2) (0 0 1),   A': (1 1 1 0) (0 1 -1 -1)
 */
#ifndef FEDSPA_WINOGRAD_H
#define FEDSPA_WINOGRAD_H

#include "conv.h"

#define POINTS 16

INLINE int64_t winograd_tiles(const struct op *op, int64_t examples) {
    return (int64_t)(op->used_h / 2) * (op->used_w / 2) * examples;
}

/* Floats of work space: transformed windows, then one panel of products. Up to three windows more than there are. */
INLINE int64_t winograd_size(const struct op *op, int64_t examples) {
    const int channels = op->run / 3;
    return POINTS * (winograd_tiles(op, examples) + GROUP) * (channels + PAD) + PAD;
}

/* G along one axis. */
#define G_TRANSFORM(G0, G1, G2, H0, H1, H2, H3) \
    H0 = G0, H1 = 0.5f * (G0 + G2) + 0.5f * G1, H2 = 0.5f * (G0 + G2) - 0.5f * G1, H3 = G2

/* Packed as [panel][point][input channel][channels of the panel]. Transformed in vectors along the input channels, and
 * turned over in a block that the nearest cache holds. */
PHASE void winograd_weights(const struct op *op, const float *theta, float *packed) {
    const int channels = op->run / 3;
    float block[POINTS][LANES][LANES];
    memset(block, 0, sizeof block);
    for (int start = 0; start < op->outputs; start += LANES) {
        const int present = op->outputs - start < LANES ? op->outputs - start : LANES;
        for (int lane = present; lane < LANES; lane++)
            for (int p = 0; p < POINTS; p++) memset(block[p][lane], 0, sizeof block[p][lane]);
        for (int c = 0; c < channels; c += LANES) {
            const int count = channels - c < LANES ? channels - c : LANES;
            for (int lane = 0; lane < present; lane++) {
                const float *row = theta + op->weights + (int64_t)(start + lane) * op->row_length + c;
                V g[3][3], h[4][3];
                UNROLLED(3, i) UNROLLED(3, j) g[i][j] = load(row + i * op->run_padded + j * channels);
                UNROLLED(3, j) G_TRANSFORM(g[0][j], g[1][j], g[2][j], h[0][j], h[1][j], h[2][j], h[3][j]);
                UNROLLED(4, i) {
                    V u[4];
                    G_TRANSFORM(h[i][0], h[i][1], h[i][2], u[0], u[1], u[2], u[3]);
                    UNROLLED(4, j) store(block[4 * i + j][lane], u[j]);
                }
            }
            for (int p = 0; p < POINTS; p++) {
                float *to = packed + ((int64_t)p * channels + c) * LANES;
                for (int j = 0; j < count; j++, to += LANES)
                    for (int lane = 0; lane < LANES; lane++) to[lane] = block[p][lane][j];
            }
        }
        packed += (int64_t)POINTS * channels * LANES;
    }
}

/* B' along one axis. */
#define B_TRANSFORM(D0, D1, D2, D3, T0, T1, T2, T3) \
    T0 = D0 - D2, T1 = D1 + D2, T2 = D2 - D1, T3 = D1 - D3

/* One window: 4 x 4 pixels of `channels` each to 16 points. Channels past the last vector overlap with it. */
INLINE void winograd_window(const float *in, int64_t row, int channels, float *to, int64_t point) {
    for (int c = 0; c < channels; c += LANES) {
        const int at = c + LANES <= channels ? c : channels - LANES;
        V d[4][4], t[4][4];
        UNROLLED(4, i) UNROLLED(4, j) d[i][j] = load(in + i * row + (int64_t)j * channels + at);
        UNROLLED(4, j) B_TRANSFORM(d[0][j], d[1][j], d[2][j], d[3][j], t[0][j], t[1][j], t[2][j], t[3][j]);
        UNROLLED(4, i) {
            V u0, u1, u2, u3;
            B_TRANSFORM(t[i][0], t[i][1], t[i][2], t[i][3], u0, u1, u2, u3);
            store(to + (4 * i + 0) * point + at, u0);
            store(to + (4 * i + 1) * point + at, u1);
            store(to + (4 * i + 2) * point + at, u2);
            store(to + (4 * i + 3) * point + at, u3);
        }
    }
}

/* 16 points back to 2 x 2 pixels, the channels of one panel. */
INLINE void winograd_pixels(const float *from, int64_t point, float *out, int64_t row, int64_t pixel) {
    V s[2][4];
    UNROLLED(4, j) {
        V m0 = load(from + j * point), m1 = load(from + (4 + j) * point);
        V m2 = load(from + (8 + j) * point), m3 = load(from + (12 + j) * point);
        s[0][j] = m0 + m1 + m2;
        s[1][j] = m1 - m2 - m3;
    }
    UNROLLED(2, i) {
        store(out + i * row, s[i][0] + s[i][1] + s[i][2]);
        store(out + i * row + pixel, s[i][1] - s[i][2] - s[i][3]);
    }
}

PHASE void winograd_forward(const struct op *op, const struct buffer *buffer, const float *in, int64_t examples,
                            const float *packed, float *scratch, float *space) {
    const int channels = buffer->channels, across = op->used_w / 2, width = scratch_width(op);
    const int64_t tiles = winograd_tiles(op, examples), per_example = winograd_tiles(op, 1);
    const int64_t capacity = tiles + GROUP, point = capacity * channels, product = capacity * LANES;
    float *products = space + POINTS * point;
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t y = t % per_example / across, x = t % per_example % across;
        winograd_window(in + t / per_example * buffer->example + 2 * y * buffer->row + 2 * x * channels, buffer->row,
                        channels, space + t * channels, point);
    }
    for (int start = 0; start < op->outputs; start += LANES) {
        for (int p = 0; p < POINTS; p++, packed += (int64_t)channels * LANES)
            for (int64_t first = 0; first < tiles; first += 3 * GROUP) {
                const float *a[3];
                float *c[3];
                const int64_t groups = (tiles - first + GROUP - 1) / GROUP; /* the last may reach past the end: junk */
                for (int j = 0; j < 3; j++) {
                    a[j] = space + p * point + (first + j * GROUP) * channels;
                    c[j] = products + p * product + (first + j * GROUP) * LANES;
                }
                TILES[groups < 3 ? groups - 1 : 2](a, channels, 1, channels, 0, packed, c, LANES);
            }
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t y = t % per_example / across, x = t % per_example % across;
            float *out = scratch + t / per_example * scratch_size(op) +
                         (2 * y * width + 2 * x) * op->outputs_padded + start;
            winograd_pixels(products + t * LANES, product, out, (int64_t)width * op->outputs_padded,
                            op->outputs_padded);
        }
    }
}

#endif
