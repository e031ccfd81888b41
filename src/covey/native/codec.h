/* The loops of the codecs: what a compressed array looks like on the wire, and which elements a sparse one keeps. The
 * functions of compress/kernels.py define the bytes and bits, these give the same ones. They touch no Python object, and
 * trust their arguments: codec.c has checked them.
 */
#ifndef COVEY_CODEC_H
#define COVEY_CODEC_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "scales and halves are little-endian on the wire; here Python writes them"
#endif

/* Quantisers: a scale for each block of elements, then their levels. */

enum {
    SCALE_BYTES = 4,
    LARGEST_QUANTISED_BLOCK = 1 << 16,
};

struct quantiser {
    int32_t levels;       /* the highest one; the lowest is its negative */
    float largest_scale;  /* the greatest with which the highest level is decoded to a finite number */
    bool is_packed;       /* two levels in a byte, each 8 more than it is, the first one in the lower half */
    int64_t block;        /* elements that share a scale */
};
extern const struct quantiser INT8, INT4; /* without a block */

/* How to round at random: by a hash of the key and of an element's index, of which the lower 32 bits count. */
struct dither {
    uint32_t key;
    uint32_t first;  /* the index of the first element */
};

int64_t quantised_bytes(const struct quantiser *quantiser, int64_t count);

/* `residual`, if not NULL, gets what the encoding loses, and may be `x`; `dither` is NULL to round to the nearest even. */
void quantise(const struct quantiser *quantiser, const float *x, int64_t count, uint8_t *wire, float *residual,
              const struct dither *dither);

void dequantise(const struct quantiser *quantiser, const uint8_t *wire, float *out, int64_t count, bool adds);

/* Casts to float16 or bfloat16 and back. */

void encode_halves(bool is_bfloat16, const float *x, int64_t count, uint8_t *wire, float *residual);
void decode_halves(bool is_bfloat16, const uint8_t *wire, float *out, int64_t count, bool adds);

/* Selection */

/* Writes, in ascending order, the indices of the `kept` elements of greatest magnitude; of equal ones the first. Infinity is
 * greater than numbers, and a nan is greater than infinity. `kept` is at most `count`. Returns false if another thread
 * changed the array meanwhile, so that some indices were not written. */
bool select_greatest(const float *x, uint32_t count, uint32_t kept, int64_t *indices);

#endif
