/* The passes over an array that find its elements of greatest magnitude, for one instruction set (see instructions.h). */

/* Returns a word in which bit i says whether element i of a group has a magnitude from `least` to `most`. */
TARGET static inline __attribute__((always_inline)) uint32_t NAMED(matches)(const float *x, uint32_t least, uint32_t most)
{
    uint32_t found = 0;
    for (int index = 0; index < GROUP; index++) {
        int32_t each = (int32_t)magnitude(x[index]);
        int32_t is_outside = -(each < (int32_t)least) | -(each > (int32_t)most);
        found |= BIT[index] & ~(uint32_t)is_outside;
    }
    return found;
}

/* Counts the values of a digit among the elements whose magnitude is from `least` to `most`. */
TARGET static void NAMED(count_digits)(const float *x, uint32_t count, struct digit digit, uint32_t least, uint32_t most,
                                       struct tables *tables)
{
    uint32_t at = 0;
    for (; count - at >= GROUP; at += GROUP)
        for (uint32_t left = NAMED(matches)(x + at, least, most); left; left &= left - 1) {
            uint32_t index = (uint32_t)__builtin_ctz(left);
            tables->counts[index % TABLES][digit_of(x[at + index], digit)]++;
        }
    for (; at < count; at++)
        tables->counts[0][digit_of(x[at], digit)] += magnitude(x[at]) >= least && magnitude(x[at]) <= most;
}

TARGET static void NAMED(collect)(const float *x, uint32_t count, struct selection *selection)
{
    struct selection own = *selection; /* so that the compiler can keep it in registers */
    uint32_t at = 0;
    for (; count - at >= GROUP && own.taken < own.kept; at += GROUP)
        for (uint32_t left = NAMED(matches)(x + at, own.smallest, MAGNITUDE); left; left &= left - 1)
            take(&own, x, at + (uint32_t)__builtin_ctz(left));
    for (; at < count && own.taken < own.kept; at++)
        if (magnitude(x[at]) >= own.smallest)
            take(&own, x, at);
    *selection = own;
}

/* Copies the elements whose magnitude is at least `least`, until there are more of them than there is room for. */
TARGET static void NAMED(gather)(const float *x, uint32_t count, uint32_t least, struct candidates *candidates)
{
    struct candidates own = *candidates;
    uint32_t at = 0;
    for (; count - at >= GROUP && own.count <= own.room; at += GROUP)
        for (uint32_t left = NAMED(matches)(x + at, least, MAGNITUDE); left; left &= left - 1)
            keep(&own, x, at + (uint32_t)__builtin_ctz(left));
    for (; at < count && own.count <= own.room; at++)
        if (magnitude(x[at]) >= least)
            keep(&own, x, at);
    *candidates = own;
}
