/* Resampling of RGB bytes in strips that stay in the cache, straight to where they belong. */

#ifndef AFFERENT_RESAMPLE_H
#define AFFERENT_RESAMPLE_H

#include <stddef.h>
#include <stdint.h>

#define CHANNELS 3

/* Weights are at most as far from 0: three signed bytes hold them. */
#define MOST_WEIGHT 0x7F7F7F

/* Pixels: rows of them anywhere, in a row one behind the other, or by planes. */
typedef struct {
    const uint8_t *bytes;
    size_t rows, columns;
    ptrdiff_t row_step, channel_step;
    int is_planar;
} Source;

/* One direction: output i is made of `taps` neighbours from starts[i] on. Without `starts` nothing
   changes. Starts never fall. */
typedef struct {
    const int32_t *starts, *weights;
    size_t size;
    int taps, shift;
} Axis;

/* Where a value goes: channel * channel_step + row_at[row] + run_at[column / run] + column % run. */
typedef struct {
    uint8_t *bytes;
    ptrdiff_t channel_step;
    ptrdiff_t *row_at, *run_at;
    size_t num_runs, run;
} Target;

typedef struct Variant Variant;

/* The next slower variant that this processor has; after NULL the fastest; NULL after the last. */
const Variant *next_variant(const Variant *after);
const char *name_of(const Variant *variant);

/* 0, or -1 without memory. All has been checked. Each variant writes the same bytes. */
int resample(const Variant *variant, const Source *source, const Axis *across, const Axis *down,
             const Target *target);

#endif
