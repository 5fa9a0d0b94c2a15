/* Standard normals from cipher words: Box–Muller in float64, laid out as in Python, so that the same words give the
 * same noise up to rounding. Blocks of GAUSS_BLOCK values: the first half of the words are radii, the second angles.
 *
 * No rejection and no table: the time taken says nothing about the values.
 */
#ifndef FEDSPA_GAUSS_H
#define FEDSPA_GAUSS_H

#include "simd.h"
#include "stream.h"

#define GAUSS_BLOCK 8192
#define GAUSS_STEP 512 /* pairs that are made at a time: words and values stay in the nearest cache */

/* int64 to double, rounded once: both halves are exact, and only their sum rounds. AVX2 has no instruction for it. */
INLINE D to_double(L w) {
#if LEVEL == 2
    return (D)_mm512_cvtepi64_pd((__m512i)w);
#elif LEVEL == 3
    return (D)vcvtq_f64_s64((int64x2_t)w);
#else
    const L low_magic = 0x4330000000000000 - (L){0};  /* 2^52 */
    const L high_magic = 0x4530000080000000 - (L){0}; /* 2^84 + 2^63: flips the sign bit back */
    L low = (w & 0xffffffff) | low_magic;
    L high = (L)((uint64_t __attribute__((vector_size(4 * LANES))))w >> 32) ^ high_magic;
    return ((D)high - (0x1p84 + 0x1p63 + 0x1p52)) + (D)low;
#endif
}

INLINE D square_root(D x) {
#if LEVEL == 2
    return (D)_mm512_sqrt_pd((__m512d)x);
#elif LEVEL == 1
    return (D)_mm256_sqrt_pd((__m256d)x);
#elif LEVEL == 3
    return (D)vsqrtq_f64((float64x2_t)x);
#else
    for (int i = 0; i < LANES / 2; i++) x[i] = __builtin_sqrt(x[i]);
    return x;
#endif
}

/* -2 log(x / 2^63) for 2^-12 <= x <= 2^63: x = 2^e m with m in [√½, √2), s = (m-1)/(m+1), log m = 2s + s³ (the atanh
 * series, with minimax coefficients for s² < 0.0295). Powers of two are in the constants, where they cost nothing: to
 * scale by one never rounds. */
INLINE D minus_two_logarithms(D x) {
    L bits = (L)x;
    L shifted = bits - 0x3fe6a09e667f3bcd; /* the bits of √½: e is then the exponent field of the difference */
    L exponent = shifted >> 52;
    D m = (D)(bits - (exponent << 52));
    D e = (D)(exponent + 0x4338000000000000) - (0x1.8p52 + 63); /* a small integer to double */
    D minus_f = 1.0 - m, f = minus_f + minus_f, s = minus_f / (-1.0 - m), z = s * s;
    D r = -2 * 1.479819860511658591e-01 - (D){0};
    r = r * z - 2 * 1.531383769920937332e-01;
    r = r * z - 2 * 1.818357216161805012e-01;
    r = r * z - 2 * 2.222219843214978396e-01;
    r = r * z - 2 * 2.857142874366239149e-01;
    r = r * z - 2 * 3.999999999940941908e-01;
    r = r * z - 2 * 6.666666666666735130e-01;
    return (e * (-2 * 6.93147180369123816490e-01) + (f + (s * (r * z - f)))) + e * (-2 * 1.90821492927058770002e-10);
}

/* By the parity of `quarter`: the one or the other of two, and the other or the one; then their signs. */
INLINE void turn(L quarter, D s, D c, D *sine, D *cosine) {
    L swap = -(quarter & 1);
    L a = (swap & (L)c) | (~swap & (L)s), b = (swap & (L)s) | (~swap & (L)c);
    *sine = (D)(a ^ ((quarter & 2) << 62));
    *cosine = (D)(b ^ (((quarter + 1) & 2) << 62));
}

/* sin and cos of πt / 2^63 for t in ±2^63: quarter turns taken off exactly, then minimax polynomials on ±π/4 (errors of 2e-17
 * before rounding). An odd number of quarters swaps the two. */
INLINE void sine_cosine(D t, D *sine, D *cosine) {
    D turned = t * 0x1p-62 + 0x1.8p52; /* rounds to the nearest integer, kept in the low bits */
    D x = (t - (turned - 0x1.8p52) * 0x1p62) * (3.14159265358979323846 * 0x1p-63);
    D z = x * x;
    D s = 1.5918115263265975194e-10 - (D){0};
    s = s * z - 2.505113165023518147e-08;
    s = s * z + 2.7557316101617874437e-06;
    s = s * z - 1.9841269836756772528e-04;
    s = s * z + 8.3333333333309472945e-03;
    s = s * z - 1.6666666666666664622e-01;
    s = x + x * z * s;
    D c = -1.1382623647474604629e-11 - (D){0};
    c = c * z + 2.0876146146558611582e-09;
    c = c * z - 2.7557317271145145962e-07;
    c = c * z + 2.4801587298764560771e-05;
    c = c * z - 1.3888888888887396492e-03;
    c = c * z + 4.1666666666666665388e-02;
    c = (1.0 - 0.5 * z) + z * z * c;
    turn((L)turned, s, c, sine, cosine);
}

/* Two normals of each radius and angle. A radius has 74 random bits, the lowest 11 of which are the angle's (Python's
 * `Stream.gaussian`): the noise then ends so far out that no accountant notices it. */
INLINE void box_muller(L radii, L angles, D *first, D *second) {
    L top = (L)((uint64_t __attribute__((vector_size(4 * LANES))))radii >> 1);
    D finer = (to_double(angles & 2047) + 0.5) * 0x1p-11;
    D r = square_root(minus_two_logarithms(to_double(top) + finer)), s, c;
    sine_cosine(to_double(angles), &s, &c);
    *first = r * c;
    *second = r * s;
}

/* Pairs number i to i + count (GAUSS_STEP at most) of a block with `half` of them, whose words start at the stream's
 * position. */
PHASE void gauss_pairs(const struct stream *stream, int64_t half, int64_t i, int64_t count, double *first,
                       double *second) {
    uint64_t radius_words[GAUSS_STEP + 2], angle_words[GAUSS_STEP + 2];
    const uint64_t at = stream->position + (uint64_t)i;
    const uint64_t *radius = stream_words_at(stream, at, count, radius_words);
    const uint64_t *angle = stream_words_at(stream, at + (uint64_t)half, count, angle_words);
    const int64_t step = LANES / 2;
    int64_t j = 0;
    D c, s;
    for (; j + step <= count; j += step) {
        box_muller(*(const LU *)(radius + j), *(const LU *)(angle + j), &c, &s);
        *(DU *)(first + j) = c;
        *(DU *)(second + j) = s;
    }
    if (j < count) {
        L radii = {0}, angles = {0};
        memcpy(&radii, radius + j, 8 * (size_t)(count - j));
        memcpy(&angles, angle + j, 8 * (size_t)(count - j));
        box_muller(radii, angles, &c, &s);
        memcpy(first + j, &c, 8 * (size_t)(count - j));
        memcpy(second + j, &s, 8 * (size_t)(count - j));
    }
}

#endif
