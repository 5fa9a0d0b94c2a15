/* Vectors of LANES floats (and half as many doubles) for one instruction set level.
 *
 * Arithmetic is the compiler's own vector extension, which works on any CPU; only what it cannot say well (comparisons
 * that pick, fused products, sums of lanes) has a version per level.
 */
#ifndef FEDSPA_SIMD_H
#define FEDSPA_SIMD_H

#include <stdint.h>
#include <string.h>

#if LEVEL == 2
#include <immintrin.h>
#define LANES 16
#elif LEVEL == 1
#include <immintrin.h>
#define LANES 8
#elif LEVEL == 3
#include <arm_neon.h>
#define LANES 4
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define PHASE static __attribute__((noinline)) /* stays a function, so that a profile names it */

#define UNROLLED(N, I) _Pragma("GCC unroll 16") for (int I = 0; I < N; I++)

typedef float V __attribute__((vector_size(4 * LANES)));
typedef float VU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef int32_t IU __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float H __attribute__((vector_size(32))); /* half of the widest vector */
typedef float HU __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef int32_t I8U __attribute__((vector_size(32), aligned(4), may_alias));
typedef double D8 __attribute__((vector_size(64)));
typedef double D8U __attribute__((vector_size(64), aligned(8), may_alias));
typedef double D __attribute__((vector_size(4 * LANES)));
typedef double DU __attribute__((vector_size(4 * LANES), aligned(8), may_alias));
typedef int64_t L __attribute__((vector_size(4 * LANES)));
typedef int64_t LU __attribute__((vector_size(4 * LANES), aligned(8), may_alias));

INLINE V load(const float *p) { return *(const VU *)p; }
INLINE void store(float *p, V v) { *(VU *)p = v; }
INLINE H load_half(const float *p) { return *(const HU *)p; }
INLINE void store_half(float *p, H v) { *(HU *)p = v; }
INLINE V splat(float x) { return x - (V){0}; }
INLINE I splat_int(int32_t x) { return x - (I){0}; }
INLINE void store_int(int32_t *p, I v) { *(IU *)p = v; }
INLINE I load_int(const int32_t *p) { return *(const IU *)p; }

/* A loaded vector stays in its register: compilers like to load it again for each use, and loads are what runs out. */
#if LEVEL == 3
#define KEEP(v) __asm__("" : "+w"(v))
#elif LEVEL > 0
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v) (void)(v)
#endif

/* The first n floats only: what lies behind belongs to somebody else. */
INLINE void store_first(float *p, V v, int n) { memcpy(p, &v, 4 * (size_t)n); }

/* Within ±c; a NaN becomes c or -c, so that what is added is bounded whatever the data. (A result of arithmetic, as v
 * is, is never a signalling NaN.) */
INLINE V clamp(V v, V c) {
#if LEVEL == 2
    return (V)_mm512_range_ps((__m512)v, (__m512)c, 2); /* the smaller magnitude, with v's sign */
#elif LEVEL == 1
    return (V)_mm256_max_ps(_mm256_min_ps((__m256)v, (__m256)c), (__m256)-c);
#elif LEVEL == 3
    return (V)vmaxnmq_f32(vminnmq_f32((float32x4_t)v, (float32x4_t)c), (float32x4_t)-c); /* of NaN and c: c */
#else
    I low = v < c;
    v = (V)((low & (I)v) | (~low & (I)c));
    I high = v > -c;
    return (V)((high & (I)v) | (~high & (I)-c));
#endif
}

/* What an example adds to a step's sum is cut to whole units, CLIP_UNITS of them to the clip value (as fine as float32
 * is there). Whole numbers add up exactly in any order, so that nobody's rounding depends on anybody else's record.
 * Fractions are cut towards zero: no norm grows by it. */
#define CLIP_UNITS 0x1p24f
#define UNITS_ROOM 127 /* examples whose units fit an int32 */

/* v, in units, as whole ones, `most` at most. */
INLINE I to_units(V v, V most) { return __builtin_convertvector(clamp(v, most), I); }

/* best, arg = v, place where v is greater: the first of equals stays, and a NaN wins, as in torch. */
INLINE void take_greater(V *best, I *arg, V v, I place) {
    I greater = (v > *best) | (v != v);
    *best = (V)((greater & (I)v) | (~greater & (I)*best));
    *arg = (greater & place) | (~greater & *arg);
}

/* 0 where v <= 0; a NaN stays, to be noticed later. */
INLINE V rectify(V v) { return (V)((I)v & ~(v <= 0)); }

/* Is any of the next LANES integers not 0? */
INLINE int any_set(const int32_t *p) {
    int32_t any = 0;
    for (int j = 0; j < LANES; j++) any |= p[j];
    return any != 0;
}

INLINE float sum_lanes(V v) {
#if LEVEL == 2
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[LANES], t = 0;
    memcpy(s, &v, sizeof s);
    for (int i = 0; i < LANES; i++) t += s[i];
    return t;
#endif
}

/* sum + a * b in one instruction where the level has it, and never left to the compiler: the same sum must come out
 * with the same bits wherever it is computed. */
INLINE V multiply_add(V a, V b, V sum) {
#if LEVEL == 2
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LEVEL == 1
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

/* The lanes' squares added to those in `sum`, in float64, where no square of a float32 is lost or overflows. */
INLINE D add_squares(D sum, V v) {
#if LEVEL == 2
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
    __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
    return (D)_mm512_fmadd_pd(high, high, _mm512_fmadd_pd(low, low, (__m512d)sum));
#elif LEVEL == 1
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v));
    __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1));
    return (D)_mm256_fmadd_pd(high, high, _mm256_fmadd_pd(low, low, (__m256d)sum));
#else
#if LEVEL == 3
    D low = (D)vcvt_f64_f32(vget_low_f32((float32x4_t)v)), high = (D)vcvt_high_f64_f32((float32x4_t)v);
#else
    D low = {v[0], v[1]}, high = {v[2], v[3]};
#endif
    return sum + low * low + high * high;
#endif
}

INLINE double sum_doubles(D v) {
#if LEVEL == 2
    return _mm512_reduce_add_pd((__m512d)v);
#else
    double sum = 0;
    for (int i = 0; i < LANES / 2; i++) sum += v[i];
    return sum;
#endif
}

#if LEVEL == 2
/* 16 vectors turned over: lane i of vector j becomes lane j of vector i. */
INLINE void transpose(V *v) {
    __m512 a[16], b[16];
    UNROLLED(8, i) {
        a[2 * i] = _mm512_unpacklo_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps((__m512)v[2 * i], (__m512)v[2 * i + 1]);
    }
    UNROLLED(4, i) UNROLLED(2, j) {
        __m512d low = _mm512_castps_pd(a[4 * i + j]), high = _mm512_castps_pd(a[4 * i + 2 + j]);
        b[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        b[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
    UNROLLED(4, i) { /* b[4 j + i]: channels i, 4 + i, 8 + i, 12 + i of the vectors 4 j … 4 j + 3 */
        __m512 p = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x88), q = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x88);
        __m512 r = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xdd), s = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xdd);
        v[i] = (V)_mm512_shuffle_f32x4(p, q, 0x88);
        v[8 + i] = (V)_mm512_shuffle_f32x4(p, q, 0xdd);
        v[4 + i] = (V)_mm512_shuffle_f32x4(r, s, 0x88);
        v[12 + i] = (V)_mm512_shuffle_f32x4(r, s, 0xdd);
    }
}
#endif

/* Bit i: channel i of 8 has a delta, and its unit is alive. */
INLINE unsigned alive_of_8(const float *delta, const float *unit, int relu) {
#if LEVEL == 3
    const I bit = {1, 2, 4, 8};
    I low = load(delta) != 0, high = load(delta + 4) != 0;
    if (relu) low &= load(unit) > 0, high &= load(unit + 4) > 0;
    return vaddvq_u32((uint32x4_t)((low & bit) | (high & bit << 4)));
#elif LEVEL > 0
    __m256 zero = _mm256_setzero_ps();
    __m256 alive = _mm256_cmp_ps(_mm256_loadu_ps(delta), zero, _CMP_NEQ_UQ);
    if (relu) alive = _mm256_and_ps(alive, _mm256_cmp_ps(_mm256_loadu_ps(unit), zero, _CMP_GT_OQ));
    return (unsigned)_mm256_movemask_ps(alive);
#else
    unsigned bits = 0;
    for (int i = 0; i < 8; i++) bits |= (unsigned)(delta[i] != 0 && (!relu || unit[i] > 0)) << i;
    return bits;
#endif
}

INLINE I larger_of(I a, I b) {
    I greater = a > b;
    return (greater & a) | (~greater & b);
}

/* Is any of n values NaN or so large that a product of two could overflow? Without their signs, the bits of floats are
 * ordered as the floats are, and those of NaN come last. */
#define LARGE 1e15f
INLINE int any_wild(const float *p, int64_t n) {
    I largest = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) largest = larger_of(largest, (I)load(p + i) & 0x7fffffff);
    int found = 0;
    for (; i < n; i++) found |= !(__builtin_fabsf(p[i]) < LARGE);
    I wild = ~((V)largest < LARGE);
    for (int j = 0; j < LANES; j++) found |= wild[j];
    return found != 0;
}

#endif
