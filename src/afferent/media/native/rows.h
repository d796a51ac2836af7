/* Rows of a PNG without their filters: part of a variant's source, for ROWS of them at once. The
   variant has defined MAGNITUDE(pixels), their values without signs.

   A byte of a row is its difference from what its neighbours predict: the pixel to the left, the
   one above, and the one above the left one. So the pixels of a row depend on each other. But rows
   can be computed at once, each a pixel behind the one above it: a row has above it what that row's
   result was, one step before. */

#if ROWS == 4
#define EACH(of) of(0), of(1), of(2), of(3)
#define SHIFTED 0, 4, 5, 6
#else
#define EACH(of) of(0), of(1)
#define SHIFTED 0, 2
#endif

#if defined(__clang__)
#define FIRST_AND_SHIFTED(first, rest) __builtin_shufflevector(first, rest, SHIFTED)
#else
#define FIRST_AND_SHIFTED(first, rest) __builtin_shuffle(first, rest, (Packed){SHIFTED})
#endif

/* A pixel of each row: up to four channels of 16 bits, as one number, and as bytes. */
typedef int16_t Pixels __attribute__((vector_size(8 * ROWS)));
typedef uint64_t Packed __attribute__((vector_size(8 * ROWS)));
typedef uint8_t PixelBytes __attribute__((vector_size(4 * ROWS)));
typedef uint32_t PixelWords __attribute__((vector_size(4 * ROWS)));

TARGET INLINE uint32_t pixel_at(const uint8_t *at) {
    uint32_t bytes;
    memcpy(&bytes, at, sizeof bytes);
    return bytes;
}

TARGET INLINE Pixels widened_pixels(PixelWords words) {
    return __builtin_convertvector((PixelBytes)words, Pixels);
}

TARGET INLINE Pixels chosen(Pixels mask, Pixels where_set, Pixels elsewhere) {
    return (mask & where_set) | (~mask & elsewhere);
}

TARGET INLINE Pixels rows_with(int filter, const FilteredRow rows[ROWS]) {
#define ALL_BITS(k) rows[k].filter == filter ? ~UINT64_C(0) : 0
    return (Pixels)(Packed){EACH(ALL_BITS)};
}

typedef struct {
    Pixels is_sub, is_up, is_average, is_paeth; /* by row */
    Pixels left, corner;
} Neighbours;

/* One step of all rows; `is_inside` if none of them is before its first pixel or behind its last. */
TARGET INLINE void unfilter_step(const FilteredRow rows[ROWS], const uint8_t *above, size_t step,
                                 size_t width, const size_t channels, const int is_inside,
                                 Neighbours *near) {
    size_t at[ROWS];
    for (size_t k = 0; k < ROWS; k++)
        at[k] = is_inside || (step >= k && step < width + k) ? (step - k) * channels : 0;
#define PIXEL(k) pixel_at(rows[k].bytes + at[k])
    const Pixels row = widened_pixels((PixelWords){EACH(PIXEL)});
    const Pixels first = widened_pixels((PixelWords){pixel_at(above + at[0])});
    const Pixels left = near->left, corner = near->corner;
    const Pixels up = (Pixels)FIRST_AND_SHIFTED((Packed)first, (Packed)left);
    const Pixels to_left = MAGNITUDE(up - corner), to_up = MAGNITUDE(left - corner);
    const Pixels to_corner = MAGNITUDE(up - corner + left - corner);
    const Pixels other = chosen(to_up > to_corner, corner, up);
    const Pixels paeth = chosen((to_left > to_up) | (to_left > to_corner), other, left);
    /* Paeth's prediction is the last to be known: it is added last. */
    const Pixels others =
        (near->is_average & ((left + up) >> 1)) | (near->is_sub & left) | (near->is_up & up);
    Packed result = (Packed)((row + others + (near->is_paeth & paeth)) & 0xFF);
    const PixelWords bytes = (PixelWords)__builtin_convertvector((Pixels)result, PixelBytes);
    for (size_t k = 0; k < ROWS; k++) {
        const uint32_t pixel = bytes[k];
        /* The bytes behind a pixel are those of pixels to come, but not behind the last one. */
        if (is_inside && at[k] + sizeof pixel <= width * channels)
            memcpy(rows[k].out + at[k], &pixel, sizeof pixel);
        else if (is_inside || (step >= k && step < width + k))
            memcpy(rows[k].out + at[k], &pixel, channels);
        if (!is_inside && step < k) result[k] = 0; /* at the left of its first pixel */
    }
    near->left = (Pixels)result;
    near->corner = up;
}

TARGET INLINE void unfilter_pixels(const FilteredRow rows[ROWS], const uint8_t *above, size_t width,
                                   const size_t channels) {
    Neighbours near = {rows_with(SUB, rows), rows_with(UP, rows), rows_with(AVERAGE, rows),
                       rows_with(PAETH, rows), {0}, {0}};
    size_t step = 0;
    for (; step < ROWS - 1; step++) unfilter_step(rows, above, step, width, channels, 0, &near);
    for (; step < width; step++) unfilter_step(rows, above, step, width, channels, 1, &near);
    for (; step < width + ROWS - 1; step++)
        unfilter_step(rows, above, step, width, channels, 0, &near);
}

TARGET static void unfilter_rows(const FilteredRow *rows, const uint8_t *above, size_t width,
                                 size_t channels) {
    switch (channels) {
    case 1: unfilter_pixels(rows, above, width, 1); break;
    case 3: unfilter_pixels(rows, above, width, 3); break;
    default: unfilter_pixels(rows, above, width, 4);
    }
}
