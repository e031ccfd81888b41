/* The loops over float16 and bfloat16 for one instruction set. reduce.c includes this file once for each, and defines
 *   TARGET          the attribute that selects the instruction set,
 *   NAMED(name)     the name of a function for it,
 *   WIDEN_FLOAT16   and NARROW_FLOAT16, which convert BLOCK elements.
 * A block is small enough for the registers, so the compiler needs no help with the rest.
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

TARGET static inline __attribute__((always_inline)) void NAMED(block)(bool is_bfloat16, enum half_op op, const uint16_t *left,
                                                                     const uint16_t *right, uint16_t *out, float divisor)
{
    float a[BLOCK], b[BLOCK], result[BLOCK];
    NAMED(widen)(is_bfloat16, left, a);
    NAMED(widen)(is_bfloat16, right, b);
    for (int index = 0; index < BLOCK; index++) {
        /* Which of two nans the processor keeps is not our business: it is always the left one. */
        float x = a[index], y = b[index];
        switch (op) {
        case HALF_SUM: result[index] = x != x ? x : x + y; break;
        case HALF_MEAN: result[index] = (x != x ? x : x + y) / divisor; break;
        case HALF_PROD: result[index] = x != x ? x : x * y; break;
        case HALF_MIN: result[index] = x < y || x != x ? x : y; break;
        case HALF_MAX: result[index] = x > y || x != x ? x : y; break;
        }
    }
    NAMED(narrow)(is_bfloat16, result, out);
}

TARGET static inline __attribute__((always_inline)) void NAMED(loop)(bool is_bfloat16, enum half_op op, const uint16_t *left,
                                                                    const uint16_t *right, uint16_t *out, int64_t count,
                                                                    float divisor)
{
    int64_t index = 0;
    for (; index + BLOCK <= count; index += BLOCK)
        NAMED(block)(is_bfloat16, op, left + index, right + index, out + index, divisor);
    if (index < count) {
        uint16_t a[BLOCK] = {0}, b[BLOCK] = {0}, result[BLOCK];
        size_t rest = (size_t)(count - index) * sizeof *out;
        memcpy(a, left + index, rest);
        memcpy(b, right + index, rest);
        NAMED(block)(is_bfloat16, op, a, b, result, divisor);
        memcpy(out + index, result, rest);
    }
}

TARGET static void NAMED(loops)(bool is_bfloat16, enum half_op op, const uint16_t *left, const uint16_t *right, uint16_t *out,
                                int64_t count, float divisor)
{
    switch (op + (is_bfloat16 ? HALF_OPS : 0)) { /* constants, so that each case is a loop of its own */
    case HALF_SUM: NAMED(loop)(false, HALF_SUM, left, right, out, count, divisor); break;
    case HALF_MEAN: NAMED(loop)(false, HALF_MEAN, left, right, out, count, divisor); break;
    case HALF_PROD: NAMED(loop)(false, HALF_PROD, left, right, out, count, divisor); break;
    case HALF_MIN: NAMED(loop)(false, HALF_MIN, left, right, out, count, divisor); break;
    case HALF_MAX: NAMED(loop)(false, HALF_MAX, left, right, out, count, divisor); break;
    case HALF_OPS + HALF_SUM: NAMED(loop)(true, HALF_SUM, left, right, out, count, divisor); break;
    case HALF_OPS + HALF_MEAN: NAMED(loop)(true, HALF_MEAN, left, right, out, count, divisor); break;
    case HALF_OPS + HALF_PROD: NAMED(loop)(true, HALF_PROD, left, right, out, count, divisor); break;
    case HALF_OPS + HALF_MIN: NAMED(loop)(true, HALF_MIN, left, right, out, count, divisor); break;
    case HALF_OPS + HALF_MAX: NAMED(loop)(true, HALF_MAX, left, right, out, count, divisor); break;
    }
}
