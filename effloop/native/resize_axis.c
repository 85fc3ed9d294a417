/* The weights of an antialiased bilinear filter, in PyTorch's fixed point, kept for sizes that come again. */

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "resize.h"

#ifdef __clang__ /* gcc -std=c11 doesn't contract */
#pragma STDC FP_CONTRACT OFF
#endif

#define SLOTS 4096
#define PROBES 8
#define MOST_CACHED (8 << 20) /* bytes; 500 sizes of crops to 224 pixels take 1.3 MB */
#define MOST_TAPS (2 * MOST_PAIRS)

static _Atomic(const Axis *) slots[SLOTS];
static atomic_int cached_bytes;

/* Double-precision weights of output i, as `_compute_indices_min_size_weights_aa` has them; returns their number. */
static int weigh(int in, int out, int i, int *first, double weights[MOST_TAPS + 2]) {
    double scale = (double)in / out, support = scale >= 1 ? scale : 1, inverse = scale >= 1 ? 1 / scale : 1;
    double center = scale * (i + 0.5), total = 0;
    int begin = (int)(center - support + 0.5), end = (int)(center + support + 0.5);
    begin = begin < 0 ? 0 : begin;
    end = end > in ? in : end;
    int count = end - begin;
    if (count < 1 || count > MOST_TAPS + 2)
        return -1;
    for (int tap = 0; tap < count; tap++) {
        double distance = fabs((tap + (begin - center) + 0.5) * inverse);
        weights[tap] = distance < 1 ? 1 - distance : 0;
        total += weights[tap];
    }
    for (int tap = 0; tap < count && total != 0; tap++)
        weights[tap] /= total;
    *first = begin;
    return count;
}

static int precision_for(double largest) {
    for (int precision = 0; precision < 22; precision++)
        if ((int)(0.5 + largest * (1 << (precision + 1))) >= 1 << 15)
            return precision;
    return 22;
}

/* Rounds weights and leaves out zeros in front and behind; false: more than MOST_TAPS, or a sum above 255 levels. */
static int fix(const double *weights, int count, int precision, int *first, int fixed[MOST_TAPS], int *taps) {
    int rounded[MOST_TAPS + 2], begin = 0;
    int64_t sum = 0;
    for (int tap = 0; tap < count; tap++)
        sum += rounded[tap] = (int)(0.5 + weights[tap] * (1 << precision));
    while (begin < count - 1 && rounded[begin] == 0)
        begin++;
    while (count > begin + 1 && rounded[count - 1] == 0)
        count--;
    *first += begin;
    *taps = count - begin;
    if (*taps > MOST_TAPS || (sum * 255 + (((int64_t)1 << precision) >> 1)) >> precision > 255)
        return 0;
    memcpy(fixed, rounded + begin, *taps * sizeof *fixed);
    return 1;
}

static Axis *axis_allocate(int in, int out, int pairs) {
    size_t column = out + 2 * PADDING, bytes = sizeof(Axis) + (1 + pairs) * column * sizeof(uint32_t);
    Axis *axis = calloc(1, bytes);
    if (!axis)
        return NULL;
    uint32_t *memory = (uint32_t *)(axis + 1) + PADDING;
    *axis = (Axis){.in = in, .out = out, .pairs = pairs, .bytes = (int)bytes, .first = (int32_t *)memory};
    for (int pair = 0; pair < pairs; pair++)
        axis->weights[pair] = memory + (1 + pair) * column;
    return axis;
}

static Axis *axis_make(int in, int out) {
    double weights[MOST_TAPS + 2], largest = 0;
    int first, most = 1, fixed[MOST_TAPS], taps;
    for (int i = 0; i < out; i++) {
        int count = weigh(in, out, i, &first, weights);
        if (count < 0)
            return NULL;
        for (int tap = 0; tap < count; tap++)
            largest = weights[tap] > largest ? weights[tap] : largest;
    }
    int precision = precision_for(largest);
    for (int i = 0; i < out; i++) {
        if (!fix(weights, weigh(in, out, i, &first, weights), precision, &first, fixed, &taps))
            return NULL;
        most = taps > most ? taps : most;
    }
    Axis *axis = axis_allocate(in, out, (most + 1) / 2);
    if (!axis)
        return NULL;
    axis->precision = precision;
    for (int i = 0; i < out; i++) {
        fix(weights, weigh(in, out, i, &first, weights), precision, &first, fixed, &taps);
        ((int32_t *)axis->first)[i] = first;
        for (int tap = 0; tap < taps; tap++)
            ((uint32_t *)axis->weights[tap / 2])[i] |= (uint32_t)fixed[tap] << 16 * (tap % 2);
    }
    for (int i = 0; i < PADDING; i++) {
        ((int32_t *)axis->first)[-1 - i] = axis->first[0];
        ((int32_t *)axis->first)[out + i] = axis->first[out - 1];
    }
    for (int k = 0; k < PADDING; k++)
        for (int i = 0; i < out; i++)
            if (axis->first[i + k] - axis->first[i] > axis->reach[k])
                axis->reach[k] = axis->first[i + k] - axis->first[i];
    return axis;
}

/* Never freed once it is cached, so that it can be read without a lock; processes that fork share it. */
const Axis *axis_get(int in, int out) {
    unsigned slot = (unsigned)in * 2654435761u ^ (unsigned)out * 40503u;
    _Atomic(const Axis *) *free_slot = NULL;
    for (int probe = 0; probe < PROBES; probe++) {
        _Atomic(const Axis *) *place = &slots[((slot >> 12) + probe) % SLOTS];
        const Axis *found = atomic_load_explicit(place, memory_order_acquire);
        if (found && found->in == in && found->out == out)
            return found;
        if (!found) {
            free_slot = place;
            break;
        }
    }
    Axis *made = axis_make(in, out);
    const Axis *none = NULL;
    if (!made || !free_slot || atomic_load(&cached_bytes) + made->bytes > MOST_CACHED)
        return made;
    made->cached = 1;
    if (atomic_compare_exchange_strong(free_slot, &none, made))
        atomic_fetch_add(&cached_bytes, made->bytes);
    else
        made->cached = 0;
    return made;
}

void axis_done(const Axis *axis) {
    if (axis && !axis->cached)
        free((void *)axis);
}
