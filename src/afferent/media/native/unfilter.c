#include "unfilter.h"

#include "variant.h"

enum { SPARE_ROWS = 4 };

static void add(const uint8_t *restrict row, const uint8_t *restrict above, uint8_t *restrict out,
                size_t size) {
    for (size_t i = 0; i < size; i++) out[i] = (uint8_t)(row[i] + above[i]);
}

int unfilter(const Variant *variant, const Filtered *image, uint8_t *out) {
    const size_t size = image->width * image->channels, step = size + BEHIND;
    /* What is above the first row; a copy of what is above others, with bytes behind it; and what
       is read and written in place of rows behind the last one. */
    uint8_t *zero = calloc(SPARE_ROWS, step);
    if (!zero) return -1;
    uint8_t *copy = zero + step, *unread = copy + step, *unwritten = unread + step;
    if (!variant->unfilter) variant = variant->otherwise;
    size_t done = 0;
    while (done < image->height) {
        FilteredRow rows[MOST_ROWS_AT_ONCE];
        const uint8_t *row = image->bytes + done * (size + 1);
        const uint8_t *above = done ? out + (done - 1) * size : zero;
        size_t num_rows = 0;
        for (; num_rows < variant->rows_at_once; num_rows++)
            rows[num_rows] = done + num_rows < image->height
                                 ? (FilteredRow){row[num_rows * (size + 1)],
                                                 row + num_rows * (size + 1) + 1,
                                                 out + (done + num_rows) * size}
                                 : (FilteredRow){NO_FILTER, unread, unwritten};
        for (size_t i = 0; i < num_rows; i++)
            if (rows[i].filter > PAETH) {
                free(zero);
                return 1;
            }
        if (rows[0].filter == NO_FILTER || rows[0].filter == UP) {
            /* The pixels of these rows do not depend on each other. */
            add(rows[0].bytes, rows[0].filter == UP ? above : zero, rows[0].out, size);
            done++;
            continue;
        }
        memcpy(copy, above, size);
        variant->unfilter(rows, copy, image->width, image->channels);
        done += num_rows;
    }
    free(zero);
    return 0;
}
