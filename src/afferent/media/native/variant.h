/* The kernels of resampling: one set for each kind of processor. */

#ifndef AFFERENT_VARIANT_H
#define AFFERENT_VARIANT_H

#include <stdlib.h>
#include <string.h>

#include "resample.h"

#define INLINE static inline __attribute__((always_inline))

/* Rows of a strip are multiples of as many bytes, and begin at one. */
#define ALIGNMENT 64
/* What may be read behind the last column, and behind the last row that has a weight. */
#define SPARE_COLUMNS 192
#define SPARE_TAPS 3

#if defined(__x86_64__) && !defined(AFFERENT_PORTABLE)
#define AFFERENT_X86 1
#else
#define AFFERENT_X86 0
#endif

/* An axis whose weights a variant has packed. They are wide if two signed bytes do not hold one. */
typedef struct {
    const int32_t *starts;
    int32_t *packed;
    size_t size;
    int taps, shift, is_wide, is_far;
} Weights;

/* A row of a PNG, behind its filter, and where its pixels go. */
typedef struct {
    int filter;
    const uint8_t *bytes;
    uint8_t *out;
} FilteredRow;

enum { NO_FILTER, SUB, UP, AVERAGE, PAETH };
enum { MOST_ROWS_AT_ONCE = 4 };

struct Variant {
    const char *name;
    size_t rows; /* that `widen` makes at a time */
    int (*is_supported)(void);
    /* Whether `widen` can; if not, `otherwise` does it. NULL: it always can. */
    int (*can_widen)(const Axis *axis);
    const Variant *otherwise;
    /* Pack an axis, for `widen` or for `down`; 0 without memory. */
    int (*pack_across)(const Axis *axis, Weights *weights);
    int (*pack_down)(const Axis *axis, Weights *weights);
    /* Pixels to planes. */
    void (*split)(const uint8_t *pixels, size_t columns, uint8_t *const planes[CHANNELS]);
    /* Rows from `row` on to planes of rows that have their new length. `scratch` has space for
       `rows` of the source. */
    void (*widen)(const Source *source, size_t row, const Weights *axis, uint8_t *scratch,
                  uint8_t *const planes[CHANNELS], size_t row_step);
    /* One output row of one plane. */
    void (*down)(const uint8_t *rows, size_t step, const Weights *axis, size_t row, size_t width,
                 uint8_t *out);
    /* `rows_at_once` rows of a PNG; three bytes behind each and behind `above` are read, too.
       NULL: `otherwise` does it. */
    void (*unfilter)(const FilteredRow *rows, const uint8_t *above, size_t width, size_t channels);
    size_t rows_at_once;
};

extern const Variant portable, avx2, avx512;

void split_plainly(const uint8_t *pixels, size_t columns, uint8_t *const planes[CHANNELS]);

INLINE const uint8_t *source_row(const Source *source, size_t row, int channel) {
    return source->bytes + (ptrdiff_t)row * source->row_step + channel * source->channel_step;
}

INLINE size_t rounded_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

/* Aligned memory, all zero. */
INLINE void *zeros(size_t size) {
    void *bytes = aligned_alloc(ALIGNMENT, rounded_up(size, ALIGNMENT));
    return bytes ? memset(bytes, 0, size) : NULL;
}

INLINE Weights unpacked(const Axis *axis) {
    Weights weights = {axis->starts, NULL, axis->size, axis->taps, axis->shift, 0, 0};
    const size_t count = axis->size * (size_t)axis->taps;
    for (size_t i = 0; i < count; i++)
        weights.is_wide |= axis->weights[i] > 0x7F7F || axis->weights[i] < -0x7F7F;
    return weights;
}

#endif
