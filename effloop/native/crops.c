/* RandomResizedCrop's boxes, in two steps: NumPy takes the exponential between them, whose last bit depends on the
 * library. tests/unit/data/augment/native/test_augment.py has the same in NumPy. */

#include <math.h>
#include <stdint.h>

#include "export.h"
#include "random.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF /* each product is rounded, as NumPy's; GCC's default with -std=c11 */
#endif

enum { ATTEMPTS = 10, AREA = 1, ASPECT = AREA + ATTEMPTS, TOP = ASPECT + ATTEMPTS, LEFT }; /* numbers of a key */

/* areas, aspects: (count, ATTEMPTS), the areas in pixels and the logarithms of the aspect ratios.
 * sizes: (count, 2) height and width. range: smallest share of the area, its range; the same of the logarithm. */
EXPORT void effloop_crop_attempts(const uint64_t *keys, const int64_t *sizes, int64_t count, const double range[4],
                                  double *areas, double *aspects) {
    for (int64_t i = 0; i < count; i++)
        for (int n = 0; n < ATTEMPTS; n++) {
            double pixels = (double)(sizes[2 * i] * sizes[2 * i + 1]);
            *areas++ = pixels * (range[0] + range[1] * uniform(keys[i], AREA + n));
            *aspects++ = range[2] + range[3] * uniform(keys[i], ASPECT + n);
        }
}

static int64_t at_most(int64_t side, double wanted) { /* half to even, at least 1 */
    double rounded = rint(wanted);
    return rounded < 1 ? 1 : rounded < (double)side ? (int64_t)rounded : side;
}

/* boxes: (count, 4) top, left, height, width of the first attempt that fits, or the largest centred box of an allowed
 * ratio. aspects: as above, the ratios themselves. ratio: the smallest and the largest. */
EXPORT void effloop_crop_boxes(const uint64_t *keys, const int64_t *sizes, int64_t count, const double ratio[2],
                               const double *areas, const double *aspects, int64_t *boxes) {
    for (int64_t i = 0; i < count; i++, boxes += 4) {
        int64_t height = sizes[2 * i], width = sizes[2 * i + 1], found = 0;
        for (int64_t n = i * ATTEMPTS; n < (i + 1) * ATTEMPTS && !found; n++) {
            double w = rint(sqrt(areas[n] * aspects[n])), h = rint(sqrt(areas[n] / aspects[n]));
            found = w > 0 && w <= (double)width && h > 0 && h <= (double)height;
            boxes[2] = found ? (int64_t)h : at_most(height, (double)width / ratio[0]);
            boxes[3] = found ? (int64_t)w : at_most(width, (double)height * ratio[1]);
        }
        int64_t below = height - boxes[2], beside = width - boxes[3];
        boxes[0] = found ? (int64_t)(uniform(keys[i], TOP) * (double)(below + 1)) : below / 2;
        boxes[1] = found ? (int64_t)(uniform(keys[i], LEFT) * (double)(beside + 1)) : beside / 2;
    }
}
