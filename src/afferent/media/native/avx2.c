/* Sixteen bytes at a time, as words of 16 bits. */

#include "variant.h"

#if AFFERENT_X86
#include <immintrin.h>

#define LANES 16
#define TARGET __attribute__((target("avx2")))
#define LOW_BITS 15

/* Weights go by pairs: an odd number has a weight of 0 behind it. */
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

TARGET INLINE __m256i widened(const uint8_t *from) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
}

TARGET INLINE __m256i plus_product(__m256i sum, __m256i pairs, int32_t weights) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi32(weights)));
}

TARGET INLINE void weigh(const uint8_t *from, size_t step, const int32_t *packed, int taps,
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

#include "columns.h"

#define ROWS 4
#define MAGNITUDE(pixels) (Pixels) _mm256_abs_epi16((__m256i)(pixels))
#include "rows.h"

static int is_supported(void) { return __builtin_cpu_supports("avx2"); }

const Variant avx2 = {
    .name = "avx2",
    .rows = LANES,
    .is_supported = is_supported,
    .pack_across = pack_axis,
    .pack_down = pack_axis,
    .split = split_plainly,
    .widen = widen,
    .down = down,
    .unfilter = unfilter_rows,
    .rows_at_once = ROWS,
};
#endif
