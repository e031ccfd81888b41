/* The casts for one instruction set (see instructions.h). cast.c includes this file once for each, and defines in addition
 *   WIDEN_FLOAT16   and NARROW_FLOAT16, which convert BLOCK elements.
 * The bytes on the wire need not be aligned, so halves go through arrays of the function.
 */

/* Both convert `count` elements, rounded up to whole blocks. */
TARGET static inline __attribute__((always_inline)) void NAMED(widen)(bool is_bfloat16, const uint16_t *from, float *to,
                                                                     int count)
{
    for (int at = 0; !is_bfloat16 && at < count; at += BLOCK)
        WIDEN_FLOAT16(from + at, to + at);
    for (int index = 0; is_bfloat16 && index < count; index++)
        to[index] = as_float((uint32_t)from[index] << 16);
}

TARGET static inline __attribute__((always_inline)) void NAMED(narrow)(bool is_bfloat16, const float *from, uint16_t *to,
                                                                      int count)
{
    for (int at = 0; !is_bfloat16 && at < count; at += BLOCK)
        NARROW_FLOAT16(from + at, to + at);
    for (int index = 0; is_bfloat16 && index < count; index++)
        to[index] = to_bfloat16(from[index]);
}

/* Encodes `count` elements, up to TILE of them. A tile is several blocks, so that the compiler makes loops, which it
 * vectorises better than a sequence. */
TARGET static inline __attribute__((always_inline)) void NAMED(encode_tile)(bool is_bfloat16, const float *x, int count,
                                                                           uint8_t *wire, bool has_residual, float *residual)
{
    uint16_t halves[TILE];
    float last[TILE], rest[TILE];
    const float *source = x;
    if (count < TILE) {
        memset(last, 0, sizeof last);
        memcpy(last, x, (size_t)count * sizeof *last);
        source = last;
    }
    NAMED(narrow)(is_bfloat16, source, halves, count);
    memcpy(wire, halves, (size_t)count * HALF_BYTES);
    if (!has_residual)
        return;
    NAMED(widen)(is_bfloat16, halves, rest, count);
    for (int index = 0; index < count; index++)
        rest[index] = finite_or_zero(source[index] - rest[index]);
    memcpy(residual, rest, (size_t)count * sizeof *rest);
}

TARGET static inline __attribute__((always_inline)) void NAMED(encode)(bool is_bfloat16, const float *x, int64_t count,
                                                                      uint8_t *wire, bool has_residual, float *residual)
{
    int64_t at = 0;
    for (; at + TILE <= count; at += TILE)
        NAMED(encode_tile)(is_bfloat16, x + at, TILE, wire + at * HALF_BYTES, has_residual,
                           has_residual ? residual + at : NULL);
    if (at < count)
        NAMED(encode_tile)(is_bfloat16, x + at, (int)(count - at), wire + at * HALF_BYTES, has_residual,
                           has_residual ? residual + at : NULL);
}

/* Decodes `count` elements, up to TILE of them. */
TARGET static inline __attribute__((always_inline)) void NAMED(decode_tile)(bool is_bfloat16, const uint8_t *wire, float *out,
                                                                           int count, bool adds)
{
    uint16_t halves[TILE];
    float values[TILE];
    if (count < TILE)
        memset(halves, 0, sizeof halves);
    memcpy(halves, wire, (size_t)count * HALF_BYTES);
    if (count == TILE && !adds) { /* no block reaches past the end of `out` */
        NAMED(widen)(is_bfloat16, halves, out, TILE);
        return;
    }
    NAMED(widen)(is_bfloat16, halves, values, count);
    for (int index = 0; adds && index < count; index++)
        values[index] = out[index] + values[index];
    memcpy(out, values, (size_t)count * sizeof *values);
}

TARGET static inline __attribute__((always_inline)) void NAMED(decode)(bool is_bfloat16, const uint8_t *wire, float *out,
                                                                      int64_t count, bool adds)
{
    int64_t at = 0;
    for (; at + TILE <= count; at += TILE)
        NAMED(decode_tile)(is_bfloat16, wire + at * HALF_BYTES, out + at, TILE, adds);
    if (at < count)
        NAMED(decode_tile)(is_bfloat16, wire + at * HALF_BYTES, out + at, (int)(count - at), adds);
}

TARGET static void NAMED(encode_all)(bool is_bfloat16, const float *x, int64_t count, uint8_t *wire, float *residual)
{
    if (is_bfloat16) { /* constants, so that each case is a loop of its own */
        if (residual == NULL)
            NAMED(encode)(true, x, count, wire, false, NULL);
        else
            NAMED(encode)(true, x, count, wire, true, residual);
    } else {
        if (residual == NULL)
            NAMED(encode)(false, x, count, wire, false, NULL);
        else
            NAMED(encode)(false, x, count, wire, true, residual);
    }
}

TARGET static void NAMED(decode_all)(bool is_bfloat16, const uint8_t *wire, float *out, int64_t count, bool adds)
{
    if (is_bfloat16) {
        if (adds)
            NAMED(decode)(true, wire, out, count, true);
        else
            NAMED(decode)(true, wire, out, count, false);
    } else {
        if (adds)
            NAMED(decode)(false, wire, out, count, true);
        else
            NAMED(decode)(false, wire, out, count, false);
    }
}
