/* Sums across, from columns of sixteen rows: part of a variant's source, as sums.h. */

#include "sums.h"

typedef uint8_t Bytes __attribute__((vector_size(LANES)));

#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (Bytes){__VA_ARGS__})
#endif

TARGET INLINE Bytes lower_pairs(Bytes a, Bytes b) {
    return SHUFFLED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

TARGET INLINE Bytes upper_pairs(Bytes a, Bytes b) {
    return SHUFFLED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* Rows become columns. */
TARGET INLINE void transpose(Bytes square[LANES]) {
    Bytes next[LANES];
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = lower_pairs(square[i], square[i + LANES / 2]);
            next[2 * i + 1] = upper_pairs(square[i], square[i + LANES / 2]);
        }
        memcpy(square, next, sizeof next);
    }
}

TARGET static void to_columns(const uint8_t *const rows[LANES], size_t length, uint8_t *out) {
    Bytes square[LANES];
    for (size_t at = 0; at < length; at += LANES) {
        const size_t count = length - at < LANES ? length - at : LANES;
        for (int i = 0; i < LANES; i++) {
            if (count == LANES) {
                memcpy(&square[i], rows[i] + at, LANES);
            } else {
                memset(&square[i], 0, LANES);
                memcpy(&square[i], rows[i] + at, count);
            }
        }
        transpose(square);
        memcpy(out + at * LANES, square, count * LANES);
    }
}

/* One plane of sixteen rows, from their columns, which are `step` apart. */
TARGET INLINE void weigh_across(const uint8_t *columns, size_t step, const Weights *axis, int taps,
                                int is_wide, uint8_t *out, size_t out_step) {
    const int32_t *packed = axis->packed;
    Bytes square[LANES] = {{0}};
    for (size_t at = 0; at < axis->size; at += LANES) {
        const size_t count = axis->size - at < LANES ? axis->size - at : LANES;
        for (size_t i = 0; i < count; i++, packed += packed_size(taps, is_wide)) {
            const uint8_t *from = columns + (size_t)axis->starts[at + i] * step;
            weigh(from, step, packed, taps, is_wide, axis->shift, (uint8_t *)&square[i]);
        }
        transpose(square);
        for (int i = 0; i < LANES; i++) memcpy(out + (size_t)i * out_step + at, &square[i], LANES);
    }
}

TARGET static void across(const uint8_t *columns, size_t step, const Weights *axis, uint8_t *out,
                          size_t out_step) {
#define CALL(taps, is_wide) weigh_across(columns, step, axis, taps, is_wide, out, out_step)
    FOR_TAPS(axis, CALL)
#undef CALL
}

static void widen(const Source *source, size_t row, const Weights *axis, uint8_t *scratch,
                  uint8_t *const planes[CHANNELS], size_t row_step) {
    const size_t left = source->rows - row, pixel = source->is_planar ? 1 : CHANNELS;
    const uint8_t *rows[LANES];
    for (int channel = 0; channel < CHANNELS; channel++) {
        if (source->is_planar || channel == 0) {
            for (size_t i = 0; i < LANES; i++) /* below the last row: the last row */
                rows[i] = source_row(source, row + (i < left ? i : left - 1), channel);
            to_columns(rows, source->columns * pixel, scratch);
        }
        const uint8_t *columns = scratch + (source->is_planar ? 0 : channel * LANES);
        across(columns, pixel * LANES, axis, planes[channel], row_step);
    }
}
