/* A CUDA runtime without a GPU: preloaded, it takes the place of libcudart's functions that torch calls.

   Memory of a device is memory of the host, at addresses of its own. A stream is a queue, and what is in it runs only
   when something has to wait for it, or on a random schedule (see `advance`): whatever doesn't wait where CUDA wants
   it finds poison, or what was there before. Kernels are queued by `kernels.py`, with `emu_launch`. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 8
enum { LATEST, EAGER, RANDOM };
enum { CONTEXT, SYNC, ERROR, LAUNCH, COPY, PAGEABLE, NUM_COUNTS };
enum { CALL, MOVE, FILL, RECORD, WAIT };

struct task {
    struct task *next;
    int kind;
    cudaHostFn_t call;
    void *to;
    const void *from;
    size_t size; /* bytes; of WAIT, how many tasks of `other` have to be done */
    struct CUevent_st *event;
    struct CUstream_st *other;
    int value; /* of FILL; -1: poison */
};
struct CUstream_st {
    int device, priority, busy;
    unsigned eager; /* of 8: how often it moves on a random schedule */
    size_t given, done;
    struct task *first, **last;
    struct CUstream_st *next;
};
struct CUevent_st {
    int device, queries;
    struct CUstream_st *stream;
    size_t at;
    double ms;
};
struct range { /* of memory; those of a device are sorted, and have gaps */
    char *at;
    size_t size;
    int registered, freed;
};
struct ranges {
    struct range *all;
    size_t count, room;
};
static struct device {
    char *memory;
    int context;
    size_t taken;
    struct ranges ranges;
    struct CUstream_st stream; /* the default one */
} devices[MAX_DEVICES];
static struct ranges host;
static struct CUstream_st *streams; /* all others */
static int num_devices = 2, schedule = LATEST, log_file = -1;
static size_t memory = 16ul << 30; /* of each device */
static uint64_t state = 1;
static pid_t owner;
static __thread int current;
static __thread cudaError_t last;
static cudaError_t broken; /* the first failure of a kernel: every later wait reports it */
static pthread_mutex_t lock;
static int (*have_gil)(void);
static void *(*release_gil)(void);
static void (*take_gil)(void *);
API long emu_counts[MAX_DEVICES][NUM_COUNTS];
API char emu_first_error[300];

static void note(int device, int what, const char *format, ...) {
    static const char *const names[] = {"context", "sync", "error", "launch", "copy", "pageable"};
    char line[300];
    va_list rest;
    int length = snprintf(line, sizeof line, "%d cuda:%d %s ", getpid(), device, names[what]);
    va_start(rest, format);
    vsnprintf(line + length, sizeof line - length - 1, format, rest);
    va_end(rest);
    emu_counts[device][what]++;
    if (what == ERROR && !*emu_first_error) strcpy(emu_first_error, line);
    strcat(line, "\n");
    if (log_file >= 0 && write(log_file, line, strlen(line)) < 0) close(log_file);
}

static cudaError_t error(cudaError_t code, const char *what) {
    note(current, ERROR, "%s: %s", what, cudaGetErrorName(code));
    return last = code;
}

/* Nobody waits for the lock while holding the GIL, as kernels need it. */
static void enter(void) {
    if (!pthread_mutex_trylock(&lock)) return;
    void *held = have_gil && have_gil() ? release_gil() : NULL;
    pthread_mutex_lock(&lock);
    if (held) take_gil(held);
}

static cudaError_t leave(cudaError_t code) {
    pthread_mutex_unlock(&lock);
    return code;
}

static int forked(void) { return owner && owner != getpid(); }

static void make_context(int device) {
    if (devices[device].context) return;
    devices[device].context = 1;
    owner = getpid();
    devices[device].memory =
        mmap(NULL, memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    note(device, CONTEXT, "");
}

/* Enter a call that needs a device's context. */
#define ENTER(name)                                                     \
    if (forked()) return error(cudaErrorInitializationError, name " in a forked process"); \
    enter();                                                            \
    make_context(current)
#define LEAVE(name, code) \
    do { cudaError_t code_ = (code); return leave(code_ == cudaSuccess ? code_ : error(code_, name)); } while (0)

/* Memory */

/* 0x7fa5 in every two bytes: NaN as float32, float16 and bfloat16, and beyond any index as an integer. */
static void poison(void *at, size_t size) {
    static const unsigned char pattern[2] = {0xa5, 0x7f};
    char *bytes = at;
    for (size_t i = 0; i < size && i < 2; i++) bytes[i] = pattern[((uintptr_t)at + i) & 1];
    for (size_t done = 2; done < size; done *= 2) memcpy(bytes + done, bytes, size - done < done ? size - done : done);
}

static struct range *insert(struct ranges *in, size_t index, struct range what) {
    if (in->count == in->room) in->all = realloc(in->all, (in->room = 2 * in->room + 8) * sizeof *in->all);
    memmove(in->all + index + 1, in->all + index, (in->count++ - index) * sizeof *in->all);
    in->all[index] = what;
    return in->all + index;
}

static void drop(struct ranges *in, struct range *what) {
    memmove(what, what + 1, (in->all + --in->count - what) * sizeof *what);
}

static struct range *find(struct ranges *in, const void *at) {
    for (struct range *each = in->all; each < in->all + in->count; each++)
        if ((const char *)at >= each->at && (const char *)at < each->at + each->size) return each;
    return NULL;
}

static int device_of(const void *at) { /* -1: the host */
    for (int i = 0; i < num_devices; i++)
        if (devices[i].context && (const char *)at >= devices[i].memory && (const char *)at < devices[i].memory + memory)
            return i;
    return -1;
}

/* Streams */

static struct CUstream_st *stream_of(cudaStream_t handle) {
    if ((uintptr_t)handle > 2) return handle;
    return &devices[current].stream;
}

static void run(struct CUstream_st *stream, size_t until);

static void run_first(struct CUstream_st *stream) {
    struct task *task = stream->first;
    struct timespec now;
    if (!(stream->first = task->next)) stream->last = &stream->first;
    stream->busy++;
    if (task->kind == CALL) task->call(task->to);
    else if (task->kind == MOVE) memmove(task->to, task->from, task->size);
    else if (task->kind == FILL && task->value < 0) poison(task->to, task->size);
    else if (task->kind == FILL) memset(task->to, task->value, task->size);
    else if (task->kind == WAIT) run(task->other, task->size);
    else if (task->kind == RECORD) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        task->event->ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    }
    stream->busy--;
    stream->done++;
    free(task);
}

static void run(struct CUstream_st *stream, size_t until) {
    while (stream->done < until && stream->first) run_first(stream);
}

static unsigned draw(unsigned below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (state >> 16) % below;
}

static int ready(const struct CUstream_st *stream) {
    const struct task *task = stream->first;
    return task && !stream->busy && (task->kind != WAIT || task->other->done >= task->size);
}

/* Random: a random number of tasks that could run, of random streams, each with a speed of its own. */
static void advance(void) {
    if (schedule == EAGER) {
        for (int i = 0; i < num_devices; i++) run(&devices[i].stream, SIZE_MAX);
        for (struct CUstream_st *each = streams; each; each = each->next) run(each, SIZE_MAX);
    }
    if (schedule != RANDOM) return;
    for (unsigned moves = draw(4); moves; moves--) {
        for (int i = 0; i < num_devices; i++)
            if (draw(8) < devices[i].stream.eager && ready(&devices[i].stream)) run_first(&devices[i].stream);
        for (struct CUstream_st *each = streams; each; each = each->next)
            if (draw(8) < each->eager && ready(each)) run_first(each);
    }
}

static void give(struct CUstream_st *stream, struct task what) {
    struct task *task = malloc(sizeof *task);
    *task = what;
    task->next = NULL;
    *stream->last = task;
    stream->last = &task->next;
    stream->given++;
    if (schedule == EAGER && !stream->busy) run(stream, stream->given);
}

static cudaError_t synchronize(struct CUstream_st *stream, const char *name) {
    note(stream->device, SYNC, "%s", name);
    run(stream, stream->given);
    return broken;
}

/* What is still queued of copies that touch this memory is run; whether there was any. */
static int finish(const char *at, size_t size) {
    int found = 0;
    struct CUstream_st *each = streams;
    for (int i = -num_devices; i < 0 || each; i++) {
        struct CUstream_st *stream = i < 0 ? &devices[i + num_devices].stream : each;
        size_t until = 0, number = stream->done + stream->busy;
        for (struct task *task = stream->first; task; task = task->next) {
            number++;
            if (task->kind != MOVE) continue;
            const char *from = task->from, *to = task->to;
            if ((from < at + size && from + task->size > at) || (to < at + size && to + task->size > at)) until = number;
        }
        run(stream, until);
        found |= until > 0;
        if (i >= 0) each = each->next;
    }
    return found;
}

static cudaError_t copy(void *to, const void *from, size_t size, cudaStream_t handle) {
    if (!size) return cudaSuccess;
    struct CUstream_st *stream = stream_of(handle);
    int device_to = device_of(to), device_from = device_of(from);
    const void *on_host = device_to < 0 ? to : device_from < 0 ? from : NULL;
    const char *kind = device_to < 0 ? "to the host" : device_from < 0 ? "from the host" : "on the device";
    int pageable = on_host && !find(&host, on_host);
    note(stream->device, pageable ? PAGEABLE : COPY, "%s %zu bytes", kind, size);
    if (!pageable && device_to < 0 && device_from >= 0 && schedule != EAGER) {
        if (!stream->first) poison(to, size);
        else give(stream, (struct task){.kind = FILL, .to = to, .size = size, .value = -1});
    }
    give(stream, (struct task){.kind = MOVE, .to = to, .from = from, .size = size});
    if (pageable) run(stream, stream->given);
    else advance();
    return pageable ? broken : cudaSuccess;
}

/* For `kernels.py` */

/* Queue a function on a device's stream. */
API void emu_launch(int device, void *handle, cudaHostFn_t call, void *number) {
    int before = current;
    enter();
    current = device;
    emu_counts[device][LAUNCH]++;
    struct CUstream_st *stream = stream_of(handle);
    current = before;
    if (stream->device != device) error(cudaErrorInvalidResourceHandle, "kernel on a stream of another device");
    give(stream, (struct task){.kind = CALL, .call = call, .to = number});
    advance();
    leave(cudaSuccess);
}

API void emu_poison(int device, void *handle, void *at, size_t size) {
    int before = current;
    enter();
    current = device;
    struct CUstream_st *stream = stream_of(handle);
    current = before;
    if (!stream->first) poison(at, size);
    else give(stream, (struct task){.kind = FILL, .to = at, .size = size, .value = -1});
    leave(cudaSuccess);
}

API void *emu_memory(int device, size_t *size) { return *size = memory, devices[device].memory; }

API void emu_fail(void) { broken = broken ? broken : cudaErrorAssert; }

API void emu_schedule(int kind, unsigned long seed) {
    enter();
    schedule = kind;
    state = (seed + 1) * 0x9e3779b97f4a7c15;
    draw(8);
    for (int i = 0; i < num_devices; i++) devices[i].stream.eager = (1u << draw(4)) % 8 + (draw(4) == 0) * 7;
    for (struct CUstream_st *each = streams; each; each = each->next) each->eager = 1u << draw(4);
    leave(cudaSuccess);
}

static void in_child(void) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &kind);
}

__attribute__((constructor)) static void start(void) {
    const char *word;
    have_gil = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    release_gil = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    take_gil = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    in_child();
    pthread_atfork(NULL, NULL, in_child);
    for (int i = 0; i < MAX_DEVICES; i++) devices[i].stream.device = i, devices[i].stream.last = &devices[i].stream.first;
    if ((word = getenv("EMULATOR_DEVICES"))) num_devices = atoi(word);
    if ((word = getenv("EMULATOR_MEMORY"))) memory = strtoul(word, NULL, 10);
    if ((word = getenv("EMULATOR_LOG"))) log_file = open(word, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if ((word = getenv("EMULATOR_SCHEDULE")))
        emu_schedule(!strcmp(word, "eager") ? EAGER : !strcmp(word, "latest") ? LATEST : RANDOM, atoi(word));
}

/* The runtime: devices */

API cudaError_t cudaGetDeviceCount(int *count) { return *count = num_devices, cudaSuccess; }
API cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
API cudaError_t cudaGetLastError(void) { cudaError_t was = last; return last = cudaSuccess, was; }
API cudaError_t cudaPeekAtLastError(void) { return last; }
API cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
API cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return (void)mode, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { return (void)one, (void)other, *can = 0, cudaSuccess; }

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices) return error(cudaErrorInvalidDevice, "cudaSetDevice");
    current = device;
    ENTER("cudaSetDevice");
    return leave(cudaSuccess);
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "NVIDIA H100 80GB HBM3 (emulated)");
    memset(found->uuid.bytes, 0x10 + device, 16);
    found->totalGlobalMem = memory;
    found->major = 9;
    found->warpSize = 32, found->multiProcessorCount = 132, found->pciBusID = device + 1;
    found->maxThreadsPerBlock = 1024, found->maxThreadsPerMultiProcessor = 2048, found->regsPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 48 << 10, found->sharedMemPerBlockOptin = 227 << 10, found->l2CacheSize = 50 << 20;
    found->sharedMemPerMultiprocessor = 228 << 10, found->regsPerBlock = 65536;
    for (int i = 0; i < 3; i++) found->maxThreadsDim[i] = 1024 >> i, found->maxGridSize[i] = i ? 65535 : 2147483647;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    (void)device;
    *value = which == cudaDevAttrComputeCapabilityMajor ? 9 : which == cudaDevAttrMultiProcessorCount ? 132 : 0;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    return snprintf(id, length, "0000:%02x:00.0", device + 1), cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }

API cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    ENTER("cudaMemGetInfo");
    return *total = memory, *unused = memory - devices[current].taken, leave(cudaSuccess);
}

API cudaError_t cudaDeviceSynchronize(void) {
    ENTER("cudaDeviceSynchronize");
    for (struct CUstream_st *each = streams; each; each = each->next)
        if (each->device == current) run(each, each->given);
    LEAVE("cudaDeviceSynchronize", synchronize(stream_of(NULL), "device"));
}

/* Memory */

/* CUDA's cudaFree waits for the device. This one's memory is taken back later: its caller holds locks. */
static void reclaim(int device) {
    struct ranges *in = &devices[device].ranges;
    for (struct CUstream_st *each = streams; each; each = each->next)
        if (each->device == device && each->first) return;
    if (devices[device].stream.first) return;
    for (size_t i = in->count; i--;)
        if (in->all[i].freed) poison(in->all[i].at, in->all[i].size), drop(in, in->all + i);
}

API cudaError_t cudaMalloc(void **at, size_t size) {
    ENTER("cudaMalloc");
    struct device *device = &devices[current];
    reclaim(current);
    size_t index = 0, rounded = (size + 511) & ~511ul;
    char *begin = device->memory;
    for (; index < device->ranges.count; index++) {
        struct range *each = device->ranges.all + index;
        if (begin + rounded <= each->at) break;
        begin = each->at + each->size;
    }
    if (device->taken + rounded > memory || begin + rounded > device->memory + memory)
        return *at = NULL, leave(last = cudaErrorMemoryAllocation);
    insert(&device->ranges, index, (struct range){begin, rounded, 0, 0});
    device->taken += rounded;
    poison(*at = begin, size);
    return leave(cudaSuccess);
}

API cudaError_t cudaFree(void *at) {
    ENTER("cudaFree");
    int device = at ? device_of(at) : current;
    struct range *found = at && device >= 0 ? find(&devices[device].ranges, at) : NULL;
    if (at && (!found || found->at != at)) LEAVE("cudaFree", cudaErrorInvalidValue);
    if (found) found->freed = 1, devices[device].taken -= found->size;
    return leave(cudaSuccess);
}

API cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) {
    (void)flags;
    ENTER("cudaHostAlloc");
    *at = aligned_alloc(4096, (size + 4095) & ~4095ul);
    if (!*at) return leave(last = cudaErrorMemoryAllocation);
    poison(*at, size);
    insert(&host, host.count, (struct range){*at, size, 0, 0});
    return leave(cudaSuccess);
}

API cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags) {
    (void)flags;
    ENTER("cudaHostRegister");
    for (struct range *each = host.all; each < host.all + host.count; each++)
        if (each->at < (char *)at + size && each->at + each->size > (char *)at)
            LEAVE("cudaHostRegister", cudaErrorHostMemoryAlreadyRegistered);
    insert(&host, host.count, (struct range){at, size, 1, 0});
    return leave(cudaSuccess);
}

static cudaError_t unpin(void *at, int registered, const char *name) {
    struct range *found = find(&host, at);
    if (!found || found->at != at || found->registered != registered) return cudaErrorHostMemoryNotRegistered;
    if (finish(found->at, found->size)) note(current, ERROR, "%s while a queued copy uses the memory", name);
    drop(&host, find(&host, at));
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *at) {
    ENTER("cudaHostUnregister");
    LEAVE("cudaHostUnregister", unpin(at, 1, "cudaHostUnregister"));
}

API cudaError_t cudaFreeHost(void *at) {
    ENTER("cudaFreeHost");
    cudaError_t code = unpin(at, 0, "cudaFreeHost");
    if (code == cudaSuccess) free(at);
    LEAVE("cudaFreeHost", code);
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    ENTER("cudaPointerGetAttributes");
    int device = device_of(at);
    struct range *pinned = device < 0 ? find(&host, at) : NULL;
    memset(found, 0, sizeof *found);
    found->type = device >= 0 ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = device >= 0 ? device : current;
    found->devicePointer = device >= 0 || pinned ? (void *)at : NULL;
    found->hostPointer = device >= 0 ? NULL : (void *)at;
    return leave(cudaSuccess);
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    ENTER("cudaMemcpyAsync");
    LEAVE("cudaMemcpyAsync", copy(to, from, size, stream));
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
    ENTER("cudaMemcpyPeerAsync");
    if (device_of(to) != there || device_of(from) != here) LEAVE("cudaMemcpyPeerAsync", cudaErrorInvalidValue);
    LEAVE("cudaMemcpyPeerAsync", copy(to, from, size, stream));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    (void)kind;
    ENTER("cudaMemcpy");
    cudaError_t code = copy(to, from, size, NULL);
    LEAVE("cudaMemcpy", code ? code : synchronize(stream_of(NULL), "cudaMemcpy"));
}

API cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
    ENTER("cudaMemsetAsync");
    give(stream_of(stream), (struct task){.kind = FILL, .to = at, .size = size, .value = value & 255});
    advance();
    return leave(cudaSuccess);
}

API cudaError_t cudaMemset(void *at, int value, size_t size) { return cudaMemsetAsync(at, value, size, NULL); }

/* Streams and events */

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags;
    ENTER("cudaStreamCreate");
    struct CUstream_st *made = *stream = calloc(1, sizeof *made);
    *made = (struct CUstream_st){.device = current, .priority = priority, .last = &made->first, .next = streams};
    made->eager = 1u << draw(4);
    streams = made;
    return leave(cudaSuccess);
}

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return (void)stream, cudaSuccess; } /* what is queued still runs */

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER("cudaStreamSynchronize");
    LEAVE("cudaStreamSynchronize", synchronize(stream_of(stream), "stream"));
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER("cudaStreamQuery");
    return leave(stream_of(stream)->first ? cudaErrorNotReady : broken);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
    (void)flags;
    ENTER("cudaStreamWaitEvent");
    if (event->stream && event->stream->done < event->at && event->stream != stream_of(handle)) {
        give(stream_of(handle), (struct task){.kind = WAIT, .other = event->stream, .size = event->at});
        advance();
    }
    return leave(cudaSuccess);
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return (void)stream, *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

#if CUDART_VERSION >= 13000
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                         size_t *count) {
    (void)edges;
#else
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes, size_t *count) {
#endif
    (void)id, (void)graph, (void)nodes, (void)count;
    return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return *priority = stream_of(stream)->priority, cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    ENTER("cudaLaunchHostFunc");
    give(stream_of(stream), (struct task){.kind = CALL, .call = call, .to = data});
    advance();
    return leave(cudaSuccess);
}

API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    (void)f, (void)grid, (void)block, (void)args, (void)shared, (void)stream;
    return error(cudaErrorNotSupported, "a real kernel, which kernels.py doesn't replace");
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
    (void)config, (void)function, (void)args;
    return error(cudaErrorNotSupported, "a real kernel, which kernels.py doesn't replace");
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    ENTER("cudaEventCreate");
    *event = calloc(1, sizeof **event);
    (*event)->device = current;
    return leave(cudaSuccess);
}

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return (void)event, cudaSuccess; } /* it may be in a queue */

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
    (void)flags;
    ENTER("cudaEventRecord");
    struct CUstream_st *stream = stream_of(handle);
    if (stream->device != event->device) LEAVE("an event on a stream of another device", cudaErrorInvalidResourceHandle);
    give(stream, (struct task){.kind = RECORD, .event = event});
    event->stream = stream, event->at = stream->given, event->queries = 0;
    return leave(cudaSuccess);
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

static int passed(cudaEvent_t event) { return !event->stream || event->stream->done >= event->at; }

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER("cudaEventQuery");
    if (!passed(event) && ++event->queries > 10000) run(event->stream, event->at); /* somebody asks until it has */
    return leave(passed(event) ? broken : cudaErrorNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER("cudaEventSynchronize");
    note(event->device, SYNC, "event");
    if (event->stream) run(event->stream, event->at);
    LEAVE("cudaEventSynchronize", broken);
}

API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t began, cudaEvent_t ended) {
    ENTER("cudaEventElapsedTime");
    if (!began->stream || !ended->stream || began->device != ended->device)
        LEAVE("cudaEventElapsedTime", cudaErrorInvalidResourceHandle);
    if (!passed(began) || !passed(ended)) return leave(cudaErrorNotReady);
    return *ms = ended->ms - began->ms, leave(cudaSuccess);
}

/* The driver's functions that torch looks for when it is loaded; of them it calls the first. */

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = devices[device].context, 0;
}
#define DRIVER(name) API int name(void) { return 801; } /* not supported */
DRIVER(cuCtxGetCurrent) DRIVER(cuCtxSetCurrent) DRIVER(cuDeviceGet) DRIVER(cuDeviceGetAttribute)
DRIVER(cuDevicePrimaryCtxRetain) DRIVER(cuFuncGetAttribute) DRIVER(cuFuncSetAttribute) DRIVER(cuFuncSetCacheConfig)
DRIVER(cuGetErrorString) DRIVER(cuLaunchCooperativeKernel) DRIVER(cuLaunchKernel) DRIVER(cuLinkAddData_v2)
DRIVER(cuLinkComplete) DRIVER(cuLinkCreate_v2) DRIVER(cuModuleGetFunction) DRIVER(cuModuleLoad)
DRIVER(cuModuleLoadData) DRIVER(cuModuleLoadDataEx) DRIVER(cuModuleUnload)
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor) DRIVER(cuPointerGetAttribute) DRIVER(cuTensorMapEncodeTiled)
