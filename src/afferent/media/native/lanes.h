/* Sixteen bytes at a time: what resampling is made of.

   The fast form needs AVX2. Elsewhere the compiler makes of the plain loops what it can; both give
   the same bytes. AFFERENT_PORTABLE asks for the plain ones. */

#ifndef AFFERENT_LANES_H
#define AFFERENT_LANES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) && !defined(AFFERENT_PORTABLE)
#define AFFERENT_AVX2 1
#include <immintrin.h>
#define VECTORIZED __attribute__((target("avx2")))
#else
#define AFFERENT_AVX2 0
#define VECTORIZED
#endif

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (Bytes){__VA_ARGS__})
#endif

VECTORIZED INLINE Bytes lower_pairs(Bytes a, Bytes b) {
    return SHUFFLED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

VECTORIZED INLINE Bytes upper_pairs(Bytes a, Bytes b) {
    return SHUFFLED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* Rows become columns. */
VECTORIZED INLINE void transpose(Bytes square[LANES]) {
    Bytes next[LANES];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = lower_pairs(square[i], square[i + LANES / 2]);
            next[2 * i + 1] = upper_pairs(square[i], square[i + LANES / 2]);
        }
        memcpy(square, next, sizeof next);
    }
}

/* Weighted sums, rounded and cut to bytes: out[i] = sum of weights[k] * from[k * step + i].

   Weights are packed first, into `packed_size(taps, is_wide)` words, by pairs: an odd number has a
   weight of 0 behind it, and what that is for is read. They are wide if one needs more than 16
   bits. */
#if AFFERENT_AVX2
#define LOW_BITS 15

INLINE int packed_size(int taps, int is_wide) { return (taps + 1) / 2 * (1 + is_wide); }

/* Two neighbours' weights in a word: their lower bits, and behind all of these the others. */
INLINE void pack(const int32_t *weights, int taps, int is_wide, int32_t *packed) {
    const int half = (taps + 1) / 2, mask = (1 << LOW_BITS) - 1;
    for (int i = 0; i < half; i++) {
        const int32_t a = weights[2 * i], b = 2 * i + 1 < taps ? weights[2 * i + 1] : 0;
        const int32_t low_a = is_wide ? a & mask : a, low_b = is_wide ? b & mask : b;
        packed[i] = (int32_t)((uint32_t)(low_a & 0xFFFF) | (uint32_t)low_b << 16);
        if (is_wide)
            packed[half + i] = (int32_t)((uint32_t)((a >> LOW_BITS) & 0xFFFF) |
                                         (uint32_t)(b >> LOW_BITS) << 16);
    }
}

VECTORIZED INLINE __m256i widened(const uint8_t *from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
}

VECTORIZED INLINE __m256i plus_product(__m256i sum, __m256i pairs, int32_t weights) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi32(weights)));
}

VECTORIZED INLINE void weigh(const uint8_t *from, size_t step, const int32_t *packed, int taps,
                             int is_wide, int shift, uint8_t *out) {
    const int half = (taps + 1) / 2;
    /* Unpacking and packing go by halves of a register: the second puts in order what the first has
       mixed up. */
    __m256i lower = _mm256_set1_epi32(1 << (shift - 1)), upper = lower;
    __m256i lower_high = _mm256_setzero_si256(), upper_high = lower_high;
    for (int i = 0; i < half; i++, from += 2 * step) {
        const __m256i first = widened(from), second = widened(from + step);
        const __m256i a = _mm256_unpacklo_epi16(first, second);
        const __m256i b = _mm256_unpackhi_epi16(first, second);
        lower = plus_product(lower, a, packed[i]);
        upper = plus_product(upper, b, packed[i]);
        if (is_wide) {
            lower_high = plus_product(lower_high, a, packed[half + i]);
            upper_high = plus_product(upper_high, b, packed[half + i]);
        }
    }
    if (is_wide) {
        lower = _mm256_add_epi32(lower, _mm256_slli_epi32(lower_high, LOW_BITS));
        upper = _mm256_add_epi32(upper, _mm256_slli_epi32(upper_high, LOW_BITS));
    }
    const __m256i words =
        _mm256_packs_epi32(_mm256_srai_epi32(lower, shift), _mm256_srai_epi32(upper, shift));
    const __m128i first = _mm256_castsi256_si128(words), rest = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i *)out, _mm_packus_epi16(first, rest));
}
#else
INLINE int packed_size(int taps, int is_wide) {
    (void)is_wide;
    return (taps + 1) / 2 * 2;
}

INLINE void pack(const int32_t *weights, int taps, int is_wide, int32_t *packed) {
    packed[packed_size(taps, is_wide) - 1] = 0;
    memcpy(packed, weights, (size_t)taps * sizeof *weights);
}

INLINE void weigh(const uint8_t *from, size_t step, const int32_t *packed, int taps, int is_wide,
                  int shift, uint8_t *out) {
    /* Unsigned: with weights too large for their sum, it wraps as it does in AVX2. */
    uint32_t sums[LANES];
    (void)is_wide;
    for (int i = 0; i < LANES; i++) sums[i] = UINT32_C(1) << (shift - 1);
    for (int k = 0; k < taps; k++, from += step)
        for (int i = 0; i < LANES; i++) sums[i] += (uint32_t)packed[k] * from[i];
    for (int i = 0; i < LANES; i++) {
        const int32_t value = (int32_t)sums[i] >> shift;
        out[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}
#endif

#endif
