#include "resample.h"

#include <stdlib.h>

#include "lanes.h"

/* Rows that are kept beyond those that one row is made of. */
#define SPARE_ROWS 64

/* Planes of rows that have their new length. Row `first` of the source is the buffer's first. */
typedef struct {
    uint8_t *bytes;
    uint8_t *columns; /* of sixteen rows: (columns, 16) */
    uint8_t *made;    /* one row */
    size_t width;     /* of a plane's row, padded */
    size_t capacity, first, end;
} Strip;

static uint8_t *row_of(const Strip *strip, size_t row, int channel) {
    return strip->bytes + ((row - strip->first) * CHANNELS + channel) * strip->width;
}

VECTORIZED static void to_columns(const uint8_t *const rows[LANES], size_t length, uint8_t *out) {
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

/* An axis whose weights are packed. */
typedef struct {
    const int32_t *starts;
    int32_t *packed;
    size_t size;
    int taps, shift, is_wide;
} Weights;

/* One plane of sixteen rows, from their columns, which are `step` apart. */
VECTORIZED INLINE void weigh_across(const uint8_t *columns, size_t step, const Weights *axis,
                                    int taps, int is_wide, uint8_t *out, size_t out_step) {
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

VECTORIZED INLINE void weigh_down(const uint8_t *rows, size_t step, const Weights *axis, size_t row,
                                  int taps, int is_wide, size_t width, uint8_t *out) {
    const int32_t *packed = axis->packed + row * (size_t)packed_size(taps, is_wide);
    for (size_t at = 0; at < width; at += LANES)
        weigh(rows + at, step, packed, taps, is_wide, axis->shift, out + at);
}

/* Loops whose length the compiler knows are faster: enlarging, and a little or half as large. */
#define FOR_TAPS(axis, call)                                                                        \
    switch (2 * (((axis)->taps + 1) / 2) + (axis)->is_wide) {                                       \
    case 4: call(4, 0); break;                                                                      \
    case 5: call(4, 1); break;                                                                      \
    case 6: call(6, 0); break;                                                                      \
    case 7: call(6, 1); break;                                                                      \
    case 8: call(8, 0); break;                                                                      \
    case 9: call(8, 1); break;                                                                      \
    default:                                                                                        \
        if ((axis)->is_wide)                                                                        \
            call((axis)->taps, 1);                                                                  \
        else                                                                                        \
            call((axis)->taps, 0);                                                                  \
    }

VECTORIZED static void across(const uint8_t *columns, size_t step, const Weights *axis,
                              uint8_t *out, size_t out_step) {
#define CALL(taps, is_wide) weigh_across(columns, step, axis, taps, is_wide, out, out_step)
    FOR_TAPS(axis, CALL)
#undef CALL
}

VECTORIZED static void down(const uint8_t *rows, size_t step, const Weights *axis, size_t row,
                            size_t width, uint8_t *out) {
#define CALL(taps, is_wide) weigh_down(rows, step, axis, row, taps, is_wide, width, out)
    FOR_TAPS(axis, CALL)
#undef CALL
}

VECTORIZED static void split(const uint8_t *pixels, size_t columns, uint8_t *red, uint8_t *green,
                             uint8_t *blue) {
    for (size_t x = 0; x < columns; x++) {
        red[x] = pixels[CHANNELS * x];
        green[x] = pixels[CHANNELS * x + 1];
        blue[x] = pixels[CHANNELS * x + 2];
    }
}

static const uint8_t *source_row(const Source *source, size_t row, int channel) {
    return source->bytes + (ptrdiff_t)row * source->row_step + channel * source->channel_step;
}

static void keep_row(const Source *source, Strip *strip) {
    const size_t row = strip->end;
    uint8_t *to[CHANNELS];
    for (int channel = 0; channel < CHANNELS; channel++) to[channel] = row_of(strip, row, channel);
    if (!source->is_planar) {
        split(source_row(source, row, 0), source->columns, to[0], to[1], to[2]);
    } else {
        for (int channel = 0; channel < CHANNELS; channel++)
            memcpy(to[channel], source_row(source, row, channel), source->columns);
    }
    strip->end++;
}

static void widen_rows(const Source *source, const Weights *axis, Strip *strip) {
    const size_t left = source->rows - strip->end, step = CHANNELS * strip->width;
    const size_t length = source->columns * (source->is_planar ? 1 : CHANNELS);
    const uint8_t *rows[LANES];
    const size_t tap_step = source->is_planar ? LANES : CHANNELS * LANES;
    for (int channel = 0; channel < CHANNELS; channel++) {
        if (source->is_planar || channel == 0) {
            for (size_t i = 0; i < LANES; i++) /* below the last row: the last row */
                rows[i] = source_row(source, strip->end + (i < left ? i : left - 1), channel);
            to_columns(rows, length, strip->columns);
        }
        const uint8_t *columns = strip->columns + (source->is_planar ? 0 : channel * LANES);
        across(columns, tap_step, axis, row_of(strip, strip->end, channel), step);
    }
    strip->end += left < LANES ? left : LANES;
}

/* Have the source's rows from `start` to `end` in the strip. */
static void advance(const Source *source, const Weights *axis, Strip *strip, size_t start,
                    size_t end) {
    if (start > strip->end) strip->first = strip->end = start;
    while (strip->end < end) {
        if (strip->end - strip->first + LANES > strip->capacity) {
            const size_t kept = (strip->end - start) * CHANNELS * strip->width;
            memmove(strip->bytes, row_of(strip, start, 0), kept);
            strip->first = start;
        }
        if (axis->starts)
            widen_rows(source, axis, strip);
        else
            keep_row(source, strip);
    }
}

INLINE void scatter_runs(const Target *target, uint8_t *out, const uint8_t *row, size_t run) {
    for (size_t i = 0; i < target->num_runs; i++)
        memcpy(out + target->run_at[i], row + i * run, run);
}

static void scatter(const Target *target, size_t row, int channel, const uint8_t *bytes) {
    uint8_t *out = target->bytes + channel * target->channel_step + target->row_at[row];
    switch (target->run) { /* sides of patches: two or three moves each */
    case 14: scatter_runs(target, out, bytes, 14); break;
    case 16: scatter_runs(target, out, bytes, 16); break;
    default: scatter_runs(target, out, bytes, target->run);
    }
}

static int open_strip(Strip *strip, const Source *source, const Weights *across,
                      const Weights *down) {
    const size_t width = across->starts ? across->size : source->columns;
    strip->width = (width + LANES - 1) / LANES * LANES;
    strip->capacity = (size_t)(down->starts ? down->taps : 1) + SPARE_ROWS;
    strip->bytes = calloc((strip->capacity + 1) * CHANNELS, strip->width);
    strip->columns = across->starts ? calloc((source->columns + 1) * CHANNELS, LANES) : NULL;
    strip->made = malloc(strip->width);
    strip->first = strip->end = 0;
    return strip->bytes && strip->made && (strip->columns || !across->starts);
}

static int open_weights(Weights *weights, const Axis *axis) {
    *weights = (Weights){axis->starts, NULL, axis->size, axis->taps, axis->shift, 0};
    if (!axis->starts) return 1;
    const size_t count = axis->size * (size_t)axis->taps;
    for (size_t i = 0; i < count; i++)
        weights->is_wide |= axis->weights[i] != (int16_t)axis->weights[i];
    const size_t size = (size_t)packed_size(axis->taps, weights->is_wide);
    weights->packed = malloc(axis->size * size * sizeof *weights->packed);
    for (size_t i = 0; weights->packed && i < axis->size; i++)
        pack(axis->weights + i * (size_t)axis->taps, axis->taps, weights->is_wide,
             weights->packed + i * size);
    return weights->packed != NULL;
}

static void make_row(Strip *strip, const Weights *vertical, size_t row, size_t start,
                     const Target *target) {
    for (int channel = 0; channel < CHANNELS; channel++) {
        const uint8_t *made = row_of(strip, start, channel);
        if (vertical->starts) {
            down(made, CHANNELS * strip->width, vertical, row, strip->width, strip->made);
            made = strip->made;
        }
        scatter(target, row, channel, made);
    }
}

int resample(const Source *source, const Axis *across, const Axis *down, const Target *target) {
    Strip strip = {0};
    Weights horizontal, vertical = {0};
    const int has_memory = open_weights(&horizontal, across) && open_weights(&vertical, down) &&
                           open_strip(&strip, source, &horizontal, &vertical);
    for (size_t row = 0; has_memory && row < down->size; row++) {
        const size_t start = down->starts ? (size_t)down->starts[row] : row;
        advance(source, &horizontal, &strip, start, start + (down->starts ? (size_t)down->taps : 1));
        make_row(&strip, &vertical, row, start, target);
    }
    free(strip.bytes);
    free(strip.columns);
    free(strip.made);
    free(horizontal.packed);
    free(vertical.packed);
    return has_memory ? 0 : -1;
}

int can_resample(void) {
#if AFFERENT_AVX2
    return __builtin_cpu_supports("avx2");
#else
    return 1;
#endif
}
