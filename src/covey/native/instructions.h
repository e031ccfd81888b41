/* Instruction sets. A file with loops that the compiler vectorises includes those loops once for each set, with
 *   TARGET          the attribute that selects the set,
 *   NAMED(name)     the name of a function for it,
 * and calls the ones that fit the processor. The first set is what every processor of the platform has; on ARM that
 * includes NEON.
 */
#ifndef COVEY_INSTRUCTIONS_H
#define COVEY_INSTRUCTIONS_H

enum instructions { PLAIN, WITH_AVX2, WITH_AVX512 };

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_X86 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c")))
#else
#define HAS_X86 0
#endif

/* The best set that this processor has. */
static inline enum instructions instructions_here(void)
{
#if HAS_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return WITH_AVX512;
    if (__builtin_cpu_supports("avx2")) /* every processor with AVX2 has F16C */
        return WITH_AVX2;
#endif
    return PLAIN;
}

#endif
