/* Which instructions this processor and its operating system offer, beyond x86-64-v2. */

#ifndef EFFLOOP_CPU_H
#define EFFLOOP_CPU_H

enum { CPU_AVX2 = 1, CPU_AVX512 = 2 /* with BW, VL, VBMI and VNNI */, CPU_FMA = 4 /* with AVX2 */ };

#if defined(__x86_64__)
enum { CPU_NEON = 0 };

#include <cpuid.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* By hand: Zig 0.16 links a `__builtin_cpu_supports` that says no to everything. */
static inline int cpu_ask(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return 0;
    unsigned fma = c & bit_FMA;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    const unsigned wanted_b = bit_AVX512F | bit_AVX512BW | bit_AVX512VL, wanted_c = bit_AVX512VBMI | bit_AVX512VNNI;
    int avx2 = (low & 0x6) == 0x6 && (b & bit_AVX2);
    int avx512 = avx2 && (low & 0xe6) == 0xe6 && (b & wanted_b) == wanted_b && (c & wanted_c) == wanted_c;
    return (avx2 ? CPU_AVX2 : 0) | (avx512 ? CPU_AVX512 : 0) | (avx2 && fma ? CPU_FMA : 0);
}

static inline int cpu_has(int feature) {
    static atomic_int known; /* CPUID takes a microsecond, and 30 in a virtual machine */
    int features = atomic_load_explicit(&known, memory_order_relaxed);
    if (!features) {
        const char *most = getenv("EFFLOOP_CPU"); /* plain, avx2: no more than this */
        int allowed = !most || !*most ? ~0 : strcmp(most, "avx2") ? 0 : CPU_AVX2 | CPU_FMA;
        features = (cpu_ask() & allowed) | 1 << 30;
        atomic_store_explicit(&known, features, memory_order_relaxed);
    }
    return (features & feature) != 0;
}

#else
enum { CPU_NEON = 1 }; /* of aarch64 */

static inline int cpu_has(int feature) {
    (void)feature;
    return 0;
}

#endif

#endif
