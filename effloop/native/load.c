/* Samples from their bytes to their rows, in one call: cut, decoded, resized, flipped. */

#include <string.h>

#include "cpu.h"
#include "export.h"
#include "headers.h"
#include "jpeg_box.h"
#include "jpeg_markers.h"
#include "resize.h"

enum { SPARE = 1 << 16 }; /* bytes that a part may be larger than the whole: longer tables, dummies */

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
    int64_t least_saved;       /* bytes outside of the box from which on a JPEG is cut; -1: never */
    int64_t jpegs;             /* whether JPEGs are decoded */
} Target;

int64_t effloop_jpeg_crop(const uint8_t *, int64_t, const uint8_t *, int64_t, const int32_t *, int32_t, uint8_t *, int64_t,
                          int32_t *);

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

/* A smaller JPEG by the entropy index, and where its pixels are in the image; 0 if there is none. */
static int cut_indexed(Workspace *space, const Sample *sample, JpegRequest *part, Box *shown) {
    if (!sample->index) return 0;
    const Box *box = sample->box;
    const int32_t wanted[4] = {(int32_t)box->top, (int32_t)box->left, (int32_t)box->height, (int32_t)box->width};
    int32_t found[4];
    int64_t room = sample->size + SPARE;
    uint8_t *bytes = workspace_bytes(space, (size_t)room);
    if (!bytes) return 0;
    part->size = (size_t)effloop_jpeg_crop(sample->data, sample->size, sample->index, sample->index_size, wanted,
                                           2 * part->factor, bytes, room, found);
    if (!part->size) {
        part->size = (size_t)sample->size;
        return 0;
    }
    part->data = bytes, part->partial = 1;
    *shown = (Box){found[0], found[1], found[2], found[3]};
    return 1;
}

/* A smaller JPEG by its restart markers; or, without any, the same, to be decoded down to the box's lower edge. */
static void cut_by_markers(Workspace *space, const Sample *sample, const Layout *layout, JpegRequest *part, Box *shown) {
    const Box *box = sample->box;
    if (!layout->interval && part->factor == 1) {
        part->stop = box->top + box->height + BELOW < layout->height &&
                     jpeg_ends_after_scan(sample->data, sample->size, layout);
        return;
    }
    const int64_t wanted[4] = {box->top, box->left, box->height, box->width};
    int64_t found[5];
    uint8_t *bytes = workspace_bytes(space, (size_t)sample->size);
    if (!bytes) return;
    int64_t size = effloop_jpeg_cut(sample->data, sample->size, sample->header->at, wanted, 1, bytes, found);
    if (!size) return;
    part->data = bytes, part->size = (size_t)size, part->stop = (int)found[4];
    *shown = (Box){found[0], found[1], found[2], found[3]};
}

/* Where an end is in an image of 1 / factor of the size. */
static int64_t scaled(int64_t at, int factor) { return (at + factor / 2) / factor; }

/* The part of a box in an image of 1 / factor of the size. */
static Box scaled_box(const Box *box, int factor) {
    int64_t top = scaled(box->top, factor), left = scaled(box->left, factor);
    return (Box){top, left, scaled(box->top + box->height, factor) - top, scaled(box->left + box->width, factor) - left};
}

/* The box of one JPEG, scaled; refuses what `PlainDecoder` decodes whole. */
static int decode_jpeg(Workspace *space, const Sample *sample, const Target *target, int factor, Region *found) {
    const Row *header = sample->header;
    const Box *box = sample->box;
    Box shown = {0, 0, header->height, header->width};
    Layout layout = {0};
    JpegRequest part = {.data = sample->data, .size = (size_t)sample->size, .channels = (int)target->channels};
    if (!space) return 0;
    if (cpu_has(CPU_AVX2) && sample->index && factor == 1 && target->least_saved >= 0 && /* else libjpeg-turbo is faster */
        box_decode(workspace_boxes(space), part.data, part.size, sample->index, (size_t)sample->index_size, box, part.channels,
                   found))
        return 1;
    part.factor = factor, part.partial = effloop_jpeg_layout(sample->data, sample->size, header->at, &layout);
    double outside = 1 - (double)(box->height * box->width) / ((double)header->height * header->width);
    if (target->least_saved >= 0 && (double)sample->size * outside > (double)target->least_saved &&
        !cut_indexed(space, sample, &part, &shown) && part.partial)
        cut_by_markers(space, sample, &layout, &part, &shown);
    /* simplejpeg scales by 3/8 or less where that makes the same size */
    if (factor > 1 && shown.height < 8 && shown.width < 8) return 0;
    part.height = shown.height, part.width = shown.width;
    Box inside = {box->top - shown.top, box->left - shown.left, box->height, box->width};
    part.box = scaled_box(&inside, factor);
    return jpeg_decode(space, &part, found);
}

static int raw_pixels(const Sample *sample, const Target *target, Region *found) {
    const Row *header = sample->header;
    int64_t row = (int64_t)header->width * header->channels;
    if (header->channels != target->channels || header->at + row * header->height != sample->size) return 0;
    const uint8_t *first = sample->data + header->at + sample->box->top * row;
    *found = (Region){first + sample->box->left * header->channels, row};
    return 1;
}

static int pixels_of(Workspace *space, const Sample *sample, const Target *target, int factor, Region *found) {
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

static void copy(const Region *found, const Target *target, int flip, uint8_t *to) {
    int64_t bytes = target->width * target->channels;
    for (int64_t row = 0; row < target->height; row++)
        copy_row(found->pixels + row * found->stride, to + row * bytes, target->width, (int)target->channels, flip);
}

static int load(Workspace *space, const Sample *sample, const Target *target, int flip, uint8_t *to) {
    Region found;
    if (!is_inside(sample->box, sample->header)) return 0;
    if (sample->box->height == target->height && sample->box->width == target->width) {
        int done = pixels_of(space, sample, target, 1, &found);
        if (done) copy(&found, target, flip, to);
        return done;
    }
    int factor = scale_factor(sample, target);
    Box box = scaled_box(sample->box, factor);
    Resize job; /* first, as what can't be resized here needn't be decoded here */
    int done = resize_open(&job, box.height, box.width, (int)target->channels, target->height, target->width, 0) &&
               pixels_of(space, sample, target, factor, &found);
    if (done) {
        job.source = found.pixels, job.stride = found.stride, job.target = to, job.flip = flip;
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
    Region found;
    Workspace *space = workspace_take();
    Sample sample = sample_of(samples, 0);
    Box box = scaled_box(sample.box, factor);
    int done = is_inside(sample.box, sample.header) && box.height == target->height && box.width == target->width &&
               pixels_of(space, &sample, target, factor, &found);
    if (done) copy(&found, target, 0, target->target);
    workspace_give_back(space);
    return done;
}
