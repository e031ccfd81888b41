/* Casts: arrays of float32 as float16 or bfloat16 on the wire, two bytes each. */
#include "codec.h"
#include "halves.h"

#include <stddef.h>

enum { HALF_BYTES = 2, TILE = 64 };

#define TARGET
#define NAMED(name) name##_plain
#define WIDEN_FLOAT16 widen_float16
#define NARROW_FLOAT16 narrow_float16
#include "cast_loops.h"
#undef TARGET
#undef NAMED
#undef WIDEN_FLOAT16
#undef NARROW_FLOAT16

#if HAS_X86
#define TARGET AVX2
#define NAMED(name) name##_avx2
#define WIDEN_FLOAT16 widen_float16_f16c
#define NARROW_FLOAT16 narrow_float16_f16c
#include "cast_loops.h"
#undef TARGET
#undef NAMED
#undef WIDEN_FLOAT16
#undef NARROW_FLOAT16

#define TARGET AVX512
#define NAMED(name) name##_avx512
#define WIDEN_FLOAT16 widen_float16_avx512
#define NARROW_FLOAT16 narrow_float16_avx512
#include "cast_loops.h"
#undef TARGET
#undef NAMED
#undef WIDEN_FLOAT16
#undef NARROW_FLOAT16
#endif

typedef void half_encoder(bool is_bfloat16, const float *x, int64_t count, uint8_t *wire, float *residual);
typedef void half_decoder(bool is_bfloat16, const uint8_t *wire, float *out, int64_t count, bool adds);

struct cast_loops {
    half_encoder *encode;
    half_decoder *decode;
};

static struct cast_loops loops_for(enum instructions instructions)
{
#if HAS_X86
    if (instructions == WITH_AVX512)
        return (struct cast_loops){encode_all_avx512, decode_all_avx512};
    if (instructions == WITH_AVX2)
        return (struct cast_loops){encode_all_avx2, decode_all_avx2};
#endif
    (void)instructions;
    return (struct cast_loops){encode_all_plain, decode_all_plain};
}

void encode_halves(bool is_bfloat16, const float *x, int64_t count, uint8_t *wire, float *residual)
{
    loops_for(instructions_here()).encode(is_bfloat16, x, count, wire, residual);
}

void decode_halves(bool is_bfloat16, const uint8_t *wire, float *out, int64_t count, bool adds)
{
    loops_for(instructions_here()).decode(is_bfloat16, wire, out, count, adds);
}
