/* The binary interface of libjpeg 6.2, as far as decoding needs it; libjpeg-turbo still has it, as libjpeg.so.62.
 *
 * Declared here, as the library comes with Pillow and its headers don't. `jpeg_CreateDecompress` refuses a caller with
 * another version or another size of `Decompress`. */

#ifndef EFFLOOP_LIBJPEG_H
#define EFFLOOP_LIBJPEG_H

#include <stddef.h>
#include <stdint.h>

enum { LIBJPEG_VERSION = 62, LIBJPEG_SIZE = 632 };
enum { SPACE_GREY = 1, SPACE_RGB = 2, SPACE_YCBCR = 3 };

typedef struct Decompress Decompress;

/* struct jpeg_error_mgr */
typedef struct {
    void (*error_exit)(Decompress *);
    void (*emit_message)(Decompress *, int level);
    void (*output_message)(Decompress *);
    void (*format_message)(Decompress *, char *);
    void (*reset)(Decompress *);
    int code;
    union {
        int numbers[8];
        char text[80];
    } parameters;
    int trace_level;
    long warnings;
    const char *const *table;
    int last;
    const char *const *more;
    int first_of_more, last_of_more;
} Errors;

/* struct jpeg_decompress_struct */
struct Decompress {
    Errors *errors;
    void *memory, *progress, *client;
    int is_decompressor, state;
    void *source;
    unsigned width, height;
    int components, space;
    int out_space;
    unsigned scale_numerator, scale_denominator;
    double gamma;
    int buffered, raw;
    int dct; /* 0 is the accurate integer method */
    int fancy_upsampling, block_smoothing;
    int quantize, dither, two_passes, colours, one_pass, external, second_pass;
    unsigned out_width, out_height;
    int out_space_components, out_components;
    int least_rows;
    int actual_colours;
    uint8_t **colour_map;
    unsigned row; /* the next one that is read */
    char others[LIBJPEG_SIZE - 176];
};

_Static_assert(sizeof(void *) != 8 || sizeof(Decompress) == LIBJPEG_SIZE, "as the library's own");

/* The library's functions, in the order of `_FUNCTIONS` in data/decode/turbojpeg.py. */
typedef struct {
    Errors *(*std_error)(Errors *);
    void (*create)(Decompress *, int version, size_t size);
    void (*destroy)(Decompress *);
    void (*memory_source)(Decompress *, const uint8_t *data, unsigned long size);
    int (*read_header)(Decompress *, int require_image);
    int (*start)(Decompress *);
    void (*crop)(Decompress *, unsigned *left, unsigned *width);
    unsigned (*skip)(Decompress *, unsigned rows);
    unsigned (*read)(Decompress *, uint8_t **rows, unsigned count);
    int (*finish)(Decompress *);
} Library;

#endif
