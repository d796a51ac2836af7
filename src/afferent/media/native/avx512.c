/* Sixty-four bytes at a time, as bytes: four neighbours' products are one instruction (VNNI). Across,
   another one (VBMI) gathers the neighbours of sixteen outputs, so rows stay rows. */

#include "variant.h"

#if AFFERENT_X86
#include <immintrin.h>

#define LANES 64
#define TARGET __attribute__((target("avx512bw,avx512vbmi,avx512vnni")))
#define FOURS 4   /* neighbours in an instruction */
#define BLOCK 16  /* outputs in an instruction */
#define REACH 128 /* bytes that a block's four neighbours lie in */

/* A weight is two or three signed bytes. Four neighbours' lowest bytes are a word, their next bytes
   the following word, and so on. */
INLINE int num_parts(int is_wide) { return 2 + is_wide; }

INLINE int packed_size(int taps, int is_wide) {
    return (taps + FOURS - 1) / FOURS * num_parts(is_wide);
}

INLINE void pack(const int32_t *weights, int taps, int is_wide, int32_t *packed) {
    const int parts = num_parts(is_wide);
    int8_t *bytes = (int8_t *)packed;
    memset(packed, 0, (size_t)packed_size(taps, is_wide) * sizeof *packed);
    for (int k = 0; k < taps; k++) {
        int32_t rest = weights[k];
        for (int part = 0; part < parts; part++) {
            const int8_t lowest = (int8_t)rest;
            bytes[(k / FOURS * parts + part) * FOURS + k % FOURS] = lowest;
            rest = (rest - lowest) >> 8;
        }
    }
}

/* Sums of the products with each part of the weights. */
typedef struct {
    __m512i parts[3];
} Sums;

TARGET INLINE Sums no_sums(int shift) {
    return (Sums){{_mm512_set1_epi32(1 << (shift - 1)), _mm512_setzero_si512(),
                   _mm512_setzero_si512()}};
}

TARGET INLINE __m512i total(Sums sums, int is_wide, int shift) {
    __m512i high = sums.parts[1];
    if (is_wide) high = _mm512_add_epi32(high, _mm512_slli_epi32(sums.parts[2], 8));
    const __m512i all = _mm512_add_epi32(sums.parts[0], _mm512_slli_epi32(high, 8));
    return _mm512_srai_epi32(all, (unsigned)shift);
}

/* As in AVX2, by quarters of a register. */
TARGET INLINE __m512i cut(const __m512i words[4]) {
    return _mm512_packus_epi16(_mm512_packs_epi32(words[0], words[1]),
                               _mm512_packs_epi32(words[2], words[3]));
}

TARGET INLINE void weigh(const uint8_t *from, size_t step, const int32_t *packed, int taps,
                         int is_wide, int shift, uint8_t *out) {
    Sums sums[4];
    __m512i words[4];
    for (int i = 0; i < 4; i++) sums[i] = no_sums(shift);
    for (int k = 0; k < taps; k += FOURS, from += FOURS * step) {
        const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + step);
        const __m512i c = _mm512_loadu_si512(from + 2 * step);
        const __m512i d = _mm512_loadu_si512(from + 3 * step);
        const __m512i lower_ab = _mm512_unpacklo_epi8(a, b), upper_ab = _mm512_unpackhi_epi8(a, b);
        const __m512i lower_cd = _mm512_unpacklo_epi8(c, d), upper_cd = _mm512_unpackhi_epi8(c, d);
        const __m512i fours[4] = {
            _mm512_unpacklo_epi16(lower_ab, lower_cd), _mm512_unpackhi_epi16(lower_ab, lower_cd),
            _mm512_unpacklo_epi16(upper_ab, upper_cd), _mm512_unpackhi_epi16(upper_ab, upper_cd)};
        for (int part = 0; part < num_parts(is_wide); part++, packed++)
            for (int i = 0; i < 4; i++)
                sums[i].parts[part] = _mm512_dpbusd_epi32(sums[i].parts[part], fours[i],
                                                          _mm512_set1_epi32(*packed));
    }
    for (int i = 0; i < 4; i++) words[i] = total(sums[i], is_wide, shift);
    _mm512_storeu_si512(out, cut(words));
}

#include "sums.h"

/* A block of outputs: where each one's first four neighbours are, from the first one's on, and
   their weights; then the weights of the next four. */
static size_t block_size(int taps, int is_wide) {
    return (size_t)(1 + packed_size(taps, is_wide)) * BLOCK;
}

static size_t num_blocks(size_t size) { return rounded_up(size, LANES) / BLOCK; }

static int32_t block_start(const int32_t *starts, size_t size, size_t block) {
    return starts[block * BLOCK < size ? block * BLOCK : size - 1];
}

static int32_t span(const Axis *axis) {
    int32_t most = 0;
    for (size_t i = 0; i < axis->size; i++) {
        const int32_t part = axis->starts[i] - block_start(axis->starts, axis->size, i / BLOCK);
        most = part > most ? part : most;
    }
    return most + FOURS;
}

static int can_widen(const Axis *axis) { return span(axis) <= REACH; }

static int pack_across(const Axis *axis, Weights *weights) {
    *weights = unpacked(axis);
    weights->is_far = span(axis) > LANES;
    const int words = packed_size(axis->taps, weights->is_wide);
    const size_t size = block_size(axis->taps, weights->is_wide);
    int32_t *packed = zeros((size_t)words * sizeof *packed);
    weights->packed = zeros(num_blocks(axis->size) * size * sizeof *packed);
    for (size_t i = 0; packed && weights->packed && i < axis->size; i++) {
        int32_t *block = weights->packed + i / BLOCK * size + i % BLOCK;
        const int32_t at = axis->starts[i] - block_start(axis->starts, axis->size, i / BLOCK);
        pack(axis->weights + i * (size_t)axis->taps, axis->taps, weights->is_wide, packed);
        for (int k = 0; k < FOURS; k++) ((uint8_t *)block)[k] = (uint8_t)(at + k);
        for (int word = 0; word < words; word++) block[(1 + word) * BLOCK] = packed[word];
    }
    const int has_memory = packed && weights->packed;
    free(packed);
    return has_memory;
}

TARGET INLINE __m512i gathered(const uint8_t *from, __m512i places, int is_far) {
    const __m512i near = _mm512_loadu_si512(from);
    if (!is_far) return _mm512_permutexvar_epi8(places, near);
    return _mm512_permutex2var_epi8(near, places, _mm512_loadu_si512(from + LANES));
}

/* A block of each plane. */
TARGET INLINE void weigh_block(uint8_t *const from[CHANNELS], int32_t start, const int32_t *block,
                               int taps, int is_wide, int is_far, int shift,
                               __m512i words[CHANNELS]) {
    const __m512i places = _mm512_load_si512(block);
    Sums sums[CHANNELS];
    for (int channel = 0; channel < CHANNELS; channel++) sums[channel] = no_sums(shift);
    for (int k = 0; k < taps; k += FOURS) {
        __m512i fours[CHANNELS];
        for (int channel = 0; channel < CHANNELS; channel++)
            fours[channel] = gathered(from[channel] + start + k, places, is_far);
        for (int part = 0; part < num_parts(is_wide); part++) {
            const __m512i weights = _mm512_load_si512(block += BLOCK);
            for (int channel = 0; channel < CHANNELS; channel++)
                sums[channel].parts[part] =
                    _mm512_dpbusd_epi32(sums[channel].parts[part], fours[channel], weights);
        }
    }
    for (int channel = 0; channel < CHANNELS; channel++)
        words[channel] = total(sums[channel], is_wide, shift);
}

TARGET INLINE void weigh_across(uint8_t *const from[CHANNELS], const Weights *axis, int taps,
                                int is_wide, int is_far, uint8_t *const out[CHANNELS]) {
    /* Quarters of registers, of four blocks each, become the blocks. */
    const __m512i order =
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const int32_t *block = axis->packed;
    for (size_t at = 0; at < axis->size; at += LANES) {
        __m512i words[4][CHANNELS];
        for (size_t i = 0; i < 4; i++, block += block_size(taps, is_wide)) {
            const int32_t start = block_start(axis->starts, axis->size, at / BLOCK + i);
            weigh_block(from, start, block, taps, is_wide, is_far, axis->shift, words[i]);
        }
        for (int channel = 0; channel < CHANNELS; channel++) {
            const __m512i quarters[4] = {words[0][channel], words[1][channel], words[2][channel],
                                         words[3][channel]};
            _mm512_storeu_si512(out[channel] + at, _mm512_permutexvar_epi32(order, cut(quarters)));
        }
    }
}

TARGET INLINE __m512i loaded(const uint8_t *from, ptrdiff_t left) {
    return _mm512_maskz_loadu_epi8(left >= LANES ? ~0ULL : left > 0 ? (1ULL << left) - 1 : 0, from);
}

TARGET static void split(const uint8_t *pixels, size_t columns, uint8_t *const planes[CHANNELS]) {
    uint8_t numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = (uint8_t)(CHANNELS * i);
    const __m512i first = _mm512_loadu_si512(numbers);
    ptrdiff_t left = (ptrdiff_t)(CHANNELS * columns);
    for (size_t x = 0; x < columns; x += LANES, left -= CHANNELS * LANES) {
        const uint8_t *from = pixels + CHANNELS * x;
        const __m512i a = loaded(from, left), b = loaded(from + LANES, left - LANES);
        const __m512i c = loaded(from + 2 * LANES, left - 2 * LANES);
        for (int channel = 0; channel < CHANNELS; channel++) {
            const __m512i places = _mm512_add_epi8(first, _mm512_set1_epi8((char)channel));
            const __m512i from_ab = _mm512_permutex2var_epi8(a, places, b);
            /* From 128 on, which is a byte's sign, they are in c. */
            const __m512i all = _mm512_mask_permutexvar_epi8(from_ab, _mm512_movepi8_mask(places),
                                                             places, c);
            _mm512_storeu_si512(planes[channel] + x, all);
        }
    }
}

TARGET static void widen(const Source *source, size_t row, const Weights *axis, uint8_t *scratch,
                         uint8_t *const planes[CHANNELS], size_t row_step) {
    const size_t width = rounded_up(source->columns, LANES) + REACH;
    uint8_t *from[CHANNELS] = {scratch, scratch + width, scratch + 2 * width};
    (void)row_step;
    if (!source->is_planar) split(source_row(source, row, 0), source->columns, from);
    for (int channel = 0; source->is_planar && channel < CHANNELS; channel++)
        memcpy(from[channel], source_row(source, row, channel), source->columns);
#define NEAR(taps, is_wide) weigh_across(from, axis, taps, is_wide, 0, planes)
#define FAR(taps, is_wide) weigh_across(from, axis, taps, is_wide, 1, planes)
    if (axis->is_far) {
        FOR_TAPS(axis, FAR)
    } else {
        FOR_TAPS(axis, NEAR)
    }
}

static int is_supported(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vnni");
}

const Variant avx512 = {
    .name = "avx512",
    .rows = 1,
    .is_supported = is_supported,
    .can_widen = can_widen,
    .otherwise = &avx2,
    .pack_across = pack_across,
    .pack_down = pack_axis,
    .split = split,
    .widen = widen,
    .down = down,
};
#endif
