/* Runs one rank's plan over its lanes, without the interpreter's lock.
 *
 * The loop is that of covey/runtime/collectives/executor.py: move the current send, move the current receive, and wait
 * when neither moves. It returns to Python with a reason whenever there is something to decide, and goes on where it
 * was when Python calls again.
 *
 * Waiting has three stages. A rank that has a core of its own looks again and again; then it gives its core to others
 * between two looks; then it sleeps in poll(2) on the lanes and on the wake descriptor.
 */
#include "native.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const int64_t LOOK_NS = 20 * 1000;            /* of a first look with the interpreter's lock */
enum {
    LOOKS = 64,            /* at the lanes between two looks at the clock, while spinning */
    MOST_LOOKS = 1 << 14,  /* with the interpreter's lock, also if a peer sends byte by byte: well below a millisecond */
    BLOCK_BYTES = 1 << 15, /* reduced at once when a range is saved as well: it is in the first-level cache twice */
};

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Headers */

static void make_header(const struct runner *runner, uint8_t *header, uint64_t move, int64_t nbytes)
{
    memcpy(header, runner->prefix, PREFIX_BYTES);
    put_word(header + PREFIX_BYTES, runner->sequence);
    put_word(header + PREFIX_BYTES + 8, move);
    put_word(header + PREFIX_BYTES + 16, (uint64_t)nbytes);
    put_word(header + PREFIX_BYTES + 24, 0);
}

bool header_matches(struct incoming *in)
{
    if (memcmp(in->header, in->expected, HEADER_BYTES) == 0)
        return true;
    if (in->header[FLAGS_AT] != (in->expected[FLAGS_AT] | CHANGE_PENDING) ||
        memcmp(in->header, in->expected, FLAGS_AT) != 0 ||
        memcmp(in->header + FLAGS_AT + 1, in->expected + FLAGS_AT + 1, HEADER_BYTES - FLAGS_AT - 1) != 0)
        return false;
    in->change_pending = true;
    return true;
}

/* What arrives */

static struct lane *lane_of(struct runner *runner, int32_t peer) { return (struct lane *)runner->lane_objects[peer]; }

static uint8_t *range_of(struct runner *runner, int32_t buffer, int64_t start)
{
    return (uint8_t *)runner->buffers[buffer].buf + start * runner->buffers[buffer].itemsize;
}

/* Saves a range before it is overwritten; false if there is no memory: then it must stay as it is. */
static bool save(struct runner *runner, uint8_t *target, int64_t nbytes)
{
    if (!undo_save((struct undo *)runner->undo_object, target, nbytes))
        runner->is_out_of_memory = true;
    return !runner->is_out_of_memory;
}

static const struct recv_move *current_recv(const struct runner *runner)
{
    return &((const struct plan *)runner->plan_object)->recvs[runner->applied];
}

static bool saves(const struct runner *runner, const struct recv_move *recv)
{
    return runner->undo_object != NULL && recv->saves;
}

/* Combines `nbytes` at `offset` of the current receive's range with `piece`. Nothing more is combined once a range could not
 * be saved: the operation ends, and what was saved is all that has changed. */
static void reduce_range(struct runner *runner, int64_t offset, const uint8_t *piece, int64_t nbytes)
{
    const struct recv_move *recv = current_recv(runner);
    const struct reduction *reduction = (const struct reduction *)runner->reduction_object;
    bool is_saved = saves(runner, recv);
    /* Both ranks of a swap combine the same ranges in the same calls: numpy's rounding may depend on the position. */
    int64_t step = is_saved && !runner->is_whole ? BLOCK_BYTES : nbytes;
    for (int64_t at = 0; at < nbytes && !runner->is_out_of_memory; at += step) {
        int64_t length = nbytes - at < step ? nbytes - at : step;
        uint8_t *mine = runner->target + offset + at;
        const uint8_t *theirs = piece + at;
        if (is_saved && !save(runner, mine, length))
            return;
        combine(reduction, recv->action & LEFT ? theirs : mine, recv->action & LEFT ? mine : theirs, mine,
                length / runner->in.itemsize, recv->action & FINAL, runner->contributors);
    }
}

static void absorb(struct incoming *in, int64_t offset, const uint8_t *piece, int64_t nbytes)
{
    struct runner *runner = in->context;
    if (!runner->is_whole || nbytes == in->nbytes) {
        reduce_range(runner, offset, piece, nbytes);
        return;
    }
    memcpy(runner->aside + offset, piece, (size_t)nbytes);
    if (offset + nbytes == in->nbytes)
        reduce_range(runner, 0, runner->aside, in->nbytes);
}

static bool make_aside(struct runner *runner, int64_t nbytes)
{
    if (nbytes <= runner->aside_room)
        return true;
    size_t room = (size_t)(nbytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    free(runner->aside);
    runner->aside = aligned_alloc(LINE_BYTES, room);
    runner->aside_room = runner->aside == NULL ? 0 : (int64_t)room;
    return runner->aside != NULL;
}

/* Moves */

static void begin_send(struct runner *runner, const struct send_move *send)
{
    int64_t nbytes = (send->stop - send->start) * runner->buffers[send->buffer].itemsize;
    make_header(runner, runner->out.header, runner->out_moves[send->peer]++, nbytes);
    if (runner->change_pending)
        runner->out.header[FLAGS_AT] |= CHANGE_PENDING;
    runner->out.data = range_of(runner, send->buffer, send->start);
    runner->out.nbytes = nbytes;
    runner->out.sent = -HEADER_BYTES;
    runner->out.is_stored = runner->reduction_object == NULL;
    runner->is_sending = true;
}

static bool begin_receive(struct runner *runner, const struct recv_move *recv)
{
    struct incoming *in = &runner->in;
    int64_t nbytes = (recv->stop - recv->start) * runner->buffers[recv->buffer].itemsize;
    bool must_wait = recv->after > runner->sent;
    make_header(runner, in->expected, runner->in_moves[recv->peer]++, nbytes);
    in->nbytes = nbytes;
    in->itemsize = runner->buffers[recv->buffer].itemsize;
    in->got = -HEADER_BYTES;
    in->change_pending = false;
    in->absorb = absorb;
    in->context = runner;
    runner->target = range_of(runner, recv->buffer, recv->start);
    runner->is_aside = must_wait;
    runner->is_whole = recv->after > 0;
    if ((must_wait || runner->is_whole) && !make_aside(runner, nbytes))
        return false;
    if (must_wait)
        in->dest = runner->aside;
    else if (recv->action & REDUCE)
        in->dest = NULL;
    else {
        in->dest = runner->target;
        if (saves(runner, recv) && !save(runner, runner->target, nbytes))
            return false;
    }
    runner->is_receiving = true;
    return true;
}

/* Applies a payload that was received aside. */
static void apply(struct runner *runner, const struct recv_move *recv)
{
    if (recv->action & REDUCE) {
        runner->is_whole = true;
        reduce_range(runner, 0, runner->aside, runner->in.nbytes);
        return;
    }
    if (saves(runner, recv) && !save(runner, runner->target, runner->in.nbytes))
        return;
    memcpy(runner->target, runner->aside, (size_t)runner->in.nbytes);
}

/* Counts a transfer that is complete. */
static void count(struct runner *runner, int32_t slot, int64_t nbytes, bool is_sent)
{
    if (runner->recorder == NULL)
        return;
    int32_t rank = runner->ranks[slot];
    struct traffic *traffic = recorder_traffic(runner->recorder, rank);
    struct progress *progress = recorder_progress(runner->recorder);
    count_up(is_sent ? &traffic->sent_bytes : &traffic->received_bytes, nbytes);
    count_up(is_sent ? &traffic->sends : &traffic->receives, 1);
    count_up(is_sent ? &progress->sent : &progress->received, nbytes);
    if (rank < 64)
        atomic_store_explicit(&progress->peers,
                              atomic_load_explicit(&progress->peers, memory_order_relaxed) | (uint64_t)1 << rank,
                              memory_order_relaxed);
}

/* Moves what can be moved; sets *moved, and returns DONE, a reason to return, or NOT_YET. */
static enum reason step(struct runner *runner, bool *moved)
{
    const struct plan *plan = (const struct plan *)runner->plan_object;
    enum outcome outcome;
    if (!runner->is_sending && runner->sent < plan->send_count) {
        const struct send_move *send = &plan->sends[runner->sent];
        if (send->after <= runner->applied) {
            runner->peer = send->peer;
            if (lane_of(runner, send->peer) == NULL)
                return NEEDS_LANE;
            if (send->is_coded && !runner->is_encoded) {
                runner->is_encoded = true;
                return ENCODE;
            }
            runner->is_encoded = false;
            begin_send(runner, send);
        }
    }
    if (runner->is_sending) {
        runner->peer = plan->sends[runner->sent].peer;
        struct lane *lane = lane_of(runner, runner->peer);
        outcome = lane->functions->transmit(lane, &runner->out);
        if (outcome == ENDED)
            return LANE_ENDED;
        if (outcome == MOVED) {
            *moved = true;
            if (runner->out.sent == runner->out.nbytes) {
                runner->is_sending = false;
                runner->sent++;
                count(runner, runner->peer, runner->out.nbytes, true);
            }
        }
    }
    if (!runner->is_receiving && runner->applied < plan->recv_count) {
        const struct recv_move *recv = current_recv(runner);
        runner->peer = recv->peer;
        if (lane_of(runner, recv->peer) == NULL)
            return NEEDS_LANE;
        if (!begin_receive(runner, recv))
            return NO_MEMORY;
    }
    if (runner->is_receiving) {
        const struct recv_move *recv = current_recv(runner);
        struct incoming *in = &runner->in;
        if (in->got < in->nbytes) {
            runner->peer = recv->peer;
            struct lane *lane = lane_of(runner, runner->peer);
            outcome = lane->functions->receive(lane, in);
            if (outcome == ENDED)
                return LANE_ENDED;
            if (outcome == OTHER_HEADER)
                return WRONG_HEADER;
            *moved |= outcome == MOVED;
            runner->change_pending |= in->change_pending;
        }
        if (in->got == in->nbytes && recv->after <= runner->sent) {
            if (recv->is_coded && !runner->is_decoded) {
                runner->is_decoded = true;
                return DECODE;
            }
            runner->is_decoded = false;
            if (runner->is_aside)
                apply(runner, recv);
            runner->is_receiving = false;
            runner->applied++;
            count(runner, recv->peer, in->nbytes, false);
            *moved = true;
        }
        if (runner->is_out_of_memory)
            return NO_MEMORY;
    }
    return runner->sent == plan->send_count && runner->applied == plan->recv_count ? DONE : NOT_YET;
}

static struct lane *sending_lane(struct runner *runner)
{
    const struct plan *plan = (const struct plan *)runner->plan_object;
    return runner->is_sending ? lane_of(runner, plan->sends[runner->sent].peer) : NULL;
}

static struct lane *receiving_lane(struct runner *runner)
{
    return runner->is_receiving && runner->in.got < runner->in.nbytes ? lane_of(runner, current_recv(runner)->peer) : NULL;
}

/* Sleeps until a lane may move, the wake descriptor is readable, or it is time to tell Python of a stall. */
static enum reason sleep_once(struct runner *runner, int64_t now)
{
    struct pollfd polls[1 + 2 * (MOST_STREAMS + 1)];
    struct lane *in = receiving_lane(runner), *out = sending_lane(runner), *parked[2];
    int count = 1, parked_count = 0, ready = 0;
    enum reason reason = NOT_YET;
    polls[0] = (struct pollfd){.fd = runner->wake_fd, .events = POLLIN};
    if (in != NULL)
        parked[parked_count++] = in;
    if (out != NULL && out != in)
        parked[parked_count++] = out;
    for (int index = 0; index < parked_count; index++) {
        struct lane *lane = parked[index];
        int added = lane->functions->park(lane, polls + count, lane == out, lane == in);
        if (added < 0) {
            parked_count = index + 1;
            goto awake;
        }
        count += added;
    }
    int64_t left_ms = (runner->stall_at - now + 999999) / 1000000;
    ready = poll(polls, (nfds_t)count, left_ms > 0 ? (int)(left_ms < 60000 ? left_ms : 60000) : 0);
    if (ready < 0 && errno == EINTR)
        reason = SIGNALS;
    else if (ready > 0 && polls[0].revents)
        reason = STOPPED;
awake:
    for (int index = 0; index < parked_count; index++)
        parked[index]->functions->unpark(parked[index]);
    return reason;
}

/* Whether to look again before sleeping: what is long is not over soon, unless a helper works on it as well. */
static bool is_worth_it(const struct lane *lane, int64_t nbytes)
{
    return lane == NULL || nbytes <= lane->spin_bytes || lane->has_idle_core;
}

/* Neither direction moved: looks again later, or sleeps. */
static enum reason wait_a_moment(struct runner *runner, bool only_look)
{
    struct lane *in = receiving_lane(runner), *out = sending_lane(runner);
    int64_t now = monotonic_ns();
    if (!runner->idle_since) {
        runner->idle_since = now;
        runner->stall_at = now + runner->stall_ns;
    }
    int64_t idle = now - runner->idle_since;
    if (only_look)
        return idle < LOOK_NS && runner->spin_ns ? NOT_YET : STALLED;
    bool is_short = is_worth_it(in, runner->in.nbytes) && is_worth_it(out, runner->out.nbytes);
    if (!runner->has_slept && is_short) {
        if (idle < runner->spin_ns) {
            relax();
            return NOT_YET;
        }
        if (idle < runner->spin_ns + runner->yield_ns) {
            sched_yield();
            return NOT_YET;
        }
    }
    if (now >= runner->stall_at)
        return STALLED;
    runner->has_slept = true;
    return sleep_once(runner, now);
}

enum reason runner_run(struct runner *runner, bool only_look)
{
    int64_t looks = 0;
    for (;;) {
        bool moved = false;
        if (atomic_load_explicit(&runner->stop, memory_order_relaxed))
            return STOPPED;
        enum reason reason = step(runner, &moved);
        if (reason == ENCODE || reason == DECODE)
            runner->idle_since = 0;
        if (reason != NOT_YET)
            return reason;
        bool is_time_to_look = ++looks % LOOKS == 0;
        if (moved) {
            runner->idle_since = 0;
            runner->has_slept = false;
        } else if (!is_time_to_look && runner->spin_ns && !runner->has_slept) {
            relax();
        } else {
            reason = wait_a_moment(runner, only_look);
            if (reason != NOT_YET)
                return only_look && reason == STALLED ? NOT_YET : reason;
        }
        if (only_look && looks == MOST_LOOKS)
            return NOT_YET;
        if (is_time_to_look && !only_look && monotonic_ns() >= runner->signals_at)
            return SIGNALS;
    }
}
