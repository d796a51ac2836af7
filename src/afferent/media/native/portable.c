/* Plain loops, of which the compiler makes what it can. */

#include "variant.h"

#define LANES 16
#define TARGET

/* An odd number of weights has one of 0 behind it. */
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
    /* Unsigned: with weights too large for their sum, it wraps as it does in vectors. */
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

#include "columns.h"

#define ROWS 2
#define MAGNITUDE(pixels) ((((pixels) >> 15) ^ (pixels)) - ((pixels) >> 15))
#include "rows.h"

void split_plainly(const uint8_t *pixels, size_t columns, uint8_t *const planes[CHANNELS]) {
    uint8_t *red = planes[0], *green = planes[1], *blue = planes[2];
    for (size_t x = 0; x < columns; x++) {
        red[x] = pixels[CHANNELS * x];
        green[x] = pixels[CHANNELS * x + 1];
        blue[x] = pixels[CHANNELS * x + 2];
    }
}

static int is_supported(void) { return 1; }

const Variant portable = {
    .name = "portable",
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
