/* PNG's filters, undone. */

#ifndef AFFERENT_UNFILTER_H
#define AFFERENT_UNFILTER_H

#include <stddef.h>
#include <stdint.h>

#include "resample.h"

/* So many bytes behind the last row are read, and have no effect. */
#define BEHIND 3

/* Rows as in a file: each begins with the number of its filter. `channels` is 1, 3 or 4. */
typedef struct {
    const uint8_t *bytes;
    size_t height, width, channels;
} Filtered;

/* 0; 1 at an unknown filter; -1 without memory. Each variant writes the same bytes. */
int unfilter(const Variant *variant, const Filtered *image, uint8_t *out);

#endif
