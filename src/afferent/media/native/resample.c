#include "variant.h"

/* Rows that are kept beyond those that one row is made of. */
#define SPARE_ROWS 32

/* Planes of rows that have their new length. Row `first` of the source is the buffer's first. */
typedef struct {
    uint8_t *bytes;
    uint8_t *scratch; /* for the rows that are widened at a time */
    uint8_t *made;    /* one row */
    size_t width;     /* of a plane's row, padded */
    size_t capacity, first, end;
} Strip;

static uint8_t *row_of(const Strip *strip, size_t row, int channel) {
    return strip->bytes + ((row - strip->first) * CHANNELS + channel) * strip->width;
}

static void keep_row(const Variant *variant, const Source *source, Strip *strip,
                     uint8_t *const planes[CHANNELS]) {
    if (!source->is_planar) {
        variant->split(source_row(source, strip->end, 0), source->columns, planes);
    } else {
        for (int channel = 0; channel < CHANNELS; channel++)
            memcpy(planes[channel], source_row(source, strip->end, channel), source->columns);
    }
}

/* Have the source's rows from `start` to `end` in the strip. */
static void advance(const Variant *variant, const Source *source, const Weights *axis, Strip *strip,
                    size_t start, size_t end) {
    const size_t rows = axis->starts ? variant->rows : 1, step = CHANNELS * strip->width;
    if (start > strip->end) strip->first = strip->end = start;
    while (strip->end < end) {
        if (strip->end - strip->first + rows > strip->capacity) {
            memmove(strip->bytes, row_of(strip, start, 0), (strip->end - start) * step);
            strip->first = start;
        }
        uint8_t *planes[CHANNELS];
        for (int i = 0; i < CHANNELS; i++) planes[i] = row_of(strip, strip->end, i);
        if (axis->starts)
            variant->widen(source, strip->end, axis, strip->scratch, planes, step);
        else
            keep_row(variant, source, strip, planes);
        const size_t left = source->rows - strip->end;
        strip->end += left < rows ? left : rows;
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

static int open_strip(Strip *strip, const Variant *variant, const Source *source,
                      const Weights *across, const Weights *down) {
    const size_t width = across->starts ? across->size : source->columns;
    strip->width = rounded_up(width, ALIGNMENT);
    strip->capacity = (size_t)(down->starts ? down->taps : 1) + SPARE_ROWS;
    strip->bytes = zeros((strip->capacity + SPARE_TAPS) * CHANNELS * strip->width);
    strip->scratch = zeros((source->columns + SPARE_COLUMNS) * CHANNELS * variant->rows);
    strip->made = zeros(strip->width);
    strip->first = strip->end = 0;
    return strip->bytes && strip->scratch && strip->made;
}

static void make_row(const Variant *variant, Strip *strip, const Weights *vertical, size_t row,
                     size_t start, const Target *target) {
    for (int channel = 0; channel < CHANNELS; channel++) {
        const uint8_t *made = row_of(strip, start, channel);
        if (vertical->starts) {
            variant->down(made, CHANNELS * strip->width, vertical, row, strip->width, strip->made);
            made = strip->made;
        }
        scatter(target, row, channel, made);
    }
}

int resample(const Variant *variant, const Source *source, const Axis *across, const Axis *down,
             const Target *target) {
    Strip strip = {0};
    Weights horizontal = {0}, vertical = {0};
    const Variant *wide = variant;
    if (across->starts && wide->can_widen && !wide->can_widen(across)) wide = wide->otherwise;
    const int has_memory = (!across->starts || wide->pack_across(across, &horizontal)) &&
                           (!down->starts || variant->pack_down(down, &vertical)) &&
                           open_strip(&strip, wide, source, &horizontal, &vertical);
    for (size_t row = 0; has_memory && row < down->size; row++) {
        const size_t start = down->starts ? (size_t)down->starts[row] : row;
        const size_t end = start + (down->starts ? (size_t)down->taps : 1);
        advance(wide, source, &horizontal, &strip, start, end);
        make_row(variant, &strip, &vertical, row, start, target);
    }
    free(strip.bytes);
    free(strip.scratch);
    free(strip.made);
    free(horizontal.packed);
    free(vertical.packed);
    return has_memory ? 0 : -1;
}

const Variant *next_variant(const Variant *after) {
    static const Variant *const all[] = {
#if AFFERENT_X86
        &avx512, &avx2,
#endif
        &portable, NULL};
    const Variant *const *next = all;
    while (after && *next++ != after) continue;
    while (*next && !(*next)->is_supported()) next++;
    return *next;
}

const char *name_of(const Variant *variant) { return variant->name; }
