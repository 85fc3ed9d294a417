/* Antialiased bilinear resizing of uint8 images, to the pixels of PyTorch: the width first, then the height, in one pass.
 *
 * A few rows at a time are resized across into a ring buffer, which stays in the cache, and rows of the target are made from it. */

#include <stdlib.h>
#include <string.h>

#include "array.h"
#include "cpu.h"
#include "export.h"
#include "resize.h"

#define CAPACITY 16       /* pairs in the ring: a power of two, from MOST_DOWN + STRIP on */
#define LANES 64          /* values to round rows up to */
#define OWN_BYTES (160 << 10) /* of memory that each thread keeps: enough for 224 pixels, and 341 with AVX-512 */

/* The weights of an output row for pairs of rows, which begin with even ones; returns the number of pairs. */
static int weights_down(const Axis *axis, int row, uint32_t weights[MOST_DOWN]) {
    int odd = axis->first[row] & 1, count = 0;
    uint32_t carried = 0;
    for (int pair = 0; pair < axis->pairs; pair++) {
        uint32_t both = axis->weights[pair][row];
        weights[pair] = odd ? both << 16 | carried : both;
        carried = odd ? both >> 16 : 0;
        count = weights[pair] ? pair + 1 : count;
    }
    weights[axis->pairs] = carried;
    return carried ? axis->pairs + 1 : count;
}

static uint32_t *pair_at(const Resize *job, int pair) {
    return job->ring + (size_t)(pair % CAPACITY) * job->lanes;
}

/* Resizes STRIP pairs of rows across; past the last row of the image, that row is repeated. Returns 0 if `next` gave none. */
static int strip(const Resize *job, const Kernel *kernel, int first) {
    int left = job->down->in - 2 * first, count = left < 2 * STRIP ? left : 2 * STRIP;
    const uint8_t *rows = job->next ? job->next(job->from, count) : job->source + 2 * first * job->stride;
    if (!rows) return 0;
    if (count == 2 * STRIP) {
        kernel->across(job, rows, job->stride, pair_at(job, first));
        return 1;
    }
    for (int i = 0; i < 2 * STRIP; i++)
        memcpy(job->end + (size_t)i * job->row, rows + (i < left ? i : left - 1) * job->stride, job->row);
    kernel->across(job, job->end, job->row, pair_at(job, first));
    return 1;
}

static int walk(const Resize *job, const Kernel *kernel) {
    const Axis *down = job->down;
    int made = 0;
    size_t bytes = (size_t)job->across->out * job->channels;
    kernel->prepare(job);
    for (int row = 0; row < down->out; row++) {
        uint32_t weights[MOST_DOWN];
        const uint32_t *pairs[MOST_DOWN];
        int first = down->first[row] / 2, count = weights_down(down, row, weights);
        for (; made < first + count; made += STRIP)
            if (!strip(job, kernel, made)) return 0;
        for (int pair = 0; pair < count; pair++)
            pairs[pair] = pair_at(job, first + pair);
        kernel->down(job, pairs, weights, count, job->target + row * bytes);
    }
    return 1;
}

#if defined(__x86_64__)

/* Whether rows are long enough, weights coarse enough, and every block's taps lie in as many bytes as an instruction
 * can choose from. */
static int fits(const Resize *job, const Kernel *kernel) {
    int channels = job->channels, span = (kernel->block + channels - 2) / channels; /* a block's pixels, less one */
    return job->row >= kernel->least && job->across->precision <= kernel->finest &&
           (job->across->reach[span] + 2) * channels <= kernel->window;
}

static const Kernel *kernel_for(const Resize *job, int level) {
    if ((level == 0 || level == 2) && cpu_has(CPU_AVX512) && fits(job, &resize_avx512))
        return &resize_avx512;
    if ((level == 0 || level == 1) && cpu_has(CPU_AVX2) && fits(job, &resize_avx2))
        return &resize_avx2;
    return NULL;
}

#else

static const Kernel *kernel_for(const Resize *job, int level) {
    (void)job, (void)level;
    return NULL;
}

#endif

int resize_open(Resize *job, int64_t height, int64_t width, int channels, int64_t out_height, int64_t out_width,
                int level) {
    *job = (Resize){.channels = channels, .row = (int)(width * channels)};
    if (height < 1 || width < 1 || out_height < 1 || out_width < 1) return 0;
    if (height > MOST_SIDE || width > MOST_SIDE || out_height > MOST_SIDE || out_width > MOST_SIDE) return 0;
    job->across = axis_get((int)width, (int)out_width);
    job->down = axis_get((int)height, (int)out_height);
    job->kernel = job->across && job->down ? kernel_for(job, level) : NULL;
    return job->kernel != NULL;
}

void resize_close(Resize *job) {
    axis_done(job->across);
    axis_done(job->down);
}

int resize_run(Resize *job) {
    static _Thread_local _Alignas(64) uint8_t own[OWN_BYTES];
    job->lanes = (job->across->out * job->channels + LANES - 1) / LANES * LANES;
    size_t ring = (size_t)job->lanes * CAPACITY * sizeof(uint32_t), blocks = job->lanes * job->kernel->bytes;
    size_t bytes = (ring + blocks + 2 * STRIP * (size_t)job->row + 63) / 64 * 64;
    uint8_t *memory = bytes <= OWN_BYTES ? own : aligned_alloc(64, bytes);
    if (!memory)
        return 0;
    job->ring = (uint32_t *)memory;
    job->blocks = memory + ring;
    job->end = memory + ring + blocks;
    int done = walk(job, job->kernel);
    if (memory != own)
        free(memory);
    return done;
}

/* Whether they share memory: rows are written while others are still read. */
static int overlap(const Resize *job) {
    uintptr_t source = (uintptr_t)job->source, target = (uintptr_t)job->target;
    size_t read = (size_t)(job->down->in - 1) * job->stride + job->row;
    size_t written = (size_t)job->down->out * job->across->out * job->channels;
    return source < target + written && target < source + read;
}

static int takes(const Array *source, const Array *target) {
    if (source->dims != 3 || target->dims != 3 || !(target->flags & ARRAY_WRITEABLE))
        return 0;
    ptrdiff_t channels = source->shape[2], row = target->shape[1] * channels;
    if ((channels != 1 && channels != 3) || target->shape[2] != channels)
        return 0;
    return source->strides[2] == 1 && source->strides[1] == channels &&
           source->strides[0] >= source->shape[1] * channels && target->strides[2] == 1 &&
           target->strides[1] == channels && target->strides[0] == row;
}

/* Resize (h, w, C) into (H, W, C), both uint8, the second contiguous; maybe flipped left to right.
 *
 * `level`: 0 the fastest instructions that this processor has, 1 AVX2, 2 AVX-512. Returns 1, or 0 where another
 * implementation has to do it: shrunk to less than a quarter, more channels than 3 or 2 of them, other strides, a
 * target that is read-only, instructions that aren't there. */
EXPORT int effloop_resize(const Array *source, const Array *target, int flip, int level) {
    if (!takes(source, target))
        return 0;
    Resize job;
    int done = resize_open(&job, source->shape[0], source->shape[1], (int)source->shape[2], target->shape[0],
                           target->shape[1], level);
    job.source = source->data, job.stride = source->strides[0], job.target = target->data, job.flip = flip != 0;
    done = done && !overlap(&job) && resize_run(&job);
    resize_close(&job);
    return done;
}
