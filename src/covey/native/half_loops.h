/* The reductions of float16 and bfloat16 for one instruction set (see instructions.h). reduce.c includes this file once for
 * each, and defines in addition
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

/* Selects elements as they are: the smaller or larger one, and a nan before a number, the left one first. The bits of two
 * numbers are in the order of the numbers once they are read as sign and magnitude. */
TARGET static inline __attribute__((always_inline)) void NAMED(select)(bool is_bfloat16, enum half_op op, const uint16_t *left,
                                                                      const uint16_t *right, uint16_t *out, bool keeps_left)
{
    const int16_t infinity = is_bfloat16 ? 0x7f80 : 0x7c00, keeps_mask = keeps_left ? -1 : 0;
    uint16_t result[BLOCK];
    for (int index = 0; index < BLOCK; index++) {
        int16_t a = (int16_t)left[index], b = (int16_t)right[index];
        int16_t a_size = a & 0x7fff, b_size = b & 0x7fff;
        int16_t x = a < 0 ? -a_size : a_size, y = b < 0 ? -b_size : b_size;
        int16_t is_before = -(op == HALF_MIN ? x < y : x > y) | (keeps_mask & -(x == y));
        int16_t takes_left = -(a_size > infinity) | (is_before & -(b_size <= infinity));
        result[index] = (uint16_t)((a & takes_left) | (b & ~takes_left));
    }
    memcpy(out, result, sizeof result);
}

TARGET static inline __attribute__((always_inline)) void NAMED(block)(bool is_bfloat16, enum half_op op, const uint16_t *left,
                                                                     const uint16_t *right, uint16_t *out, float divisor,
                                                                     bool keeps_left)
{
    float a[BLOCK], b[BLOCK], result[BLOCK];
    if (op == HALF_MIN || op == HALF_MAX) {
        NAMED(select)(is_bfloat16, op, left, right, out, keeps_left);
        return;
    }
    NAMED(widen)(is_bfloat16, left, a);
    NAMED(widen)(is_bfloat16, right, b);
    for (int index = 0; index < BLOCK; index++)
        result[index] = op == HALF_PROD ? a[index] * b[index] : a[index] + b[index];
    for (int index = 0; index < BLOCK; index++) /* which of two nans is kept is not left to the compiler: the right one */
        result[index] = b[index] != b[index] ? b[index] : result[index];
    for (int index = 0; op == HALF_MEAN && index < BLOCK; index++)
        result[index] /= divisor;
    NAMED(narrow)(is_bfloat16, result, out);
}

TARGET static inline __attribute__((always_inline)) void NAMED(loop)(bool is_bfloat16, enum half_op op, const uint16_t *left,
                                                                    const uint16_t *right, uint16_t *out, int64_t count,
                                                                    float divisor, bool keeps_left)
{
    int64_t index = 0;
    for (; index + BLOCK <= count; index += BLOCK)
        NAMED(block)(is_bfloat16, op, left + index, right + index, out + index, divisor, keeps_left);
    if (index < count) {
        uint16_t a[BLOCK] = {0}, b[BLOCK] = {0}, result[BLOCK];
        size_t rest = (size_t)(count - index) * sizeof *out;
        memcpy(a, left + index, rest);
        memcpy(b, right + index, rest);
        NAMED(block)(is_bfloat16, op, a, b, result, divisor, keeps_left);
        memcpy(out + index, result, rest);
    }
}

TARGET static void NAMED(loops)(bool is_bfloat16, enum half_op op, const uint16_t *left, const uint16_t *right, uint16_t *out,
                                int64_t count, float divisor, bool keeps_left)
{
    switch (op + (is_bfloat16 ? HALF_OPS : 0)) { /* constants, so that each case is a loop of its own */
    case HALF_SUM: NAMED(loop)(false, HALF_SUM, left, right, out, count, divisor, keeps_left); break;
    case HALF_MEAN: NAMED(loop)(false, HALF_MEAN, left, right, out, count, divisor, keeps_left); break;
    case HALF_PROD: NAMED(loop)(false, HALF_PROD, left, right, out, count, divisor, keeps_left); break;
    case HALF_MIN: NAMED(loop)(false, HALF_MIN, left, right, out, count, divisor, keeps_left); break;
    case HALF_MAX: NAMED(loop)(false, HALF_MAX, left, right, out, count, divisor, keeps_left); break;
    case HALF_OPS + HALF_SUM: NAMED(loop)(true, HALF_SUM, left, right, out, count, divisor, keeps_left); break;
    case HALF_OPS + HALF_MEAN: NAMED(loop)(true, HALF_MEAN, left, right, out, count, divisor, keeps_left); break;
    case HALF_OPS + HALF_PROD: NAMED(loop)(true, HALF_PROD, left, right, out, count, divisor, keeps_left); break;
    case HALF_OPS + HALF_MIN: NAMED(loop)(true, HALF_MIN, left, right, out, count, divisor, keeps_left); break;
    case HALF_OPS + HALF_MAX: NAMED(loop)(true, HALF_MAX, left, right, out, count, divisor, keeps_left); break;
    }
}
