/* Reads whole files, many in one call: effloop/data/source/storage/loose.py reads what is out of the ordinary. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "export.h"
#include "progress.h"

/* FOLDER/NAME, or a NAME that begins with a slash; 0 if it is too long or no C string. */
static int join(char path[PATH_MAX], const char *folder, int64_t length, const char *name, int64_t size) {
    if (size < 1 || length < 0 || memchr(name, 0, (size_t)size)) return 0;
    if (name[0] == '/') length = 0;
    if (length >= PATH_MAX || size >= PATH_MAX - length - 1) return 0;
    memcpy(path, folder, (size_t)length);
    if (length && path[length - 1] != '/') path[length++] = '/';
    memcpy(path + length, name, (size_t)size);
    path[length + size] = 0;
    return 1;
}

/* Read a regular file of this size to `out`, which has a byte more; 0 if it is anything else, or any call fails. */
static int read_whole(const char *path, int64_t size, uint8_t *out) {
    struct stat status;
    int whole = 0, file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a FIFO without a writer is opened, too */
    if (file < 0) return 0;
    if (!fstat(file, &status) && S_ISREG(status.st_mode) && status.st_size == size)
        whole = read(file, out, (size_t)size + 1) == size; /* a byte more would say that it has grown */
    close(file);
    return whole;
}

/* Reads files of known sizes behind each other to `out`, which has a byte more than all of them; whole[i] says whether
 * file i is there. After a failure, which may be a signal's, the rest is left: Python's own calls decide. */
EXPORT void effloop_read_files(const char *folder, int64_t folder_length, const char *const *names,
                               const int64_t *lengths, const int64_t *sizes, int64_t count, uint8_t *out,
                               uint8_t *whole, const int64_t *samples, int64_t *reached) {
    char path[PATH_MAX];
    memset(whole, 0, (size_t)count);
    for (int64_t i = 0; i < count; out += sizes[i++]) {
        reach(samples, reached, i);
        if (!join(path, folder, folder_length, names[i], lengths[i])) return;
        whole[i] = (uint8_t)read_whole(path, sizes[i], out);
        if (!whole[i]) return;
    }
}
