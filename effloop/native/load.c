/* Samples from their bytes to their rows, in one call: decoded, resized, flipped. */

#include <string.h>

#include "cpu.h"
#include "export.h"
#include "headers.h"
#include "jpeg.h"
#include "jpeg_box.h"
#include "resize.h"

enum { BELOW = 2 }; /* rows below a box: chroma of half the resolution is interpolated from the sample below */

/* N samples; as `load_run` in data/decode/common.py hands them over, field by field. */
typedef struct {
    int64_t count;
    const uint8_t *const *data;    /* encoded images */
    const int64_t *sizes;          /* their bytes */
    const Row *headers;
    const uint8_t *const *indexes; /* entropy indexes; NULL: none */
    const int64_t *index_sizes;    /* 0: none */
    const Box *boxes;              /* inside the images */
    const uint8_t *flips;
} Samples;

/* One of them. */
typedef struct {
    const uint8_t *data, *index; /* no index is NULL */
    int64_t size, index_size;
    const Row *header;
    const Box *box;
} Sample;

/* What becomes of them; as `load_run` hands it over, field by field. */
typedef struct {
    uint8_t *target;           /* (N, height, width, channels), each image contiguous */
    int64_t stride;            /* bytes between images */
    int64_t height, width, channels;
    int64_t least_height, least_width; /* down to which a JPEG may be scaled; 0: not at all */
    int64_t parts;             /* whether only what a box needs of a JPEG may be decoded */
    int64_t jpegs;             /* whether JPEGs are decoded */
} Target;

/* Where pixels come from. */
typedef struct {
    Region region;
    BoxDecoder *rows; /* one after the other, if this isn't NULL */
} Pixels;

static Sample sample_of(const Samples *samples, int64_t i) {
    Sample sample = {.data = samples->data[i], .size = samples->sizes[i]};
    sample.header = &samples->headers[i], sample.box = &samples->boxes[i];
    if (samples->indexes && samples->index_sizes[i])
        sample.index = samples->indexes[i], sample.index_size = samples->index_sizes[i];
    return sample;
}

static int scale_factor(const Sample *sample, const Target *target) {
    if (target->least_height < 1 || target->least_width < 1 || sample->header->kind != JPEG) return 1;
    int64_t down = sample->box->height / target->least_height, across = sample->box->width / target->least_width;
    int64_t most = down < across ? down : across;
    return most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

/* Where an end is in an image of 1 / factor of the size. */
static int64_t scaled(int64_t at, int factor) { return (at + factor / 2) / factor; }

/* The part of a box in an image of 1 / factor of the size. */
static Box scaled_box(const Box *box, int factor) {
    int64_t top = scaled(box->top, factor), left = scaled(box->left, factor);
    return (Box){top, left, scaled(box->top + box->height, factor) - top, scaled(box->left + box->width, factor) - left};
}

/* The box of one JPEG, scaled; refuses what `PlainDecoder` decodes whole. */
static int decode_jpeg(Workspace *space, const Sample *sample, const Target *target, int factor, Pixels *found) {
    const Row *header = sample->header;
    const Box box = scaled_box(sample->box, factor);
    const size_t size = (size_t)sample->size;
    const int channels = (int)target->channels;
    if (!space) return 0;
    /* simplejpeg scales by 3/8 or less where that makes the same size */
    if (factor > 1 && header->height < 8 && header->width < 8) return 0;
    found->rows = workspace_boxes(space);
    int few = 2 * sample->box->height * sample->box->width < (int64_t)header->height * header->width;
    if (target->parts && (few || cpu_has(CPU_AVX2)) && /* plain C is slower than libjpeg-turbo's vectors, if it isn't far less */
        box_open(found->rows, sample->data, size, sample->index, (size_t)sample->index_size, &box, factor, channels))
        return 1;
    JpegRequest wanted = {sample->data, size, header->height, header->width, channels, factor, box, 0, 0};
    Jpeg jpeg;
    wanted.partial = jpeg_read(sample->data, size, &jpeg), found->rows = NULL;
    wanted.stop = wanted.partial && target->parts && sample->box->top + sample->box->height + BELOW < header->height &&
                  jpeg_ends_after_scan(sample->data, &jpeg);
    return jpeg_decode(space, &wanted, &found->region);
}

static int raw_pixels(const Sample *sample, const Target *target, Pixels *found) {
    const Row *header = sample->header;
    int64_t row = (int64_t)header->width * header->channels;
    if (header->channels != target->channels || header->at + row * header->height != sample->size) return 0;
    const uint8_t *first = sample->data + header->at + sample->box->top * row;
    found->region = (Region){first + sample->box->left * header->channels, row};
    return 1;
}

static int pixels_of(Workspace *space, const Sample *sample, const Target *target, int factor, Pixels *found) {
    found->rows = NULL;
    if (!sample->header->plain || !sample->header->complete) return 0;
    switch (sample->header->kind) {
    case JPEG: return target->jpegs && decode_jpeg(space, sample, target, factor, found);
    case PNM: return raw_pixels(sample, target, found);
    default: return 0;
    }
}

static int is_inside(const Box *box, const Row *header) {
    return box->top >= 0 && box->left >= 0 && box->height > 0 && box->width > 0 &&
           box->top + box->height <= header->height && box->left + box->width <= header->width;
}

static void copy_row(const uint8_t *from, uint8_t *to, int64_t width, int channels, int flip) {
    if (!flip) {
        memcpy(to, from, (size_t)(width * channels));
        return;
    }
    for (int64_t i = 0; i < width; i++)
        for (int channel = 0; channel < channels; channel++)
            to[(width - 1 - i) * channels + channel] = from[i * channels + channel];
}

static const uint8_t *next_rows(void *decoder, int count) { return box_rows(decoder, count); }

static int copy(const Pixels *found, const Target *target, int flip, uint8_t *to) {
    int64_t bytes = target->width * target->channels;
    for (int64_t row = 0; row < target->height; row++) {
        const uint8_t *from = found->rows ? box_rows(found->rows, 1) : found->region.pixels + row * found->region.stride;
        if (!from) return 0;
        copy_row(from, to + row * bytes, target->width, (int)target->channels, flip);
    }
    return 1;
}

static int load(Workspace *space, const Sample *sample, const Target *target, int flip, uint8_t *to) {
    Pixels found;
    if (!is_inside(sample->box, sample->header)) return 0;
    if (sample->box->height == target->height && sample->box->width == target->width)
        return pixels_of(space, sample, target, 1, &found) && copy(&found, target, flip, to);
    int factor = scale_factor(sample, target);
    Box box = scaled_box(sample->box, factor);
    Resize job; /* first, as what can't be resized here needn't be decoded here */
    int done = resize_open(&job, box.height, box.width, (int)target->channels, target->height, target->width, 0) &&
               pixels_of(space, sample, target, factor, &found);
    if (done) {
        job.source = found.region.pixels, job.stride = found.region.stride, job.target = to, job.flip = flip;
        if (found.rows) job.next = next_rows, job.from = found.rows, job.stride = box.width * target->channels;
        done = resize_run(&job);
    }
    resize_close(&job);
    return done;
}

/* Loads samples into rows of a batch: decodes their boxes, resizes and flips them. `current`, unless it is NULL, gets
 * `ids[i]` before sample i. done[i] is 1, or 0 where it has to be done otherwise: its row may be written in part then. */
EXPORT void effloop_load(const Samples *samples, const Target *target, const int64_t *ids, volatile int64_t *current,
                         uint8_t *done) {
    Workspace *space = target->jpegs ? workspace_take() : NULL;
    for (int64_t i = 0; i < samples->count; i++) {
        Sample sample = sample_of(samples, i);
        if (current) *current = ids[i];
        done[i] = (uint8_t)load(space, &sample, target, samples->flips[i] != 0, target->target + i * target->stride);
    }
    workspace_give_back(space);
}

/* Decodes the box of the first sample at 1 / factor of its size, which is that of the target; 0 as effloop_load. */
EXPORT int effloop_decode(const Samples *samples, const Target *target, int factor) {
    Pixels found;
    Workspace *space = workspace_take();
    Sample sample = sample_of(samples, 0);
    Box box = scaled_box(sample.box, factor);
    int done = is_inside(sample.box, sample.header) && box.height == target->height && box.width == target->width &&
               pixels_of(space, &sample, target, factor, &found) && copy(&found, target, 0, target->target);
    workspace_give_back(space);
    return done;
}
