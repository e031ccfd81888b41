/* The loops of the quantisers for one instruction set (see instructions.h). A tile is what is worked on at a time: its
 * levels stay in registers, and the loops over a whole tile have a constant length. Results go through arrays of the
 * function, so that the compiler need not ask whether arguments overlap.
 */

TARGET static inline __attribute__((always_inline)) uint32_t NAMED(greatest)(const float *x, int64_t count)
{
    int32_t greatest = 0; /* signed, because magnitudes are not negative, and not all sets compare unsigned words */
    for (int64_t index = 0; index < count; index++) {
        int32_t magnitude = (int32_t)(as_bits(x[index]) & MAGNITUDE);
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    return (uint32_t)greatest;
}

/* Adding 1.5 * 2**23 leaves no bits for fractions: the sum is rounded to a whole number, in its lowest bits. */
TARGET static inline __attribute__((always_inline)) void NAMED(round_nearest)(const float *x, int count, float inverse,
                                                                             int32_t most, int8_t *levels)
{
    for (int index = 0; index < count; index++) {
        float value = x[index] * inverse;
        int32_t level = (int32_t)(as_bits(value + 0x1.8p23f) - as_bits(0x1.8p23f));
        level = level > most ? most : level;
        levels[index] = (int8_t)(level < -most ? -most : level);
    }
}

TARGET static inline __attribute__((always_inline)) void NAMED(round_randomly)(const float *x, int count, float inverse,
                                                                              int32_t most, int8_t *levels,
                                                                              struct dither dither)
{
    for (int index = 0; index < count; index++) {
        uint32_t hash = mixed((dither.first + (uint32_t)index) * 0x9e3779b1u + dither.key);
        float value = x[index] * inverse + (float)(int32_t)(hash >> 8) * 0x1p-24f;
        int32_t level = (int32_t)value;
        level -= (float)level > value; /* from the truncated to the next lower whole number */
        level = level > most ? most : level;
        levels[index] = (int8_t)(level < -most ? -most : level);
    }
}

TARGET static inline __attribute__((always_inline)) void NAMED(subtract)(const float *x, int count, float scale,
                                                                        const int8_t *levels, float *residual)
{
    float rest[TILE];
    for (int index = 0; index < count; index++)
        rest[index] = finite_or_zero(x[index] - (float)levels[index] * scale);
    memcpy(residual, rest, (size_t)count * sizeof *rest);
}

TARGET static inline __attribute__((always_inline)) void NAMED(pack)(const int8_t *levels, int count, uint8_t *wire)
{
    uint8_t raised[TILE], packed[TILE / 2];
    uint16_t pairs[TILE / 2];
    for (int index = 0; index < count; index++)
        raised[index] = (uint8_t)(levels[index] + PACKED_ZERO);
    if (count % 2)
        raised[count] = 0;
    int bytes = (count + 1) / 2;
    memcpy(pairs, raised, (size_t)bytes * sizeof *pairs);
    for (int index = 0; index < bytes; index++)
        packed[index] = (uint8_t)(pairs[index] | pairs[index] >> 4);
    memcpy(wire, packed, (size_t)bytes);
}

TARGET static inline __attribute__((always_inline)) void NAMED(unpack)(const uint8_t *wire, int count, int8_t *levels)
{
    uint8_t packed[TILE / 2];
    uint16_t pairs[TILE / 2];
    int bytes = (count + 1) / 2;
    memcpy(packed, wire, (size_t)bytes);
    for (int index = 0; index < bytes; index++)
        pairs[index] = (uint16_t)((packed[index] & 0x0f) | (packed[index] & 0xf0) << 4);
    memcpy(levels, pairs, (size_t)bytes * sizeof *pairs);
    for (int index = 0; index < count; index++)
        levels[index] = (int8_t)(levels[index] - PACKED_ZERO);
}

TARGET static inline __attribute__((always_inline)) void NAMED(encode_tile)(const struct quantiser *quantiser,
                                                                           const struct scale *scale, const float *x,
                                                                           int count, uint8_t *wire, float *residual,
                                                                           const struct dither *dither)
{
    int8_t levels[TILE];
    if (!scale->is_finite)
        poisoned_levels(x, count, scale->value, levels);
    else if (dither != NULL)
        NAMED(round_randomly)(x, count, scale->inverse, quantiser->levels, levels, *dither);
    else
        NAMED(round_nearest)(x, count, scale->inverse, quantiser->levels, levels);
    if (quantiser->is_packed)
        NAMED(pack)(levels, count, wire);
    else
        memcpy(wire, levels, (size_t)count);
    if (residual != NULL)
        NAMED(subtract)(x, count, scale->value, levels, residual);
}

TARGET static void NAMED(encode_block)(const struct quantiser *quantiser, const float *x, int64_t count, uint8_t *wire,
                                       float *residual, const struct dither *dither)
{
    struct scale scale = scale_of(quantiser, NAMED(greatest)(x, count));
    memcpy(wire, &scale.value, SCALE_BYTES);
    wire += SCALE_BYTES;
    struct dither here = dither == NULL ? (struct dither){0} : *dither;
    for (int64_t at = 0; at < count; at += TILE) {
        float *rest = residual == NULL ? NULL : residual + at;
        uint8_t *room = wire + (quantiser->is_packed ? at / 2 : at);
        if (count - at >= TILE)
            NAMED(encode_tile)(quantiser, &scale, x + at, TILE, room, rest, dither == NULL ? NULL : &here);
        else
            NAMED(encode_tile)(quantiser, &scale, x + at, (int)(count - at), room, rest, dither == NULL ? NULL : &here);
        here.first += TILE;
    }
}

TARGET static inline __attribute__((always_inline)) void NAMED(decode_tile)(const struct quantiser *quantiser, float scale,
                                                                           const uint8_t *wire, int count, float *out,
                                                                           bool adds)
{
    int8_t levels[TILE];
    float values[TILE];
    if (quantiser->is_packed)
        NAMED(unpack)(wire, count, levels);
    else
        memcpy(levels, wire, (size_t)count);
    for (int index = 0; index < count; index++)
        values[index] = (float)levels[index] * scale;
    for (int index = 0; adds && index < count; index++)
        values[index] = out[index] + values[index];
    memcpy(out, values, (size_t)count * sizeof *values);
}

TARGET static void NAMED(decode_block)(const struct quantiser *quantiser, const uint8_t *wire, float *out, int64_t count,
                                       bool adds)
{
    float scale;
    memcpy(&scale, wire, SCALE_BYTES);
    wire += SCALE_BYTES;
    for (int64_t at = 0; at < count; at += TILE) {
        const uint8_t *levels = wire + (quantiser->is_packed ? at / 2 : at);
        if (count - at >= TILE)
            NAMED(decode_tile)(quantiser, scale, levels, TILE, out + at, adds);
        else
            NAMED(decode_tile)(quantiser, scale, levels, (int)(count - at), out + at, adds);
    }
}
