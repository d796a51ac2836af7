/* Resampling of RGB bytes in strips that stay in the cache, straight to where they belong. */

#ifndef AFFERENT_RESAMPLE_H
#define AFFERENT_RESAMPLE_H

#include <stddef.h>
#include <stdint.h>

#define CHANNELS 3

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

/* 0, or -1 without memory. All has been checked. */
int resample(const Source *source, const Axis *across, const Axis *down, const Target *target);

/* Whether this processor has what the code was compiled for. */
int can_resample(void);

#endif
