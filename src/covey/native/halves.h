/* float32 as bits, and blocks of BLOCK elements of float16 and bfloat16 from and to float32, for each instruction set.
 * They round once, to the nearest even value, as numpy and ml_dtypes do. A nan becomes a quiet one: float16 keeps its sign
 * and the upper bits of its payload, bfloat16 keeps its sign only. */
#ifndef COVEY_HALVES_H
#define COVEY_HALVES_H

#include "instructions.h"

#include <stdint.h>
#include <string.h>

enum { BLOCK = 16 };

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float finite_or_zero(float value)
{
    uint32_t bits = as_bits(value);
    return as_float((bits & 0x7f800000) == 0x7f800000 ? 0 : bits);
}

static inline uint16_t to_bfloat16(float value)
{
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t nan = (bits >> 16 & 0x8000) | 0x7fc0;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float from_float16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
    if (exponent == 0x1f)
        return as_float(sign | 0x7f800000 | (fraction ? 0x400000 : 0) | fraction << 13);
    if (exponent)
        return as_float(sign | (exponent + 112) << 23 | fraction << 13);
    float magnitude = (float)fraction * 0x1p-24f; /* exact */
    return as_float(sign | as_bits(magnitude));
}

static inline uint16_t to_float16(float value)
{
    uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x1ff));
    if (magnitude >= 0x47800000) /* 65536: infinity; from 65520 on, rounding below gets there by itself */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: adding 0.5 leaves the result, rounded to even, in the lowest bits */
        float shifted = as_float(magnitude) + 0.5f;
        return (uint16_t)(sign | (as_bits(shifted) - 0x3f000000));
    }
    uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | rounded >> 13);
}

static inline void widen_float16(const uint16_t *from, float *to)
{
    for (int index = 0; index < BLOCK; index++)
        to[index] = from_float16(from[index]);
}

static inline void narrow_float16(const float *from, uint16_t *to)
{
    for (int index = 0; index < BLOCK; index++)
        to[index] = to_float16(from[index]);
}

#if HAS_X86
AVX2 static inline void widen_float16_f16c(const uint16_t *from, float *to)
{
    for (int index = 0; index < BLOCK; index += 8)
        _mm256_storeu_ps(to + index, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + index))));
}

AVX2 static inline void narrow_float16_f16c(const float *from, uint16_t *to)
{
    for (int index = 0; index < BLOCK; index += 8)
        _mm_storeu_si128((__m128i *)(to + index),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + index), _MM_FROUND_TO_NEAREST_INT));
}

/* With halves of a block, what one of them has stored could not be loaded as a whole before it is in the cache. */
AVX512 static inline void widen_float16_avx512(const uint16_t *from, float *to)
{
    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)));
}

AVX512 static inline void narrow_float16_avx512(const float *from, uint16_t *to)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
#endif

#endif
