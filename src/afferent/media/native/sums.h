/* Sums down: part of each variant's source, which has defined before

   - TARGET, the attribute of functions for its processors, and LANES, a number of bytes;
   - packed_size(taps, is_wide), and pack(weights, taps, is_wide, packed), for one output;
   - weigh(from, step, packed, taps, is_wide, shift, out): out[i], LANES of them, is the sum of
     weights[k] * from[k * step + i], rounded and cut to a byte. Up to SPARE_TAPS more rows are
     read, with weights of 0. */

#include "variant.h"

/* Loops whose length the compiler knows are faster: enlarging, and a little or half as large. An odd
   number of taps is called as the next even one, which packs to the same size. */
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

static int pack_axis(const Axis *axis, Weights *weights) {
    *weights = unpacked(axis);
    const size_t size = (size_t)packed_size(axis->taps, weights->is_wide);
    weights->packed = malloc(axis->size * size * sizeof *weights->packed);
    for (size_t i = 0; weights->packed && i < axis->size; i++)
        pack(axis->weights + i * (size_t)axis->taps, axis->taps, weights->is_wide,
             weights->packed + i * size);
    return weights->packed != NULL;
}

TARGET INLINE void weigh_down(const uint8_t *rows, size_t step, const Weights *axis, size_t row,
                              int taps, int is_wide, size_t width, uint8_t *out) {
    const int32_t *packed = axis->packed + row * (size_t)packed_size(taps, is_wide);
    for (size_t at = 0; at < width; at += LANES)
        weigh(rows + at, step, packed, taps, is_wide, axis->shift, out + at);
}

TARGET static void down(const uint8_t *rows, size_t step, const Weights *axis, size_t row,
                        size_t width, uint8_t *out) {
#define CALL(taps, is_wide) weigh_down(rows, step, axis, row, taps, is_wide, width, out)
    FOR_TAPS(axis, CALL)
#undef CALL
}
