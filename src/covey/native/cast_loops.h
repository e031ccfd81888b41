/* The casts for one instruction set (see instructions.h). cast.c includes this file once for each, and defines in addition
 *   WIDEN_FLOAT16   and NARROW_FLOAT16, which convert BLOCK elements.
 * The bytes on the wire need not be aligned, so halves go through arrays of the function.
 */

TARGET static inline __attribute__((always_inline)) void NAMED(widen)(bool is_bfloat16, const uint16_t *from, float *to)
{
    if (!is_bfloat16) {
        WIDEN_FLOAT16(from, to);
        return;
    }
    for (int index = 0; index < BLOCK; index++)
        to[index] = as_float((uint32_t)from[index] << 16);
}

TARGET static inline __attribute__((always_inline)) void NAMED(narrow)(bool is_bfloat16, const float *from, uint16_t *to)
{
    if (!is_bfloat16) {
        NARROW_FLOAT16(from, to);
        return;
    }
    for (int index = 0; index < BLOCK; index++)
        to[index] = to_bfloat16(from[index]);
}

/* Encodes BLOCK elements; the rest of each goes to `rest` if `has_rest`. */
TARGET static inline __attribute__((always_inline)) void NAMED(encode_block)(bool is_bfloat16, const float *x, uint16_t *halves,
                                                                            bool has_rest, float *rest)
{
    NAMED(narrow)(is_bfloat16, x, halves);
    if (!has_rest)
        return;
    float decoded[BLOCK];
    NAMED(widen)(is_bfloat16, halves, decoded);
    for (int index = 0; index < BLOCK; index++)
        rest[index] = finite_or_zero(x[index] - decoded[index]);
}

TARGET static inline __attribute__((always_inline)) void NAMED(encode)(bool is_bfloat16, const float *x, int64_t count,
                                                                      uint8_t *wire, bool has_residual, float *residual)
{
    uint16_t halves[BLOCK];
    float rest[BLOCK];
    int64_t at = 0;
    for (; at + BLOCK <= count; at += BLOCK) {
        NAMED(encode_block)(is_bfloat16, x + at, halves, has_residual, rest);
        memcpy(wire + at * HALF_BYTES, halves, sizeof halves);
        if (has_residual)
            memcpy(residual + at, rest, sizeof rest);
    }
    if (at < count) {
        float last[BLOCK] = {0};
        size_t length = (size_t)(count - at);
        memcpy(last, x + at, length * sizeof *last);
        NAMED(encode_block)(is_bfloat16, last, halves, has_residual, rest);
        memcpy(wire + at * HALF_BYTES, halves, length * HALF_BYTES);
        if (has_residual)
            memcpy(residual + at, rest, length * sizeof *rest);
    }
}

/* Decodes `count` elements, up to TILE of them: several blocks, so that the compiler makes a loop of the additions, which it
 * vectorises better than a sequence. */
TARGET static inline __attribute__((always_inline)) void NAMED(decode_tile)(bool is_bfloat16, const uint8_t *wire, float *out,
                                                                           int count, bool adds)
{
    uint16_t halves[TILE];
    float values[TILE];
    if (count < TILE)
        memset(halves, 0, sizeof halves);
    memcpy(halves, wire, (size_t)count * HALF_BYTES);
    bool is_direct = count == TILE && !adds; /* no block reaches past the end of `out` */
    for (int at = 0; at < count; at += BLOCK)
        NAMED(widen)(is_bfloat16, halves + at, is_direct ? out + at : values + at);
    if (is_direct)
        return;
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
