/* The elements of greatest magnitude, without sorting. Magnitudes are compared as bit patterns, which are ordered like the
 * numbers. The smallest one that is kept is found digit by digit, from the highest: counting how often each value of a digit
 * occurs, among the elements that agree with the digits found so far, says which one it has.
 */
#include "codec.h"
#include "halves.h"

#include <stddef.h>

enum {
    MOST_VALUES = 1 << 12, /* of a digit */
    TABLES = 4,            /* neighbours with equal digits count in different tables: none waits for the one before */
    GROUP = 32,            /* elements that are passed over together if none of them counts */
    MAGNITUDE = 0x7fffffff,
};

/* Where a digit is in a magnitude. */
struct digit {
    int shift, bits;
};
static const struct digit DIGITS[] = {{19, 12}, {9, 10}, {0, 9}};
static const uint32_t BIT[GROUP] = {
    1u << 0, 1u << 1, 1u << 2, 1u << 3, 1u << 4, 1u << 5, 1u << 6, 1u << 7,
    1u << 8, 1u << 9, 1u << 10, 1u << 11, 1u << 12, 1u << 13, 1u << 14, 1u << 15,
    1u << 16, 1u << 17, 1u << 18, 1u << 19, 1u << 20, 1u << 21, 1u << 22, 1u << 23,
    1u << 24, 1u << 25, 1u << 26, 1u << 27, 1u << 28, 1u << 29, 1u << 30, 1u << 31,
};

static inline uint32_t magnitude(float value) { return as_bits(value) & MAGNITUDE; }

static inline uint32_t digit_of(float value, struct digit digit)
{
    return magnitude(value) >> digit.shift & ((1u << digit.bits) - 1);
}

/* What is still to be selected. */
struct selection {
    uint32_t smallest; /* magnitude that is kept */
    uint32_t equals;   /* how many of this magnitude are still wanted; of greater ones all are */
    uint32_t taken, kept;
    int64_t *indices;
};

/* Selects an element that is at least the smallest, unless enough elements equal to that were selected. The limit holds
 * even if another thread writes to the array. */
static inline void take(struct selection *selection, const float *x, uint32_t index)
{
    if (magnitude(x[index]) == selection->smallest) {
        if (selection->equals == 0)
            return;
        selection->equals -= 1;
    }
    if (selection->taken < selection->kept)
        selection->indices[selection->taken++] = index;
}

#define TARGET
#define NAMED(name) name##_plain
#include "topk_loops.h"
#undef TARGET
#undef NAMED

#if HAS_X86
#define TARGET AVX2
#define NAMED(name) name##_avx2
#include "topk_loops.h"
#undef TARGET
#undef NAMED

#define TARGET AVX512
#define NAMED(name) name##_avx512
#include "topk_loops.h"
#undef TARGET
#undef NAMED
#endif

typedef void digit_counter(const float *x, uint32_t count, struct digit digit, uint32_t least, uint32_t most,
                           uint32_t *counts);
typedef void collector(const float *x, uint32_t count, struct selection *selection);

struct topk_loops {
    digit_counter *count_digits;
    collector *collect;
};

static struct topk_loops loops_for(enum instructions instructions)
{
#if HAS_X86
    if (instructions == WITH_AVX512)
        return (struct topk_loops){count_digits_avx512, collect_avx512};
    if (instructions == WITH_AVX2)
        return (struct topk_loops){count_digits_avx2, collect_avx2};
#endif
    (void)instructions;
    return (struct topk_loops){count_digits_plain, collect_plain};
}

/* Counts the values of the highest digit: every element counts. */
static void count_first_digits(const float *x, uint32_t count, uint32_t *counts)
{
    uint32_t tables[TABLES][MOST_VALUES] = {0}, at = 0;
    for (; count - at >= TABLES; at += TABLES)
        for (uint32_t index = 0; index < TABLES; index++)
            tables[index][digit_of(x[at + index], DIGITS[0])]++;
    for (; at < count; at++)
        tables[0][digit_of(x[at], DIGITS[0])]++;
    for (uint32_t value = 0; value < MOST_VALUES; value++)
        counts[value] = tables[0][value] + tables[1][value] + tables[2][value] + tables[3][value];
}

static bool select_with(enum instructions instructions, const float *x, uint32_t count, uint32_t kept, int64_t *indices)
{
    struct topk_loops loops = loops_for(instructions);
    uint32_t least = 0, most = MAGNITUDE; /* what the smallest magnitude that is kept can still be */
    uint32_t wanted = kept;               /* how many are kept of those from `least` to `most` */
    if (kept == 0)
        return true;
    for (size_t index = 0; index < sizeof DIGITS / sizeof *DIGITS; index++) {
        struct digit digit = DIGITS[index];
        uint32_t counts[MOST_VALUES] = {0}, value = (1u << digit.bits) - 1;
        if (index == 0)
            count_first_digits(x, count, counts);
        else
            loops.count_digits(x, count, digit, least, most, counts);
        for (; value > 0 && counts[value] < wanted; value--)
            wanted -= counts[value];
        least |= value << digit.shift;
        most = least | ((1u << digit.shift) - 1);
    }
    struct selection selection = {.smallest = least, .equals = wanted, .kept = kept, .indices = indices};
    loops.collect(x, count, &selection);
    return selection.taken == kept;
}

bool select_greatest(const float *x, uint32_t count, uint32_t kept, int64_t *indices)
{
    return select_with(instructions_here(), x, count, kept, indices);
}
