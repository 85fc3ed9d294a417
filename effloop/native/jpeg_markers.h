/* Structure of baseline JPEGs in one scan, and cutting them at their restart markers. */

#ifndef EFFLOOP_JPEG_MARKERS_H
#define EFFLOOP_JPEG_MARKERS_H

#include <stdint.h>

enum { BELOW = 2 }; /* rows below a box: chroma of half the resolution is interpolated from the sample below */

/* As `Layout` in jpeg.py, field by field. */
typedef struct {
    int64_t height, width, mcu_height, mcu_width, size_at, sos_at, scan_at, interval, lengths_at, lengths;
} Layout;

int effloop_jpeg_layout(const uint8_t *bytes, int64_t size, int64_t sof_at, Layout *found);
int64_t effloop_jpeg_cut(const uint8_t *bytes, int64_t size, int64_t sof_at, const int64_t box[4], int bottom, uint8_t *out,
                         int64_t shown[5]);

/* Whether the entropy-coded data has no marker but the EOI that ends the file; FF FF is a fill byte. */
int jpeg_ends_after_scan(const uint8_t *bytes, int64_t size, const Layout *layout);

#endif
