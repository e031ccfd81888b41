/* The elements of greatest magnitude, without sorting. Magnitudes are compared as bit patterns, which are ordered like the
 * numbers. The smallest one that is kept is found digit by digit, from the highest: counting how often each value of a digit
 * occurs, among the elements that agree with the digits found so far, says which one it has.
 *
 * That takes four passes over the array. If few elements are kept of many, a sample tells a magnitude that probably a few
 * more reach; one pass copies those, and the selection is made among the copies. Where the sample was misleading, the four
 * passes follow.
 */
#include "codec.h"
#include "halves.h"

#include <stddef.h>
#include <stdlib.h>

enum {
    MOST_VALUES = 1 << 12, /* of a digit */
    TABLES = 4,            /* neighbours with equal digits count in different tables: none waits for the one before */
    GROUP = 32,            /* elements that are passed over together if none of them counts */
    MAGNITUDE = 0x7fffffff,
    FEWEST_SAMPLED = 1 << 15, /* elements of an array for which a sample pays */
    KEPT_PART = 4,            /* and no more than this part of them is kept */
    LEAST_STRIDE = 67,        /* between elements of a sample: a prime, so that rows of a matrix are sampled at all columns */
    MOST_IN_SAMPLE = 1 << 16,
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

/* How often each value of a digit occurs: the sum over all tables. */
struct tables {
    uint32_t counts[TABLES][MOST_VALUES];
};

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

/* Elements that were copied because they may be among the greatest, and where they were. */
struct candidates {
    float *values;
    uint32_t *places;
    uint32_t count, room;
};

/* Copies an element, if there is room; one that finds none is only counted. */
static inline void keep(struct candidates *candidates, const float *x, uint32_t index)
{
    if (candidates->count < candidates->room) {
        candidates->values[candidates->count] = x[index];
        candidates->places[candidates->count] = index;
    }
    candidates->count++;
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
                           struct tables *tables);
typedef void collector(const float *x, uint32_t count, struct selection *selection);
typedef void gatherer(const float *x, uint32_t count, uint32_t least, struct candidates *candidates);

struct topk_loops {
    digit_counter *count_digits;
    collector *collect;
    gatherer *gather;
};

static struct topk_loops loops_for(enum instructions instructions)
{
#if HAS_X86
    if (instructions == WITH_AVX512)
        return (struct topk_loops){count_digits_avx512, collect_avx512, gather_avx512};
    if (instructions == WITH_AVX2)
        return (struct topk_loops){count_digits_avx2, collect_avx2, gather_avx2};
#endif
    (void)instructions;
    return (struct topk_loops){count_digits_plain, collect_plain, gather_plain};
}

/* Counts the values of the highest digit: every element counts. */
static void count_first_digits(const float *x, uint32_t count, struct tables *tables)
{
    uint32_t at = 0;
    for (; count - at >= TABLES; at += TABLES)
        for (uint32_t index = 0; index < TABLES; index++)
            tables->counts[index][digit_of(x[at + index], DIGITS[0])]++;
    for (; at < count; at++)
        tables->counts[0][digit_of(x[at], DIGITS[0])]++;
}

static uint32_t occurrences(const struct tables *tables, uint32_t value)
{
    return tables->counts[0][value] + tables->counts[1][value] + tables->counts[2][value] + tables->counts[3][value];
}

/* Returns the magnitude of the `kept`th greatest element; `equals` becomes how many of this magnitude are kept. */
static uint32_t smallest_kept(const struct topk_loops *loops, const float *x, uint32_t count, uint32_t kept, uint32_t *equals)
{
    uint32_t least = 0, most = MAGNITUDE; /* what the result can still be */
    uint32_t wanted = kept;               /* how many are kept of those from `least` to `most` */
    for (size_t index = 0; index < sizeof DIGITS / sizeof *DIGITS; index++) {
        struct digit digit = DIGITS[index];
        struct tables tables = {0};
        if (index == 0)
            count_first_digits(x, count, &tables);
        else
            loops->count_digits(x, count, digit, least, most, &tables);
        uint32_t value = (1u << digit.bits) - 1;
        for (; value > 0 && occurrences(&tables, value) < wanted; value--)
            wanted -= occurrences(&tables, value);
        least |= value << digit.shift;
        most = least | ((1u << digit.shift) - 1);
    }
    *equals = wanted;
    return least;
}

static bool select_by_digits(const struct topk_loops *loops, const float *x, uint32_t count, uint32_t kept, int64_t *indices)
{
    struct selection selection = {.kept = kept, .indices = indices};
    selection.smallest = smallest_kept(loops, x, count, kept, &selection.equals);
    loops->collect(x, count, &selection);
    return selection.taken == kept;
}

/* Returns a magnitude that, judged by a sample, a few more elements reach than are kept. `sample` has room for all of it. */
static uint32_t guess_smallest(const struct topk_loops *loops, const float *x, uint32_t count, uint32_t kept,
                               uint32_t stride, float *sample)
{
    uint32_t length = 0, equals;
    for (uint64_t at = 0; at < count; at += stride)
        sample[length++] = x[at];
    uint64_t share = (uint64_t)kept * length / count;
    uint64_t wanted = share + share / 4 + 8; /* so much that chance rarely makes it too little */
    return smallest_kept(loops, sample, length, wanted < length ? (uint32_t)wanted : length, &equals);
}

/* Selects by a sample; false, and the indices are arbitrary, if the sample was misleading, or without memory. */
static bool select_by_sample(const struct topk_loops *loops, const float *x, uint32_t count, uint32_t kept, int64_t *indices)
{
    uint32_t stride = count / MOST_IN_SAMPLE > LEAST_STRIDE ? count / MOST_IN_SAMPLE | 1 : LEAST_STRIDE;
    struct candidates candidates = {.room = 2 * kept + count / 16};
    float *sample = malloc((count / stride + 1) * sizeof *sample);
    candidates.values = malloc(candidates.room * sizeof *candidates.values);
    candidates.places = malloc(candidates.room * sizeof *candidates.places);
    bool is_done = false;
    if (sample != NULL && candidates.values != NULL && candidates.places != NULL) {
        loops->gather(x, count, guess_smallest(loops, x, count, kept, stride, sample), &candidates);
        is_done = candidates.count >= kept && candidates.count <= candidates.room &&
                  select_by_digits(loops, candidates.values, candidates.count, kept, indices);
    }
    for (uint32_t index = 0; is_done && index < kept; index++)
        indices[index] = candidates.places[indices[index]];
    free(candidates.places);
    free(candidates.values);
    free(sample);
    return is_done;
}

static bool select_with(enum instructions instructions, const float *x, uint32_t count, uint32_t kept, int64_t *indices)
{
    struct topk_loops loops = loops_for(instructions);
    if (kept == 0)
        return true;
    if (count >= FEWEST_SAMPLED && kept <= count / KEPT_PART && select_by_sample(&loops, x, count, kept, indices))
        return true;
    return select_by_digits(&loops, x, count, kept, indices);
}

bool select_greatest(const float *x, uint32_t count, uint32_t kept, int64_t *indices)
{
    return select_with(instructions_here(), x, count, kept, indices);
}
