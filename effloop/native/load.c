/* Loads samples into the rows of a batch, many in one call: decodes, resizes and flips them. */

#include <string.h>

#include "cpu.h"
#include "export.h"
#include "headers.h"
#include "jpeg.h"
#include "jpeg_box.h"
#include "resize.h"

/* N samples; `_samples` in data/decode/common.py has the same fields. */
typedef struct {
    int64_t count;
    const uint8_t *const *data;    /* encoded images */
    const int64_t *sizes;          /* in bytes */
    const Row *headers;
    const uint8_t *const *indexes; /* entropy indexes; NULL: there are none */
    const int64_t *index_sizes;    /* 0: this sample has none */
    const Box *boxes;              /* inside the images */
    const uint8_t *flips;
} Samples;

/* One of them. */
typedef struct {
    const uint8_t *data, *index; /* `index` may be NULL */
    int64_t size, index_size;
    const Row *header;
    const Box *box;
} Sample;

/* What becomes of them; `_target` in data/decode/common.py has the same fields. */
typedef struct {
    uint8_t *target;           /* (N, height, width, channels), each image contiguous */
    int64_t stride;            /* bytes between images */
    int64_t height, width, channels;
    int64_t least_height, least_width; /* to which a JPEG may be scaled down while it is decoded; 0: not at all */
    int64_t region;            /* whether to decode only what a box needs of a JPEG */
    int64_t jpegs;             /* whether to decode JPEGs */
} Target;

/* The pixels of a box: those of `region`, or row by row from a decoder. */
typedef struct {
    Region region;
    BoxDecoder *rows; /* NULL: they are in `region` */
} Pixels;

/* A sample that is being loaded. */
typedef struct {
    Pixels pixels;
    Resize resize; /* used if its box isn't as large as the target */
    int64_t number;
    int resized, flip;
    uint8_t *to;
} Job;

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

/* Where an edge is in an image of 1 / factor of the size. */
static int64_t scaled(int64_t at, int factor) { return (at + factor / 2) / factor; }

/* The same box in an image of 1 / factor of the size. */
static Box scaled_box(const Box *box, int factor) {
    int64_t top = scaled(box->top, factor), left = scaled(box->left, factor);
    return (Box){top, left, scaled(box->top + box->height, factor) - top, scaled(box->left + box->width, factor) - left};
}

/* Decodes the box of a JPEG. Returns 0 for JPEGs that `PlainDecoder` has to decode otherwise. */
static int decode_jpeg(Workspace *space, int place, const Sample *sample, const Target *target, int factor, Pixels *found) {
    const Row *header = sample->header;
    const Box box = scaled_box(sample->box, factor);
    const size_t size = (size_t)sample->size;
    const int channels = (int)target->channels;
    if (!space) return 0;
    if (factor > 1 && header->height < 8 && header->width < 8) return 0; /* too small to be scaled */
    found->rows = workspace_boxes(space, place);
    int few = 2 * sample->box->height * sample->box->width < (int64_t)header->height * header->width;
    if (found->rows && target->region && (few || cpu_has(CPU_AVX2)) && /* without AVX2, only small boxes are faster than whole */
        box_open(found->rows, sample->data, size, sample->index, (size_t)sample->index_size, &box, factor, channels))
        return 1;
    Jpeg jpeg;
    int partial = jpeg_read(sample->data, size, &jpeg);
    JpegRequest wanted = {sample->data, size, header->height, header->width, channels, factor, box, partial};
    found->rows = NULL;
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

static int pixels_of(Workspace *space, int place, const Sample *sample, const Target *target, int factor, Pixels *found) {
    found->rows = NULL;
    if (!sample->header->plain || !sample->header->complete) return 0;
    switch (sample->header->kind) {
    case JPEG: return target->jpegs && decode_jpeg(space, place, sample, target, factor, found);
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

/* Begins to load a sample. Returns 0 if it has to be loaded in another way. */
static int begin(Workspace *space, int place, const Sample *sample, const Target *target, Job *job) {
    if (!is_inside(sample->box, sample->header)) return 0;
    job->resized = sample->box->height != target->height || sample->box->width != target->width;
    if (!job->resized) return pixels_of(space, place, sample, target, 1, &job->pixels);
    int factor = scale_factor(sample, target), channels = (int)target->channels;
    Box box = scaled_box(sample->box, factor);
    Resize *resize = &job->resize; /* first, as what can't be resized here needn't be decoded here */
    if (resize_open(resize, box.height, box.width, channels, target->height, target->width, 0) &&
        pixels_of(space, place, sample, target, factor, &job->pixels)) {
        resize->source = job->pixels.region.pixels, resize->stride = job->pixels.region.stride;
        resize->target = job->to, resize->flip = job->flip;
        if (job->pixels.rows) resize->next = next_rows, resize->from = job->pixels.rows, resize->stride = box.width * channels;
        return 1;
    }
    resize_close(resize);
    return 0;
}

static int finish(Job *job, const Target *target) {
    if (!job->resized) return copy(&job->pixels, target, job->flip, job->to);
    int done = resize_run(&job->resize);
    resize_close(&job->resize);
    return done;
}

/* Loads samples into rows of a batch. `current`, unless it is NULL, is set to `ids[i]` before sample i. done[i] becomes 1, or 0
 * if the sample has to be loaded in another way; its row may have been written in part then. */
EXPORT void effloop_load(const Samples *samples, const Target *target, const int64_t *ids, volatile int64_t *current,
                         uint8_t *done) {
    Workspace *space = target->jpegs ? workspace_take() : NULL;
    BoxDecoder *waiting[BOXES];
    Job jobs[BOXES];
    int count = 0;
    for (int64_t i = 0; i < samples->count || count; i++) {
        Job *job = &jobs[count];
        if (i < samples->count) {
            Sample sample = sample_of(samples, i);
            if (current) *current = ids[i];
            *job = (Job){.number = i, .flip = samples->flips[i] != 0, .to = target->target + i * target->stride};
            done[i] = (uint8_t)begin(space, count, &sample, target, job);
            if (!done[i]) continue;
            if (!job->pixels.rows || !box_waits(job->pixels.rows)) {
                done[i] = (uint8_t)finish(job, target);
                continue;
            }
            waiting[count++] = job->pixels.rows;
        }
        if (count < BOXES && i + 1 < samples->count) continue;
        box_decode(waiting, count);
        for (int j = 0; j < count; j++) done[jobs[j].number] = (uint8_t)finish(&jobs[j], target);
        count = 0;
    }
    workspace_give_back(space);
}

/* Decodes the box of the first sample at 1 / factor of its size, which the target has. Returns 1, or 0 as done[i] above. */
EXPORT int effloop_decode(const Samples *samples, const Target *target, int factor) {
    Pixels found = {.rows = NULL};
    Workspace *space = workspace_take();
    Sample sample = sample_of(samples, 0);
    Box box = scaled_box(sample.box, factor);
    Target whole = *target;
    int fits = is_inside(sample.box, sample.header) && box.height == target->height && box.width == target->width;
    int done = fits && pixels_of(space, 0, &sample, target, factor, &found) && copy(&found, target, 0, target->target);
    whole.region = 0; /* by libjpeg-turbo, which doesn't mind some kinds of damage */
    if (!done && found.rows)
        done = pixels_of(space, 0, &sample, &whole, factor, &found) && copy(&found, target, 0, target->target);
    workspace_give_back(space);
    return done;
}
