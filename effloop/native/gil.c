/* How much of the time a Python process holds its interpreter lock (GIL), by random probes. */

#define _GNU_SOURCE
#include <stdint.h>
#include <sys/resource.h>
#include <time.h>

#include "export.h"

/* Voluntary context switches of this thread: it waited for something. A preemption counts elsewhere. */
static long waits(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

/* Take and release the lock at random times until *stop is set: found[0] counts the probes, found[1] those that had to
 * wait. A thread that finds the lock free doesn't sleep, so a wait is a context switch. `ensure` and `release` are
 * PyGILState_Ensure and PyGILState_Release. Probes come 0.5 to 1.5 times mean_ns apart. */
EXPORT void effloop_probe_gil(int (*ensure)(void), void (*release)(int), int64_t mean_ns, const volatile int32_t *stop,
                              int64_t *found) {
    uint64_t random = 0x9E3779B97F4A7C15u;
    if (mean_ns < 1 || mean_ns > 500000000) return;
    while (!*stop) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        struct timespec pause = {0, mean_ns / 2 + (int64_t)((random >> 33) % (uint64_t)mean_ns)};
        nanosleep(&pause, 0);
        long before = waits();
        int state = ensure();
        long after = waits();
        release(state);
        found[0]++;
        found[1] += after > before;
    }
}
