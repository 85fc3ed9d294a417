/* A CUDA runtime without a GPU: preloaded, it takes the place of those functions of libcudart that torch calls.

   A device's memory is memory of the host. A stream is a queue, and what is in it runs only when something has to wait
   for it, or on another schedule (see `advance`): whoever doesn't wait where CUDA wants it finds poison, or what was
   there before. Kernels come from `kernels.py`, through `emu_launch`. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MAX_DEVICES = 8, MEMORY = 1 << 30 }; /* bytes of a device, times 16 */
enum { LATEST, EAGER, AHEAD, RANDOM } schedule = LATEST;
enum { CONTEXT, SYNC, ERROR, LAUNCH, COPY, PAGEABLE, NUM_COUNTS };

typedef struct CUstream_st Stream;
struct CUevent_st {
    int device, asked;
    Stream *stream; /* on which it was recorded, or NULL */
    size_t at;      /* passed once the stream has done so many tasks */
    double ms;
};
typedef struct Task {
    enum { CALL, COPY_BYTES, FILL, POISON, RECORD, WAIT } kind;
    char *to;
    const char *from;
    size_t size; /* bytes; of WAIT: tasks of `other` */
    int value;
    cudaHostFn_t call;
    Stream *other;
    cudaEvent_t event;
    struct Task *next;
} Task;
struct CUstream_st {
    int device, priority, busy, is_default;
    unsigned speed, rest; /* on a random schedule: 1 to 8; turns that it lets pass, when it has got work again */
    size_t given, done;
    Task *first, **last;
    Stream *next;
};
static struct Device {
    int context;
    char *memory;
    size_t used, given; /* bytes in use; bytes up to the end of the newest, as no address is used again */
    Stream *stream;     /* the default one */
} devices[MAX_DEVICES];
static struct Range { /* memory of a device, or page-locked */
    char *at;
    size_t size;
    enum { NONE, ON_DEVICE, ALLOCATED, REGISTERED } kind;
} *ranges;
static size_t num_ranges, memory = 16ul * MEMORY;
static Stream *streams;
static int num_devices = 2, log_file = -1;
static uint64_t state = 1;
static pid_t owner;
static __thread int current;
static __thread cudaError_t last;
static cudaError_t broken; /* a kernel failed: every later wait says so */
static pthread_mutex_t lock;
static int (*have_gil)(void);
static void *(*release_gil)(void), (*take_gil)(void *);
#define API __attribute__((visibility("default")))
API long emu_counts[MAX_DEVICES][NUM_COUNTS];
API char emu_first_error[300];

static void note(int device, int what, const char *detail, size_t size) {
    static const char *const names[] = {"context", "sync", "error", "launch", "copy", "pageable"};
    char line[300];
    int length = snprintf(line, sizeof line, "%d cuda:%d %s %s %zu\n", getpid(), device, names[what], detail, size);
    emu_counts[device][what]++;
    if (what == ERROR && !*emu_first_error) memcpy(emu_first_error, line, length);
    if (log_file >= 0 && write(log_file, line, length) < 0) log_file = -1;
}

static cudaError_t error(cudaError_t code, const char *where) {
    if (code != cudaSuccess) note(current, ERROR, where, code);
    return last = code;
}

/* Held for short; never by who waits for the GIL, which a kernel needs, or for another thread. */
static int enter(void) { return pthread_mutex_lock(&lock); }
static void leave(int *entered) { *entered = pthread_mutex_unlock(&lock); }
#define LOCKED __attribute__((cleanup(leave), unused)) int entered = enter()

static void make_context(void) {
    struct Device *device = devices + current;
    if (device->context++) return;
    owner = getpid();
    device->memory = mmap(NULL, 8 * memory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    note(current, CONTEXT, "", 0);
}
/* What every function of the runtime begins with that makes a context on the current device. */
#define ENTER                                                                                             \
    LOCKED;                                                                                               \
    if (owner && owner != getpid()) return error(cudaErrorInitializationError, "CUDA in a forked child"); \
    make_context()

/* Queues */

static int device_of(const void *at) { /* -1: the host */
    for (int i = 0; i < num_devices; i++)
        if (devices[i].context && (size_t)((const char *)at - devices[i].memory) < 8 * memory) return i;
    return -1;
}

static struct Range *find(const void *at) {
    for (struct Range *each = ranges; each < ranges + num_ranges; each++)
        if (each->kind && (size_t)((const char *)at - each->at) < each->size) return each;
    return NULL;
}

static void add_range(void *at, size_t size, int kind) {
    ranges = realloc(ranges, ++num_ranges * sizeof *ranges);
    ranges[num_ranges - 1] = (struct Range){at, size, kind};
}

/* 0x7fa5: NaN in float32, float16 and bfloat16, and beyond any index as an integer. */
static void poison(char *at, size_t size) {
    for (size_t i = 0; i < 2 && i < size; i++) at[i] = (uintptr_t)(at + i) & 1 ? 0x7f : (char)0xa5;
    for (size_t done = 2; done < size; done *= 2) memcpy(at + done, at, size - done < done ? size - done : done);
}

static Stream *stream_of(cudaStream_t handle, int device) {
    return (uintptr_t)handle > 2 ? handle : devices[device].stream;
}

static void run(Stream *stream, size_t until);

static void run_first(Stream *stream) {
    Task *task = stream->first;
    struct timespec now;
    if (!(stream->first = task->next)) stream->last = &stream->first;
    stream->busy = 1;
    if (task->kind == CALL) pthread_mutex_unlock(&lock), task->call(task->to), pthread_mutex_lock(&lock);
    if (task->kind == COPY_BYTES) memmove(task->to, task->from, task->size);
    if (task->kind == FILL) memset(task->to, task->value, task->size);
    if (task->kind == POISON) poison(task->to, task->size);
    if (task->kind == WAIT) run(task->other, task->size);
    if (task->kind == RECORD)
        clock_gettime(CLOCK_MONOTONIC, &now), task->event->ms = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
    stream->busy = 0;
    stream->done++;
    free(task);
}

static void wait_for_another_thread(void) {
    pthread_mutex_unlock(&lock);
    void *held = have_gil && have_gil() ? release_gil() : NULL;
    usleep(20);
    if (held) take_gil(held);
    pthread_mutex_lock(&lock);
}

static void run(Stream *stream, size_t until) {
    while (stream->done < until)
        if (stream->busy) wait_for_another_thread();
        else run_first(stream);
}

static int could_run(const Stream *stream) {
    const Task *task = stream->first;
    return task && !stream->busy && (task->kind != WAIT || task->other->done >= task->size);
}

static unsigned draw(unsigned below) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (state >> 32) % below;
}

/* After a call that queues work. LATEST: nothing runs; EAGER: all; AHEAD: what can on other streams than the default
   ones, as copies before computing; RANDOM: a few tasks, of streams that each have a speed
   and, now and then, a long rest. */
static void advance(void) {
    for (unsigned moves = schedule == RANDOM ? draw(4) : schedule != LATEST; moves; moves--)
        for (Stream *each = streams; each; each = each->next) {
            if (schedule == EAGER) run(each, each->given);
            while (schedule == AHEAD && !each->is_default && could_run(each)) run_first(each);
            if (schedule != RANDOM) continue;
            if (each->rest) each->rest--;
            else if (draw(8) < each->speed && could_run(each)) run_first(each);
        }
}

static void give(Stream *stream, Task what) {
    Task *task = malloc(sizeof *task);
    if (schedule == RANDOM && !stream->first && draw(2)) stream->rest = 1u << draw(13);
    *task = what;
    *stream->last = task;
    stream->last = &task->next;
    stream->given++;
}

static void give_poison(Stream *stream, void *at, size_t size) {
    if (stream->first) give(stream, (Task){POISON, .to = at, .size = size});
    else poison(at, size);
}

static cudaError_t synchronize(Stream *stream, const char *name) {
    note(stream->device, SYNC, name, 0);
    run(stream, stream->given);
    return error(broken, name);
}

static cudaError_t copy(void *to, const void *from, size_t size, Stream *stream) {
    const void *on_host = device_of(to) < 0 ? to : device_of(from) < 0 ? from : NULL;
    int pageable = on_host && !find(on_host);
    if (!size) return cudaSuccess;
    note(stream->device, pageable ? PAGEABLE : COPY, on_host == to ? "D2H" : on_host ? "H2D" : "D2D", size);
    if (on_host == to && !pageable) give_poison(stream, to, size);
    give(stream, (Task){COPY_BYTES, .to = to, .from = from, .size = size});
    if (pageable) return run(stream, stream->given), error(broken, "a copy of pageable memory");
    return advance(), cudaSuccess;
}

/* What is still queued of copies from or to this memory is run; whether there were any. */
static int finish(const char *at, size_t size) {
    int found = 0;
    for (Stream *each = streams; each; each = each->next) {
        size_t number = each->done + each->busy, until = 0;
        for (Task *task = each->first; task; task = task->next, number++)
            if (task->kind == COPY_BYTES && ((task->from < at + size && task->from + task->size > at) ||
                                             (task->to < at + size && task->to + task->size > at)))
                until = number + 1;
        run(each, until);
        found += until > 0;
    }
    return found;
}

static cudaError_t unlock_pages(void *at, int kind) {
    struct Range *found = find(at);
    if (!found || found->at != at || (int)found->kind != kind) return error(cudaErrorHostMemoryNotRegistered, "unlock");
    if (finish(at, found->size)) note(current, ERROR, "memory that a queued copy uses is unlocked", found->size);
    found->kind = NONE;
    if (kind == ALLOCATED) free(at);
    return cudaSuccess;
}

/* For kernels.py */

API void *emu_memory(int device, size_t *size) { return *size = 8 * memory, devices[device].memory; }
API void emu_fail(void) { broken = cudaErrorAssert; }

API void emu_launch(int device, cudaStream_t stream, cudaHostFn_t call, void *number) {
    LOCKED;
    emu_counts[device][LAUNCH]++;
    give(stream_of(stream, device), (Task){CALL, .call = call, .to = number});
    advance();
}

API void emu_poison(int device, cudaStream_t stream, void *at, size_t size) {
    LOCKED;
    give_poison(stream_of(stream, device), at, size);
}

/* Run all that is queued, forget errors, and go on by another schedule. */
API void emu_schedule(int kind, unsigned long seed) {
    LOCKED;
    schedule = EAGER;
    advance();
    broken = last = cudaSuccess, *emu_first_error = 0;
    schedule = kind;
    state = (seed + 1) * 0x9e3779b97f4a7c15;
    for (Stream *each = streams; each; each = each->next) each->speed = 1u << draw(4);
}

static void make_lock(void) { pthread_mutex_init(&lock, NULL); }

static Stream *new_stream(int device, int priority, int is_default) {
    Stream *made = calloc(1, sizeof *made);
    *made = (Stream){device, priority, 0, is_default, 1u << draw(4), .last = &made->first, .next = streams};
    return streams = made;
}

__attribute__((constructor)) static void start(void) {
    const char *word = getenv("EMULATOR_DEVICES");
    num_devices = word ? atoi(word) : 2;
    if ((word = getenv("EMULATOR_LOG"))) log_file = open(word, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    for (int i = 0; i < num_devices; i++) devices[i].stream = new_stream(i, 0, 1);
    make_lock();
    pthread_atfork(NULL, NULL, make_lock);
    have_gil = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    release_gil = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    take_gil = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    if ((word = getenv("EMULATOR_SCHEDULE"))) emu_schedule(word[0] - '0', atoi(word + 1));
}

/* The runtime: devices */

API cudaError_t cudaGetDeviceCount(int *count) { return *count = num_devices, cudaSuccess; }
API cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }
API cudaError_t cudaPeekAtLastError(void) { return last; }
API cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
API cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
API cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) { return *low = 0, *high = -5, cudaSuccess; }

API cudaError_t cudaGetLastError(void) {
    cudaError_t was = last;
    return last = cudaSuccess, was;
}

API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices) return error(cudaErrorInvalidDevice, __func__);
    current = device;
    ENTER;
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    *found = (struct cudaDeviceProp){.name = "NVIDIA H100 80GB HBM3 (emulated)", .totalGlobalMem = memory, .major = 9,
                                     .warpSize = 32, .multiProcessorCount = 132, .maxThreadsPerMultiProcessor = 2048,
                                     .maxThreadsPerBlock = 1024, .pciBusID = device + 1};
    memset(found->uuid.bytes, device + 1, sizeof found->uuid.bytes);
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) {
    return *value = what == cudaDevAttrComputeCapabilityMajor ? 9 : 0, cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    ENTER;
    return *total = memory, *unused = memory - devices[current].used, cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize(void) {
    ENTER;
    for (Stream *each = streams; each; each = each->next)
        if (each->device == current) run(each, each->given);
    return synchronize(devices[current].stream, __func__);
}

/* Memory */

API cudaError_t cudaMalloc(void **at, size_t size) {
    ENTER;
    struct Device *device = devices + current;
    size = (size + 511) & ~511ul;
    if (device->used + size > memory || device->given + size > 8 * memory) return last = cudaErrorMemoryAllocation;
    poison(*at = device->memory + device->given, size);
    add_range(*at, size, ON_DEVICE);
    device->used += size, device->given += size;
    return cudaSuccess;
}

API cudaError_t cudaFree(void *at) { /* doesn't wait, as CUDA's does: its caller has locks that a kernel may need */
    ENTER;
    struct Range *found = at ? find(at) : NULL;
    if (found && found->kind == ON_DEVICE) found->kind = NONE, devices[device_of(at)].used -= found->size;
    return found || !at ? cudaSuccess : error(cudaErrorInvalidValue, __func__);
}

API cudaError_t cudaHostAlloc(void **at, size_t size, unsigned flags) {
    ENTER;
    poison(*at = aligned_alloc(4096, (size + 4095) & ~4095ul), size);
    return add_range(*at, size, ALLOCATED), cudaSuccess;
}

API cudaError_t cudaHostRegister(void *at, size_t size, unsigned flags) {
    ENTER;
    if (find(at)) return error(cudaErrorHostMemoryAlreadyRegistered, __func__);
    return add_range(at, size, REGISTERED), cudaSuccess;
}

API cudaError_t cudaHostUnregister(void *at) {
    ENTER;
    return unlock_pages(at, REGISTERED);
}

API cudaError_t cudaFreeHost(void *at) {
    ENTER;
    return unlock_pages(at, ALLOCATED);
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *at) {
    ENTER;
    int device = device_of(at), type = find(at) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    *found = (struct cudaPointerAttributes){.type = device < 0 ? type : cudaMemoryTypeDevice, .device = device,
                                            .devicePointer = (void *)at, .hostPointer = device < 0 ? (void *)at : NULL};
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER;
    return copy(to, from, size, stream_of(stream, current));
}

API cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
    ENTER;
    if (device_of(to) != there || device_of(from) != here) return error(cudaErrorInvalidValue, __func__);
    return copy(to, from, size, stream_of(stream, current));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    ENTER;
    return copy(to, from, size, devices[current].stream), synchronize(devices[current].stream, __func__);
}

API cudaError_t cudaMemsetAsync(void *at, int value, size_t size, cudaStream_t stream) {
    ENTER;
    give(stream_of(stream, current), (Task){FILL, .to = at, .size = size, .value = value});
    return advance(), cudaSuccess;
}

/* Streams and events; those that are destroyed may still be in a queue, and stay */

API cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    ENTER;
    return *stream = new_stream(current, priority, 0), cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return *priority = stream_of(stream, current)->priority, cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER;
    return synchronize(stream_of(stream, current), __func__);
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER;
    return stream_of(stream, current)->first ? cudaErrorNotReady : broken;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                         unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
#if CUDART_VERSION >= 13000
                                         const cudaGraphEdgeData **edges,
#endif
                                         size_t *count) {
    return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    ENTER;
    if (event->stream) give(stream_of(stream, current), (Task){WAIT, .other = event->stream, .size = event->at});
    return advance(), cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    ENTER;
    *event = calloc(1, sizeof **event);
    return (*event)->device = current, cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
    ENTER;
    Stream *stream = stream_of(handle, current);
    if (stream->device != event->device) return error(cudaErrorInvalidResourceHandle, __func__);
    give(stream, (Task){RECORD, .event = event});
    event->stream = stream, event->at = stream->given, event->asked = 0;
    if (schedule == EAGER && stream->done + 1 == stream->given && !stream->busy) run_first(stream);
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

static int passed(cudaEvent_t event) { return !event->stream || event->stream->done >= event->at; }

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER;
    if (!passed(event) && ++event->asked > 10000) run(event->stream, event->at); /* somebody asks until it has passed */
    return passed(event) ? broken : cudaErrorNotReady;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER;
    note(event->device, SYNC, __func__, 0);
    if (event->stream) run(event->stream, event->at);
    return error(broken, __func__);
}

API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t began, cudaEvent_t ended) {
    ENTER;
    if (!began->stream || !ended->stream || began->device != ended->device)
        return error(cudaErrorInvalidResourceHandle, __func__);
    return *ms = ended->ms - began->ms, passed(began) && passed(ended) ? cudaSuccess : cudaErrorNotReady;
}

API cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return error(cudaErrorNotSupported, "a kernel for a real GPU");
}

/* What torch wants of the driver itself, when it is loaded; it calls the first of these. */

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    return *flags = 0, *active = devices[device].context > 0, 0;
}
#define OTHER(name) API int name(void) { return 801; } /* not supported */
OTHER(cuCtxGetCurrent) OTHER(cuCtxSetCurrent) OTHER(cuDeviceGet) OTHER(cuDeviceGetAttribute)
OTHER(cuDevicePrimaryCtxRetain) OTHER(cuFuncGetAttribute) OTHER(cuFuncSetAttribute) OTHER(cuFuncSetCacheConfig)
OTHER(cuGetErrorString) OTHER(cuLaunchCooperativeKernel) OTHER(cuLaunchKernel) OTHER(cuLinkAddData_v2)
OTHER(cuLinkComplete) OTHER(cuLinkCreate_v2) OTHER(cuModuleGetFunction) OTHER(cuModuleLoad) OTHER(cuModuleLoadData)
OTHER(cuModuleLoadDataEx) OTHER(cuModuleUnload) OTHER(cuOccupancyMaxActiveBlocksPerMultiprocessor)
OTHER(cuPointerGetAttribute) OTHER(cuTensorMapEncodeTiled)
