/* Decodes JPEGs with the libjpeg-turbo that comes with Pillow; data/decode/turbojpeg.py finds it.
 *
 * Every image gets a new decompressor, as one that is used again keeps the tables of the image before. */

#include <setjmp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "export.h"
#include "jpeg_box.h"
#include "jpeg_decode.h"
#include "libjpeg.h"
#include "scratch.h"

enum { SPACES = 64, ROWS = 16, MARGIN = 8, MOST_KEPT = 32 << 20 };

struct Workspace {
    Decompress jpeg;
    Errors errors;
    jmp_buf escape;
    Memory pixels;
    BoxDecoder *boxes[BOXES];
};

static Library library;
static atomic_int has_library;
static _Atomic(Workspace *) spaces[SPACES]; /* not in use; without a lock, which a fork could leave closed */

static void leave(Decompress *jpeg) {
    longjmp(((Workspace *)(void *)jpeg)->escape, 1);
}

static void leave_at_warning(Decompress *jpeg, int level) {
    if (level < 0) leave(jpeg);
}

static void print_nothing(Decompress *jpeg) { (void)jpeg; }

static int create(Workspace *space) {
    Errors *errors = library.std_error(&space->errors);
    errors->error_exit = leave;
    errors->emit_message = leave_at_warning;
    errors->output_message = print_nothing;
    space->jpeg.errors = errors;
    if (setjmp(space->escape)) return 0;
    library.create(&space->jpeg, LIBJPEG_VERSION, sizeof space->jpeg);
    return 1;
}

Workspace *workspace_take(void) {
    if (!atomic_load_explicit(&has_library, memory_order_acquire)) return NULL;
    for (int i = 0; i < SPACES; i++) {
        Workspace *found = atomic_exchange(&spaces[i], NULL);
        if (found) return found;
    }
    return calloc(1, sizeof(Workspace));
}

void workspace_give_back(Workspace *space) {
    if (!space) return;
    shrink(&space->pixels, MOST_KEPT);
    for (int i = 0; i < BOXES; i++)
        if (space->boxes[i]) box_decoder_shrink(space->boxes[i], MOST_KEPT);
    for (int i = 0; i < SPACES; i++) {
        Workspace *none = NULL;
        if (atomic_compare_exchange_strong(&spaces[i], &none, space)) return;
    }
    for (int i = 0; i < BOXES; i++) box_decoder_free(space->boxes[i]);
    free(space->pixels.bytes), free(space);
}

BoxDecoder *workspace_boxes(Workspace *space, int number) {
    if (!space->boxes[number]) space->boxes[number] = box_decoder_make();
    return space->boxes[number];
}

/* Sets the decoder up as simplejpeg does: the accurate DCT and interpolated chroma are libjpeg's defaults. */
static int open_jpeg(Decompress *jpeg, const JpegRequest *wanted) {
    library.memory_source(jpeg, wanted->data, wanted->size);
    if (library.read_header(jpeg, 1) != 1) return 0;
    if (jpeg->height != wanted->height || jpeg->width != wanted->width) return 0;
    if (jpeg->components == 1 ? jpeg->space != SPACE_GREY : jpeg->components != 3 || jpeg->space != SPACE_YCBCR)
        return 0;
    jpeg->out_space = wanted->channels == 1 ? SPACE_GREY : SPACE_RGB;
    jpeg->scale_numerator = 1, jpeg->scale_denominator = wanted->factor;
    return library.start(jpeg) && jpeg->out_components == wanted->channels;
}

/* Leaves out columns that the box doesn't need, except for a margin that chroma is interpolated from; returns where the
 * first column of what remains is. */
static int64_t crop_columns(Decompress *jpeg, const Box *box) {
    int64_t first = box->left > MARGIN ? box->left - MARGIN : 0, last = box->left + box->width + MARGIN;
    last = last < jpeg->out_width ? last : jpeg->out_width;
    unsigned left = (unsigned)first, width = (unsigned)(last - first);
    library.crop(jpeg, &left, &width);
    return left;
}

/* Decodes what is left, for its damage. The last row is read, as skipping all would skip the data, too. */
static void finish(Decompress *jpeg, uint8_t *row) {
    if (jpeg->row + 1 < jpeg->out_height) library.skip(jpeg, jpeg->out_height - 1 - jpeg->row);
    if (jpeg->row < jpeg->out_height) library.read(jpeg, &row, 1);
    library.finish(jpeg);
}

static int decode(Workspace *space, const JpegRequest *wanted, Region *found) {
    Decompress *jpeg = &space->jpeg;
    const Box *box = &wanted->box;
    if (!open_jpeg(jpeg, wanted)) return 0;
    if (box->top + box->height > jpeg->out_height || box->left + box->width > jpeg->out_width) return 0;
    int64_t left = wanted->partial ? crop_columns(jpeg, box) : 0;
    size_t stride = (size_t)jpeg->out_width * wanted->channels;
    uint8_t *pixels = reserve(&space->pixels, stride * (size_t)(box->height + 1)), *rows[ROWS];
    if (!pixels) return 0;
    if (wanted->partial && box->top) library.skip(jpeg, (unsigned)box->top);
    int64_t end = wanted->partial ? box->top + box->height : jpeg->out_height;
    while (jpeg->row < end) {
        int64_t row = (int64_t)jpeg->row - box->top, count = end - jpeg->row < ROWS ? end - jpeg->row : ROWS;
        for (int i = 0; i < count; i++, row++)
            rows[i] = pixels + stride * (size_t)(row >= 0 && row < box->height ? row : box->height);
        if (!library.read(jpeg, rows, (unsigned)count)) return 0;
    }
    finish(jpeg, pixels + stride * (size_t)box->height);
    *found = (Region){pixels + (box->left - left) * wanted->channels, (ptrdiff_t)stride};
    return 1;
}

int jpeg_decode(Workspace *space, const JpegRequest *wanted, Region *found) {
    if (!create(space)) return 0;
    volatile int done = 0;
    if (!setjmp(space->escape)) done = decode(space, wanted, found);
    library.destroy(&space->jpeg);
    return done;
}

/* Use a library, whose functions these are; 0 if it refuses what is declared of it here. */
EXPORT int effloop_libjpeg_use(void *const *functions) {
    memcpy(&library, functions, sizeof library);
    Workspace *space = calloc(1, sizeof *space);
    int taken = space && create(space);
    if (taken) library.destroy(&space->jpeg);
    workspace_give_back(space);
    if (!taken) return 0;
    atomic_store_explicit(&has_library, 1, memory_order_release);
    return 1;
}
