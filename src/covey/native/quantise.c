/* Quantisers: int8 and int4 with a scale for each block, in the layout of compress/kernels.py. */
#include "codec.h"
#include "halves.h"

#include <stddef.h>

enum {
    TILE = 64,
    PACKED_ZERO = 8, /* how level 0 is written in half a byte */
};
static const uint32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000, QUIET_NAN = 0x7fc00000;
static const float SMALLEST_SCALE = 0x1p-126f; /* its inverse is finite */

const struct quantiser INT8 = {.levels = 127, .largest_scale = 0x1.020406p+121f, .is_packed = false};
const struct quantiser INT4 = {.levels = 7, .largest_scale = 0x1.249248p+125f, .is_packed = true};

struct scale {
    float value, inverse;
    bool is_finite;
};

/* The scale of a block whose greatest magnitude has these bits. */
static struct scale scale_of(const struct quantiser *quantiser, uint32_t greatest)
{
    if (greatest >= INFINITE)
        return (struct scale){.value = as_float(greatest == INFINITE ? INFINITE : QUIET_NAN)};
    float value = as_float(greatest) / (float)quantiser->levels;
    value = value < SMALLEST_SCALE ? SMALLEST_SCALE : value;
    value = value > quantiser->largest_scale ? quantiser->largest_scale : value;
    return (struct scale){.value = value, .inverse = 1.0f / value, .is_finite = true};
}

/* The levels of a block with an infinity or a nan: its infinities are decoded to themselves, all other elements to nan. */
static void poisoned_levels(const float *x, int count, float scale, int8_t *levels)
{
    for (int index = 0; index < count; index++) {
        uint32_t bits = as_bits(x[index]);
        bool is_kept = (bits & MAGNITUDE) == INFINITE && as_bits(scale) == INFINITE;
        levels[index] = (int8_t)(!is_kept ? 0 : bits == INFINITE ? 1 : -1);
    }
}

/* The finaliser of murmur3. */
static inline uint32_t mixed(uint32_t hash)
{
    hash ^= hash >> 16;
    hash *= 0x85ebca6bu;
    hash ^= hash >> 13;
    hash *= 0xc2b2ae35u;
    return hash ^ hash >> 16;
}

#define TARGET
#define NAMED(name) name##_plain
#include "quantise_loops.h"
#undef TARGET
#undef NAMED

#if HAS_X86
#define TARGET AVX2
#define NAMED(name) name##_avx2
#include "quantise_loops.h"
#undef TARGET
#undef NAMED

#define TARGET AVX512
#define NAMED(name) name##_avx512
#include "quantise_loops.h"
#undef TARGET
#undef NAMED
#endif

typedef void block_encoder(const struct quantiser *quantiser, const float *x, int64_t count, uint8_t *wire, float *residual,
                           const struct dither *dither);
typedef void block_decoder(const struct quantiser *quantiser, const uint8_t *wire, float *out, int64_t count, bool adds);

struct block_loops {
    block_encoder *encode;
    block_decoder *decode;
};

static struct block_loops loops_for(enum instructions instructions)
{
#if HAS_X86
    if (instructions == WITH_AVX512)
        return (struct block_loops){encode_block_avx512, decode_block_avx512};
    if (instructions == WITH_AVX2)
        return (struct block_loops){encode_block_avx2, decode_block_avx2};
#endif
    (void)instructions;
    return (struct block_loops){encode_block_plain, decode_block_plain};
}

static int64_t block_bytes(const struct quantiser *quantiser, int64_t count)
{
    return SCALE_BYTES + (quantiser->is_packed ? (count + 1) / 2 : count);
}

int64_t quantised_bytes(const struct quantiser *quantiser, int64_t count)
{
    int64_t whole = count / quantiser->block, rest = count % quantiser->block;
    return whole * block_bytes(quantiser, quantiser->block) + (rest ? block_bytes(quantiser, rest) : 0);
}

static void quantise_with(enum instructions instructions, const struct quantiser *quantiser, const float *x, int64_t count,
                          uint8_t *wire, float *residual, const struct dither *dither)
{
    block_encoder *encode = loops_for(instructions).encode;
    struct dither here = dither == NULL ? (struct dither){0} : *dither;
    for (int64_t at = 0; at < count; at += quantiser->block) {
        int64_t length = count - at < quantiser->block ? count - at : quantiser->block;
        encode(quantiser, x + at, length, wire, residual == NULL ? NULL : residual + at, dither == NULL ? NULL : &here);
        wire += block_bytes(quantiser, length);
        here.first += (uint32_t)length;
    }
}

static void dequantise_with(enum instructions instructions, const struct quantiser *quantiser, const uint8_t *wire,
                            float *out, int64_t count, bool adds)
{
    block_decoder *decode = loops_for(instructions).decode;
    for (int64_t at = 0; at < count; at += quantiser->block) {
        int64_t length = count - at < quantiser->block ? count - at : quantiser->block;
        decode(quantiser, wire, out + at, length, adds);
        wire += block_bytes(quantiser, length);
    }
}

void quantise(const struct quantiser *quantiser, const float *x, int64_t count, uint8_t *wire, float *residual,
              const struct dither *dither)
{
    quantise_with(instructions_here(), quantiser, x, count, wire, residual, dither);
}

void dequantise(const struct quantiser *quantiser, const uint8_t *wire, float *out, int64_t count, bool adds)
{
    dequantise_with(instructions_here(), quantiser, wire, out, count, adds);
}
