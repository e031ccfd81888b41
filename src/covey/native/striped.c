/* Striped lanes: tensors between hosts that two or more networks connect, over one sealed stream on each.
 *
 * A transfer is cut into records as on a sealed lane, but into shorter ones (STRIPE_BYTES), and each begins with its number.
 * Whichever stream has room takes the next record, so that each network carries as much as it can, and no share has to be
 * agreed on. A slow stream never makes a transfer slower: it gets a record only if that arrives there before the fastest
 * stream alone could have carried the transfer.
 *
 * Invariants, which hold for each direction by itself:
 *
 * 1. Record m is made only while m is less than WINDOW above the oldest record that is not acknowledged. A record is
 *    acknowledged when the kernel of the other machine has all of it: from then on the peer can read it, whatever happens to
 *    the path. What is not acknowledged is kept.
 * 2. A record whose stream has broken, or times out again and again, is sent again on another stream. A stream that only
 *    seemed dead may deliver it as well.
 * 3. The receiver delivers records in the order of their numbers, each once. It keeps a record that is less than WINDOW
 *    ahead, and drops one that it has. It stops to read a stream whose next record is further ahead.
 *
 * By 1, all records in front of record n on its stream are less than WINDOW ahead of n: n was not acknowledged when it was
 * put there. So the receiver, which waits for n, can always read until n comes.
 *
 * Streams may outlive their connections (lasting.h): if all networks die, a lane that is resumable waits until one of its
 * streams goes on over another connection. What such a stream has sent is kept twice: as records, for the other streams, and
 * sealed, for its next connection.
 *
 * The executor's thread and the control loop (`tend`) take turns under the lock. With it, the executor may wait for the
 * interpreter's lock, or hold that one already when it waits for this one; so `tend` gives the interpreter's lock up and does
 * without it, and without the ciphers that need it (`is_plain`).
 *
 * `tend` also reads, as far as the window, while no operation does: the sender may have to send records again that this end
 * has, of an operation that is over here, and can only get rid of them if the receiver takes them. So no sender waits for an end
 * that has done its part. While the executor polls for what comes, no other thread takes that, or the executor would sleep on.
 */
#include "keyed.h"
#include "lasting.h"

#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <linux/tcp.h> /* the struct tcp_info of netinet/tcp.h ends before what a stream has acknowledged */
#endif

enum {
    NUMBER_BYTES = 8,
    STRIPE_BYTES = 1 << 18, /* the most payload in a record */
    PLAIN_BYTES = NUMBER_BYTES + STRIPE_BYTES,
    SEALED_BYTES = PLAIN_BYTES + OVERHEAD_BYTES,
    WINDOW = 64,            /* records that may be on their way; as many may wait at the receiver for an earlier one */
    READ_AHEAD_BYTES = SEALED_BYTES + (1 << 14),
    CHUNK_BYTES = 1 << 19,  /* of what is kept sealed */
    SPIN_BYTES = 1 << 17,
    AHEAD_BYTES = 1 << 22,  /* a stream may lag behind the fastest one by the time that one takes for so much */
    SUSPECT_TIMEOUTS = 2,   /* retransmission timeouts in a row after which a stream gets nothing more */
    LEAST_BUSY_US = 50000,  /* of sending, and */
    LEAST_BUSY_BYTES = 1 << 18, /* bytes that were sent, before a speed is taken from them */
    SLEEP_MS = 2,           /* between looks for acknowledgements, for which there is nothing to poll */
    ROUNDS_AHEAD = 4,       /* of reads from each stream in one `tend`: an executor may wait for it to end */
};
static const int64_t TEND_NS = 100 * 1000 * 1000;
static const int64_t FORGET_NS = 10ll * 1000 * 1000 * 1000; /* after which a stream that was too slow is tried again */
static const char END_OF_STREAM[] = "end of stream";
static const int32_t NO_STREAM = -1; /* of a record that is to be sent again */

struct stripe {
    struct lasting *stream;
    struct keyed sealer, opener;
    int64_t renew_at;
    uint8_t *out; /* out[out_start:out_end]: the rest of a record that is still to be sent */
    int64_t out_start, out_end;
    int64_t sealed; /* bytes of all records; stream->kept counts what was sent, and what the peer's kernel has */
    uint8_t *in; /* in[in_start:in_end] has arrived and is still sealed */
    int64_t in_start, in_end;
    uint8_t *held; /* a record that is too far ahead, or NULL */
    uint64_t held_number;
    int64_t held_bytes;
    bool is_used_up; /* no record can be sealed any more */
    bool has_ended, is_suspect;
    double speed; /* bytes per microsecond while it was sending; 0 if that is not known */
    uint64_t acked_before, busy_before;
    int64_t measured_at;
};

/* A record that waits: to be acknowledged, or to be delivered. The plaintext is at the end of the first line of `memory`. */
struct waiting {
    uint8_t *memory; /* NULL: none */
    uint64_t number;
    int64_t nbytes;  /* of the payload */
    int32_t stream;  /* that it was sent on, and the end of it there */
    int64_t end;
};

struct striped_lane {
    struct lasting_lane lasting;
    struct stripe *stripes; /* one for each stream */
    struct waiting sent[WINDOW]; /* by number: not acknowledged yet */
    uint64_t oldest, next;       /* the oldest record that is not acknowledged, and the next new one */
    struct waiting early[WINDOW];
    uint64_t expected;           /* the next record to deliver */
    bool has_begun;              /* whether the first record of the current transfer was made */
    int64_t assigned;            /* payload bytes of it that are in records */
    bool is_awaited;             /* the executor polls for what comes */
    bool is_read_out;            /* nothing more can be received; `in_trouble` says why */
    char in_trouble[TROUBLE_BYTES];
    int64_t tended_at;
    int64_t sent_again;          /* records */
    uint8_t **spare;
    int32_t spare_count;
    char out_trouble[TROUBLE_BYTES];
};

/* Memory of records: reused, so that only as much is allocated as was ever on its way. */

static uint8_t *take_memory(struct striped_lane *lane)
{
    if (lane->spare_count)
        return lane->spare[--lane->spare_count];
    return aligned_alloc(LINE_BYTES, LINE_BYTES + STRIPE_BYTES);
}

static void give_memory(struct striped_lane *lane, uint8_t *memory) { lane->spare[lane->spare_count++] = memory; }

static uint8_t *plain_of(uint8_t *memory) { return memory + LINE_BYTES - NUMBER_BYTES; }

/* Sending */

static bool cannot_send(const struct stripe *stripe) { return stripe->is_used_up || stripe->stream->is_out_broken; }

static bool is_usable(const struct stripe *stripe) { return !cannot_send(stripe) && !stripe->is_suspect; }

/* Learns what the peer's kernel has, or that the stream has broken, which then tells nothing that could be relied on. */
static void look_at_acknowledgements(struct stripe *stripe)
{
    struct pollfd look = {.fd = stripe->stream->out_fd, .events = 0};
    if (cannot_send(stripe))
        return;
    if (poll(&look, 1, 0) > 0) /* an error, or both directions have ended */
        stripe->stream->is_out_broken = true;
    else
        kept_look(&stripe->stream->kept, stripe->stream->out_fd);
}

/* Forgets what is acknowledged. */
static void reclaim(struct striped_lane *lane)
{
    for (int32_t index = 0; index < lane->lasting.count; index++)
        look_at_acknowledgements(&lane->stripes[index]);
    for (uint64_t number = lane->oldest; number < lane->next; number++) {
        struct waiting *record = &lane->sent[number % WINDOW];
        if (record->memory != NULL && record->stream != NO_STREAM && record->end <= lane->stripes[record->stream].stream->kept.acked) {
            give_memory(lane, record->memory);
            record->memory = NULL;
        }
    }
    while (lane->oldest < lane->next && lane->sent[lane->oldest % WINDOW].memory == NULL)
        lane->oldest++;
}

static bool flush(struct striped_lane *lane, struct stripe *stripe)
{
    struct iovec rest = {stripe->out + stripe->out_start, (size_t)(stripe->out_end - stripe->out_start)};
    int64_t taken = 0;
    bool moved = false;
    if (cannot_send(stripe))
        return false;
    if (!stripe->out_end) /* another connection may have to send something again */
        return lasting_flush(&lane->lasting, stripe->stream, &moved, lane->out_trouble) && moved;
    moved = lasting_send(&lane->lasting, stripe->stream, &rest, 1, &taken, lane->out_trouble) == MOVED;
    stripe->out_start += taken;
    if (stripe->out_start == stripe->out_end)
        stripe->out_start = stripe->out_end = 0;
    return moved;
}

/* Lets records be sent again whose stream cannot be used. */
static void take_back(struct striped_lane *lane)
{
    bool has_other = false;
    for (int32_t index = 0; index < lane->lasting.count; index++)
        has_other |= is_usable(&lane->stripes[index]);
    for (uint64_t number = lane->oldest; has_other && number < lane->next; number++) {
        struct waiting *record = &lane->sent[number % WINDOW];
        if (record->memory != NULL && record->stream != NO_STREAM && !is_usable(&lane->stripes[record->stream]))
            record->stream = NO_STREAM;
    }
}

static struct waiting *first_to_repeat(struct striped_lane *lane)
{
    for (uint64_t number = lane->oldest; number < lane->next; number++) {
        struct waiting *record = &lane->sent[number % WINDOW];
        if (record->memory != NULL && record->stream == NO_STREAM)
            return record;
    }
    return NULL;
}

/* The stream for a record of a transfer of `nbytes`, or NULL. The fastest one if it has room. Another one if its part would
 * arrive before the fastest one could have carried the whole transfer: so a slow stream never makes a transfer slower. */
static int32_t choose(struct striped_lane *lane, int64_t length, int64_t nbytes)
{
    int32_t best = NO_STREAM;
    for (int32_t index = 0; index < lane->lasting.count; index++)
        if (is_usable(&lane->stripes[index]) &&
            (best == NO_STREAM || lane->stripes[index].speed > lane->stripes[best].speed))
            best = index;
    if (best == NO_STREAM || !lane->stripes[best].out_end)
        return best;
    double top = lane->stripes[best].speed;
    for (int32_t index = 0; index < lane->lasting.count; index++) {
        struct stripe *stripe = &lane->stripes[index];
        if (index == best || !is_usable(stripe) || stripe->out_end)
            continue;
        double share = top > 0 && stripe->speed > 0 ? stripe->speed / top : 1;
        double queued = (double)(stripe->stream->kept.sent - stripe->stream->kept.acked + length);
        if (queued < share * (double)smaller(nbytes, AHEAD_BYTES))
            return index;
    }
    return NO_STREAM;
}

/* Seals a record for a stream that has room. */
static bool give(struct striped_lane *lane, struct waiting *record, int32_t index, bool is_plain)
{
    struct stripe *stripe = &lane->stripes[index];
    int64_t plain_bytes = NUMBER_BYTES + record->nbytes, now = monotonic_ns();
    bool is_due = now >= stripe->renew_at;
    if (is_due)
        stripe->renew_at = now + REKEY_NS;
    if (!seal_record(&stripe->sealer, plain_of(record->memory), plain_bytes, stripe->out, is_due, is_plain)) {
        stripe->is_used_up = true; /* a nonce */
        return false;
    }
    stripe->out_end = plain_bytes + OVERHEAD_BYTES;
    stripe->sealed += stripe->out_end;
    record->stream = index;
    record->end = stripe->sealed;
    return true;
}

/* Sends again what was on streams that cannot be used. */
static bool repeat(struct striped_lane *lane, bool is_plain, bool *moved)
{
    struct waiting *record;
    while ((record = first_to_repeat(lane)) != NULL) {
        int32_t index = choose(lane, record->nbytes, AHEAD_BYTES);
        if (index == NO_STREAM)
            return true;
        if (!give(lane, record, index, is_plain))
            return false;
        lane->sent_again++;
        *moved |= flush(lane, &lane->stripes[index]);
        take_back(lane);
    }
    return true;
}

/* What Linux knows of a stream: how fast it was, and whether its path seems dead. */
static void look_at_path(struct stripe *stripe, int64_t now)
{
#if defined(__linux__)
    struct tcp_info info = {0};
    socklen_t length = sizeof info;
    size_t needed = offsetof(struct tcp_info, tcpi_busy_time) + sizeof info.tcpi_busy_time;
    if (getsockopt(stripe->stream->out_fd, IPPROTO_TCP, TCP_INFO, &info, &length) < 0 || length < needed)
        return; /* a stream that is no TCP, or a kernel that does not know all that is needed */
    uint64_t acked = info.tcpi_bytes_acked, busy = info.tcpi_busy_time;
    /* Where the interface is gone, nothing is even sent: the kernel only probes. Any answer begins both counts anew. */
    stripe->is_suspect = (info.tcpi_unacked && info.tcpi_retransmits >= SUSPECT_TIMEOUTS) ||
                         (info.tcpi_notsent_bytes && info.tcpi_probes >= SUSPECT_TIMEOUTS);
    if (busy >= stripe->busy_before + LEAST_BUSY_US && acked >= stripe->acked_before + LEAST_BUSY_BYTES) {
        double speed = (double)(acked - stripe->acked_before) / (double)(busy - stripe->busy_before);
        stripe->speed = stripe->speed > 0 ? (stripe->speed + speed) / 2 : speed;
        stripe->acked_before = acked;
        stripe->busy_before = busy;
        stripe->measured_at = now;
    } else if (now >= stripe->measured_at + FORGET_NS) {
        stripe->speed = 0;
        stripe->acked_before = acked;
        stripe->busy_before = busy;
        stripe->measured_at = now;
    }
#else
    (void)stripe, (void)now;
#endif
}

/* Looks at the paths from time to time, and sends again what is needed. */
static bool tend(struct striped_lane *lane, bool is_plain, bool *moved)
{
    int64_t now = monotonic_ns();
    if (now < lane->tended_at + TEND_NS)
        return true;
    lane->tended_at = now;
    for (int32_t index = 0; index < lane->lasting.count; index++)
        look_at_path(&lane->stripes[index], now);
    reclaim(lane);
    take_back(lane);
    for (int32_t index = 0; index < lane->lasting.count; index++)
        *moved |= flush(lane, &lane->stripes[index]);
    return repeat(lane, is_plain, moved);
}

/* Makes the next record of a transfer; false if there is no memory. */
static bool make_record(struct striped_lane *lane, const struct outgoing *out, struct waiting *record)
{
    record->memory = take_memory(lane);
    if (record->memory == NULL)
        return false;
    record->number = lane->next++;
    record->stream = NO_STREAM;
    put_word(plain_of(record->memory), record->number);
    uint8_t *payload = record->memory + LINE_BYTES;
    if (lane->has_begun) {
        record->nbytes = smaller(out->nbytes - lane->assigned, STRIPE_BYTES);
        memcpy(payload, out->data + lane->assigned, (size_t)record->nbytes);
        lane->assigned += record->nbytes;
        return true;
    }
    bool is_small = out->nbytes <= SMALL_BYTES;
    memcpy(payload, out->header, HEADER_BYTES);
    if (is_small && out->nbytes)
        memcpy(payload + HEADER_BYTES, out->data, (size_t)out->nbytes);
    lane->has_begun = true;
    lane->assigned = is_small ? out->nbytes : 0;
    record->nbytes = HEADER_BYTES + lane->assigned;
    return true;
}

static enum outcome ended_by(struct striped_lane *lane, const char *what)
{
    PyOS_snprintf(lane->out_trouble, TROUBLE_BYTES, "%s", what);
    return ENDED;
}

static enum outcome send_more(struct striped_lane *lane, struct outgoing *out)
{
    bool moved = false, is_on_its_way = false, is_any_left = false;
    if (!tend(lane, false, &moved))
        return ended_by(lane, "libcrypto could not seal a record");
    for (int32_t index = 0; index < lane->lasting.count; index++)
        moved |= flush(lane, &lane->stripes[index]);
    for (int32_t turn = 0; turn < lane->lasting.count && (!lane->has_begun || lane->assigned < out->nbytes); turn++) {
        int64_t length = lane->has_begun ? smaller(out->nbytes - lane->assigned, STRIPE_BYTES) : HEADER_BYTES;
        reclaim(lane);
        if (lane->next >= lane->oldest + WINDOW)
            break;
        int32_t index = choose(lane, length, out->nbytes);
        if (index == NO_STREAM)
            break;
        struct waiting *record = &lane->sent[lane->next % WINDOW];
        if (!make_record(lane, out, record))
            return ended_by(lane, "there is no memory for a record");
        if (!give(lane, record, index, false))
            return ended_by(lane, "libcrypto could not seal a record");
        moved |= flush(lane, &lane->stripes[index]);
    }
    take_back(lane);
    if (!repeat(lane, false, &moved))
        return ended_by(lane, "libcrypto could not seal a record");
    for (int32_t index = 0; index < lane->lasting.count; index++) {
        is_on_its_way |= is_usable(&lane->stripes[index]) && lane->stripes[index].out_end;
        is_any_left |= !cannot_send(&lane->stripes[index]);
    }
    if (lane->lasting.is_over)
        return ended_by(lane, lane->lasting.over);
    if (!is_any_left && !lane->lasting.is_resumable)
        return *lane->out_trouble ? ENDED : ended_by(lane, "all streams have broken");
    if (lane->has_begun && lane->assigned == out->nbytes && !is_on_its_way && first_to_repeat(lane) == NULL) {
        out->sent = out->nbytes;
        lane->has_begun = false;
        return MOVED;
    }
    return moved ? MOVED : IDLE;
}

static enum outcome striped_transmit(struct lane *base, struct outgoing *out)
{
    struct striped_lane *lane = (struct striped_lane *)base;
    pthread_mutex_lock(lane->lasting.out_lock);
    enum outcome outcome = send_more(lane, out);
    if (outcome == ENDED)
        lane_ended(base, lane->out_trouble);
    pthread_mutex_unlock(lane->lasting.out_lock);
    return outcome;
}

/* Receiving */

/* Puts an opened record where it waits for its turn; a second copy is dropped. False if it is too far ahead. */
static bool place(struct striped_lane *lane, uint8_t *memory, uint64_t number, int64_t nbytes)
{
    struct waiting *record = &lane->early[number % WINDOW];
    if (number >= lane->expected && number - lane->expected >= WINDOW)
        return false;
    if (number < lane->expected || record->memory != NULL)
        give_memory(lane, memory);
    else
        *record = (struct waiting){.memory = memory, .number = number, .nbytes = nbytes};
    return true;
}

static enum outcome altered(struct striped_lane *lane, const struct stripe *stripe)
{
    snprintf(lane->lasting.base.trouble, TROUBLE_BYTES,
             "the bytes were altered on the way: record %llu of stream %d is not as it was sent",
             (unsigned long long)stripe->opener.count, (int)(stripe - lane->stripes));
    return ENDED;
}

/* Opens the records that have arrived whole. MOVED if there was one. */
static enum outcome open_arrived(struct striped_lane *lane, struct stripe *stripe, bool is_plain)
{
    enum outcome outcome = IDLE;
    if (stripe->held != NULL) {
        if (!place(lane, stripe->held, stripe->held_number, stripe->held_bytes))
            return IDLE;
        stripe->held = NULL;
        outcome = MOVED;
    }
    while (stripe->held == NULL && stripe->in_end - stripe->in_start >= LENGTH_BYTES) {
        const uint8_t *head = stripe->in + stripe->in_start;
        int64_t length = record_length(head);
        if (length <= NUMBER_BYTES || length > PLAIN_BYTES) {
            snprintf(lane->lasting.base.trouble, TROUBLE_BYTES, "the bytes were altered on the way: no record has %lld bytes",
                     (long long)length);
            return ENDED;
        }
        if (stripe->in_end - stripe->in_start < length + OVERHEAD_BYTES)
            break;
        uint8_t *memory = take_memory(lane);
        if (memory == NULL)
            return lane_ended(&lane->lasting.base, "there is no memory for a record");
        if (!open_record(&stripe->opener, head, length, plain_of(memory), is_plain)) {
            give_memory(lane, memory);
            return altered(lane, stripe);
        }
        stripe->in_start += length + OVERHEAD_BYTES;
        outcome = MOVED;
        uint64_t number = get_word(plain_of(memory));
        if (!place(lane, memory, number, length - NUMBER_BYTES)) {
            stripe->held = memory;
            stripe->held_number = number;
            stripe->held_bytes = length - NUMBER_BYTES;
        }
    }
    return outcome;
}

/* Takes what a stream has. A stream that breaks only ends: what it had is sent again on another one. */
static enum outcome read_more(struct striped_lane *lane, struct stripe *stripe, bool is_plain)
{
    enum outcome outcome = open_arrived(lane, stripe, is_plain);
    if (outcome == ENDED || stripe->held != NULL || stripe->has_ended)
        return outcome;
    int64_t unopened = stripe->in_end - stripe->in_start;
    if (stripe->in_start && unopened)
        memmove(stripe->in, stripe->in + stripe->in_start, (size_t)unopened);
    stripe->in_start = 0;
    stripe->in_end = unopened;
    struct iovec room = {stripe->in + unopened, (size_t)(READ_AHEAD_BYTES - unopened)};
    int64_t taken;
    enum outcome took = lasting_take(&lane->lasting, stripe->stream, &room, 1, &taken, END_OF_STREAM);
    if (took == IDLE)
        return outcome;
    if (took == ENDED) {
        bool is_in_order = strcmp(lane->lasting.base.trouble, END_OF_STREAM) == 0;
        if (is_in_order && unopened)
            lane_ended(&lane->lasting.base, "the stream ended in the middle of a record");
        if (!is_in_order)
            stripe->stream->is_out_broken = true;
        stripe->has_ended = true;
        return outcome;
    }
    stripe->in_end += taken;
    return open_arrived(lane, stripe, is_plain) == ENDED ? ENDED : MOVED;
}

/* Notes that nothing more can be received, because of what is in lane->trouble. */
static enum outcome read_out(struct striped_lane *lane)
{
    memcpy(lane->in_trouble, lane->lasting.base.trouble, TROUBLE_BYTES);
    lane->is_read_out = true;
    return ENDED;
}

static enum outcome read_all(struct striped_lane *lane, bool is_plain)
{
    enum outcome outcome = IDLE;
    bool is_any_left = false;
    if (lane->is_read_out)
        return lane_ended(&lane->lasting.base, lane->in_trouble);
    for (int32_t index = 0; index < lane->lasting.count; index++) {
        struct stripe *stripe = &lane->stripes[index];
        enum outcome each = read_more(lane, stripe, is_plain);
        if (each == ENDED)
            return read_out(lane);
        if (each == MOVED)
            outcome = MOVED;
        is_any_left |= !stripe->has_ended && stripe->held == NULL;
    }
    if (outcome != MOVED && !is_any_left && lane->early[lane->expected % WINDOW].memory == NULL) {
        for (int32_t index = 0; index < lane->lasting.count; index++)
            if (lane->stripes[index].held != NULL)
                lane_ended(&lane->lasting.base, "a record is missing, and those that follow it have arrived");
        return read_out(lane);
    }
    return outcome;
}

/* Takes what has come for later operations, as far as the window, and what was sent again of those that are over. Returns
 * whether there may be more. On the control loop. */
static bool read_ahead(struct striped_lane *lane)
{
    enum outcome outcome = MOVED;
    if (lane->is_awaited || lane->is_read_out || lane->lasting.streams[0].in_fd < 0)
        return false;
    for (int round = 0; round < ROUNDS_AHEAD && outcome == MOVED; round++)
        outcome = read_all(lane, true);
    return outcome == MOVED;
}

/* Takes the next record from those that wait, or returns false. */
static bool take_next(struct striped_lane *lane, struct waiting *record)
{
    struct waiting *next = &lane->early[lane->expected % WINDOW];
    if (next->memory == NULL)
        return false;
    *record = *next;
    next->memory = NULL;
    lane->expected++;
    return true;
}

static enum outcome unexpected(struct striped_lane *lane, int64_t length, int64_t expected)
{
    snprintf(lane->lasting.base.trouble, TROUBLE_BYTES,
             "the bytes were altered on the way: %lld bytes of payload instead of %lld", (long long)length,
             (long long)expected);
    return ENDED;
}

static enum outcome deliver(struct striped_lane *lane, struct incoming *in, const struct waiting *record)
{
    uint8_t *payload = record->memory + LINE_BYTES;
    int64_t length = record->nbytes, expected, at = in->got;
    if (in->got < 0) {
        if (length < HEADER_BYTES || length > FIRST_BYTES) {
            snprintf(lane->lasting.base.trouble, TROUBLE_BYTES,
                     "the bytes were altered on the way: no transfer starts with a record of %lld bytes", (long long)length);
            return ENDED;
        }
        memcpy(in->header, payload, HEADER_BYTES);
        if (!header_matches(in))
            return OTHER_HEADER;
        payload += HEADER_BYTES;
        length -= HEADER_BYTES;
        expected = in->nbytes <= SMALL_BYTES ? in->nbytes : 0;
        at = 0;
    } else
        expected = smaller(in->nbytes - in->got, STRIPE_BYTES);
    if (length != expected)
        return unexpected(lane, length, expected);
    in->got = at;
    if (length && in->dest != NULL)
        memcpy(in->dest + at, payload, (size_t)length);
    else if (length)
        in->absorb(in, at, payload, length);
    in->got += length;
    return MOVED;
}

static enum outcome receive_more(struct striped_lane *lane, struct incoming *in)
{
    bool moved = false, has_read = false;
    struct waiting record;
    tend(lane, false, &moved);
    while (in->got < in->nbytes || in->got < 0) {
        if (take_next(lane, &record)) {
            enum outcome outcome = deliver(lane, in, &record);
            give_memory(lane, record.memory);
            if (outcome != MOVED)
                return outcome;
            moved = true;
            continue;
        }
        if (has_read)
            return moved ? MOVED : IDLE; /* let a send have its turn */
        enum outcome outcome = read_all(lane, false);
        if (outcome == ENDED)
            return ENDED;
        has_read = true;
        moved |= outcome == MOVED;
    }
    return MOVED;
}

static enum outcome striped_receive(struct lane *base, struct incoming *in)
{
    struct striped_lane *lane = (struct striped_lane *)base;
    pthread_mutex_lock(lane->lasting.out_lock);
    enum outcome outcome = receive_more(lane, in);
    pthread_mutex_unlock(lane->lasting.out_lock);
    return outcome;
}

static bool striped_peek(struct lane *base, uint8_t header[HEADER_BYTES])
{
    struct striped_lane *lane = (struct striped_lane *)base;
    struct waiting *next;
    pthread_mutex_lock(lane->lasting.out_lock);
    do
        next = &lane->early[lane->expected % WINDOW];
    while (next->memory == NULL && read_all(lane, true) == MOVED);
    bool is_there = next->memory != NULL && next->nbytes >= HEADER_BYTES && next->nbytes <= FIRST_BYTES;
    if (is_there)
        memcpy(header, next->memory + LINE_BYTES, HEADER_BYTES);
    pthread_mutex_unlock(lane->lasting.out_lock);
    return is_there;
}

static int striped_park(struct lane *base, struct pollfd *polls, bool sending, bool receiving)
{
    struct striped_lane *lane = (struct striped_lane *)base;
    int count = 0;
    bool is_full = sending, has_spill = false, is_waiting = false; /* for another connection, which no descriptor tells */
    pthread_mutex_lock(lane->lasting.out_lock);
    if (receiving && lane->early[lane->expected % WINDOW].memory != NULL) {
        pthread_mutex_unlock(lane->lasting.out_lock);
        return -1;
    }
    lane->is_awaited = receiving;
    for (int32_t index = 0; index < lane->lasting.count; index++) {
        const struct stripe *stripe = &lane->stripes[index];
        bool can_read = receiving && !stripe->has_ended && stripe->held == NULL;
        short events = can_read && !stripe->stream->is_in_broken ? POLLIN : 0;
        has_spill |= can_read && lasting_has_spill(stripe->stream);
        is_waiting |= lane->lasting.is_resumable && stripe->stream->is_in_broken;
        if (sending && is_usable(stripe) && stripe->out_end) {
            events |= POLLOUT;
            is_full = false;
        }
        if (events)
            polls[count++] = (struct pollfd){.fd = stripe->stream->in_fd, .events = events};
    }
    pthread_mutex_unlock(lane->lasting.out_lock);
    if (has_spill)
        return -1;
    if (!is_full && !is_waiting && count)
        return count;
    poll(polls, (nfds_t)count, SLEEP_MS); /* until something is acknowledged, which no descriptor tells */
    return -1;
}

/* What the lane has in common with others */

static void striped_unpark(struct lane *base)
{
    struct striped_lane *lane = (struct striped_lane *)base;
    pthread_mutex_lock(lane->lasting.out_lock);
    lane->is_awaited = false;
    pthread_mutex_unlock(lane->lasting.out_lock);
}

static void striped_cancel(struct lane *lane) { (void)lane; }

static void striped_close(struct lane *base)
{
    struct striped_lane *lane = (struct striped_lane *)base;
    lasting_close(&lane->lasting);
    for (int32_t index = 0; index < lane->lasting.count; index++)
        lane->lasting.streams[index].is_out_broken = true;
}

static void striped_release(struct lane *base)
{
    struct striped_lane *lane = (struct striped_lane *)base;
    for (int32_t index = 0; lane->stripes != NULL && index < lane->lasting.count; index++) {
        struct stripe *stripe = &lane->stripes[index];
        keyed_release(&stripe->sealer);
        keyed_release(&stripe->opener);
        free(stripe->out);
        free(stripe->in);
        free(stripe->held);
    }
    for (int index = 0; index < WINDOW; index++) {
        free(lane->sent[index].memory);
        free(lane->early[index].memory);
    }
    while (lane->spare_count)
        free(lane->spare[--lane->spare_count]);
    free(lane->spare);
    free(lane->stripes);
    lasting_release(&lane->lasting);
}

static const struct lane_functions striped_functions = {
    striped_transmit, striped_receive, striped_park, striped_unpark, striped_peek, striped_cancel, striped_close,
    striped_release,
};

/* Striped(streams, directs=None), as for Sealed */
static int striped_fill(PyObject *self, PyObject *args)
{
    struct striped_lane *lane = (struct striped_lane *)self;
    PyObject *streams, *directs = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyTuple_Type, &streams, &PyTuple_Type, &directs))
        return -1;
    Py_ssize_t count = PyTuple_Size(streams);
    if (!crypto_is_loaded()) {
        PyErr_SetString(PyExc_ValueError, "libcrypto is loaded before a lane is sealed");
        return -1;
    }
    lane->lasting.base.functions = &striped_functions;
    lane->lasting.base.spin_bytes = SPIN_BYTES;
    lane->lasting.base.python_bytes = INT64_MAX;
    if (!lasting_fill(&lane->lasting, count, directs, true))
        return -1;
    lane->stripes = calloc((size_t)count, sizeof *lane->stripes);
    lane->spare = calloc((size_t)(2 * WINDOW + 1 + count), sizeof *lane->spare);
    if (lane->stripes == NULL || lane->spare == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        struct stripe *stripe = &lane->stripes[index];
        int fd;
        stripe->stream = &lane->lasting.streams[index];
        if (!keyed_take(PyTuple_GetItem(streams, index), &fd, &stripe->sealer, &stripe->opener))
            return -1;
        lasting_use(stripe->stream, fd);
        if (stripe->sealer.cipher != NULL)
            lane->lasting.base.python_bytes = LONG_BYTES;
        stripe->out = malloc(SEALED_BYTES);
        stripe->in = malloc(READ_AHEAD_BYTES);
        bool is_kept = lane->lasting.is_resumable;
        bool is_filled = !is_kept || kept_fill(&stripe->stream->kept, CHUNK_BYTES, true, stripe->stream->is_direct);
        if (stripe->out == NULL || stripe->in == NULL || !is_filled) {
            PyErr_NoMemory();
            return -1;
        }
        stripe->renew_at = monotonic_ns() + REKEY_NS;
    }
    return 0;
}

/* tend(): send again what streams had that cannot be used, and take what has come; whether there may be more to take. */
static PyObject *striped_tend(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct striped_lane *lane = (struct striped_lane *)self;
    bool moved = false, has_more;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lane->lasting.out_lock);
    tend(lane, true, &moved);
    has_more = read_ahead(lane);
    pthread_mutex_unlock(lane->lasting.out_lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_more);
}

/* streams(): whether all that was sent is acknowledged, then for each stream (bytes that the kernel took, bytes per second,
 * whether it may be used). */
static PyObject *striped_streams(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct striped_lane *lane = (struct striped_lane *)self;
    struct { int64_t written; double speed; bool is_used; } seen[MOST_STREAMS];
    bool is_settled;
    Py_BEGIN_ALLOW_THREADS /* the executor may need the interpreter's lock before it lets go of the other one */
    pthread_mutex_lock(lane->lasting.out_lock);
    is_settled = lane->oldest == lane->next;
    for (int32_t index = 0; index < lane->lasting.count; index++) {
        const struct stripe *stripe = &lane->stripes[index];
        seen[index].written = stripe->stream->kept.sent;
        seen[index].speed = stripe->speed;
        seen[index].is_used = is_usable(stripe);
    }
    pthread_mutex_unlock(lane->lasting.out_lock);
    Py_END_ALLOW_THREADS
    PyObject *told = PyTuple_New(lane->lasting.count);
    for (int32_t index = 0; told != NULL && index < lane->lasting.count; index++) {
        PyObject *each = Py_BuildValue("LdO", (long long)seen[index].written, 1e6 * seen[index].speed,
                                       seen[index].is_used ? Py_True : Py_False);
        if (each == NULL || PyTuple_SetItem(told, index, each) < 0)
            Py_CLEAR(told);
    }
    return told == NULL ? NULL : Py_BuildValue("ON", is_settled ? Py_True : Py_False, told);
}

static PyMethodDef striped_methods[] = {
    LASTING_METHODS
    {"tend", striped_tend, METH_NOARGS, "Send again what is needed, and take what has come; whether there may be more."},
    {"streams", striped_streams, METH_NOARGS, "Return what each stream has sent, its speed, and whether it is used."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef striped_members[] = {
    {"sent_again", T_LONGLONG, offsetof(struct striped_lane, sent_again), READONLY, "Records that were sent again."},
    {NULL, 0, 0, 0, NULL},
};

struct kind striped_kind = {
    .name = "covey._native.Striped",
    .size = sizeof(struct striped_lane),
    .fill = striped_fill,
    .release = lane_release,
    .methods = striped_methods,
    .members = striped_members,
};
