/* The frames of messages in a pair of rings: read, written, acknowledged, and waited for.
 *
 * The stream of frames is that of covey/proto/message_link.py. No function here needs the interpreter's lock; the rules
 * about which thread may call them are in messages.c. A position that the peer has written is compared with our own before
 * it is used, and a header is copied before it is looked at.
 */
#include "messages.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { MAGIC = 0xC0FE, FRAME_VERSION = 1 };
static const int64_t SLEEP_NS = 1000 * 1000 * 1000; /* the longest sleep: descriptors may be closed meanwhile */
static const int64_t LOST_NS = 50 * 1000;           /* between two looks at the clock: another program had the core */
static const int64_t CROWDED_NS = 20 * 1000 * 1000; /* for which a thread then sleeps at once, and is woken in its turn */

/* Rings */

uint64_t frames_readable(const struct message_end *end)
{
    return atomic_load_explicit(end->in.head, memory_order_acquire) - end->in.position;
}

uint64_t frames_writable(const struct message_end *end)
{
    uint64_t used = end->out.position - atomic_load_explicit(end->out.tail, memory_order_acquire);
    return used <= end->capacity ? end->capacity - used : 0;
}

void frames_copy_out(const struct message_end *end, uint64_t offset, uint8_t *to, uint64_t nbytes)
{
    uint64_t at = (end->in.position + offset) % end->capacity, first = end->capacity - at;
    first = nbytes < first ? nbytes : first;
    memcpy(to, end->in.bytes + at, first);
    memcpy(to + first, end->in.bytes, nbytes - first);
}

/* Wakes the peer, if it sleeps, for what was written and read and not told yet. */
void frames_ring(struct message_end *end)
{
    if (end->unrung_out)
        ring_wake_if(end->doorbell, end->out.reader_asleep);
    if (end->unrung_in)
        ring_wake_if(end->doorbell, end->in.writer_asleep);
    end->unrung_out = end->unrung_in = 0;
}

/* Frees `nbytes` of the ring. A peer that sleeps is woken when half of the ring is free, or by `frames_ring`, which must
 * follow before this thread waits or ends: two ranks that share a core would else change places after every step. */
void frames_consume_part(struct message_end *end, uint64_t nbytes)
{
    end->received += nbytes;
    end->in.position += nbytes;
    atomic_store_explicit(end->in.tail, end->in.position, memory_order_release);
    end->unrung_in += nbytes;
    if (end->unrung_in >= end->capacity / 2)
        frames_ring(end);
}

void frames_consume(struct message_end *end, uint64_t nbytes)
{
    frames_consume_part(end, nbytes);
    frames_ring(end);
}

/* Writes to the ring what becomes visible with `frames_publish`; there is room for it. */
void frames_write(const struct message_end *end, uint64_t offset, const uint8_t *from, uint64_t nbytes)
{
    uint64_t at = (end->out.position + offset) % end->capacity, first = end->capacity - at;
    first = nbytes < first ? nbytes : first;
    memcpy(end->out.bytes + at, from, first);
    memcpy(end->out.bytes, from + first, nbytes - first);
}

/* Lets the peer see `nbytes` that were written; for a peer that sleeps, see `frames_consume_part`. */
void frames_publish_part(struct message_end *end, uint64_t nbytes)
{
    end->sent += nbytes;
    end->out.position += nbytes;
    atomic_store_explicit(end->out.head, end->out.position, memory_order_release);
    end->unrung_out += nbytes;
    if (end->unrung_out >= end->capacity / 2)
        frames_ring(end);
}

void frames_publish(struct message_end *end, uint64_t nbytes)
{
    frames_publish_part(end, nbytes);
    frames_ring(end);
}

/* Frames */

/* Makes room to keep `nbytes` more. */
bool frames_reserve(struct message_end *end, uint64_t nbytes)
{
    if (end->kept_at + end->kept_bytes + nbytes <= end->kept_room)
        return true;
    if (end->kept_at)
        memmove(end->kept, end->kept + end->kept_at, end->kept_bytes);
    end->kept_at = 0;
    uint64_t room = 2 * (end->kept_bytes + nbytes);
    if (room <= end->kept_room)
        return true;
    uint8_t *kept = realloc(end->kept, room);
    if (kept == NULL)
        return false;
    end->kept = kept;
    end->kept_room = room;
    return true;
}

void frames_encode(const struct frame *frame, uint8_t data[FRAME_BYTES + 8 * MOST_AXES])
{
    const uint8_t fixed[8] = {
        MAGIC & 0xFF, MAGIC >> 8, FRAME_VERSION, frame->kind, frame->content, frame->dtype, frame->axes, 0,
    };
    memcpy(data, fixed, sizeof fixed);
    put_word(data + 8, (uint64_t)frame->tag);
    put_word(data + 16, frame->id);
    put_word(data + 24, frame->nbytes);
    for (int axis = 0; axis < frame->axes; axis++)
        put_word(data + FRAME_BYTES + 8 * axis, (uint64_t)frame->shape[axis]);
}

/* Writes a frame to the ring, which has room for it, and keeps it. */
bool frames_push(struct message_end *end, const struct frame *frame, const uint8_t *payload, uint64_t nbytes)
{
    uint64_t header = FRAME_BYTES + 8 * (uint64_t)frame->axes;
    uint8_t data[FRAME_BYTES + 8 * MOST_AXES];
    if (!frames_reserve(end, header + nbytes))
        return false;
    frames_encode(frame, data);
    frames_write(end, 0, data, header);
    if (nbytes)
        frames_write(end, header, payload, nbytes);
    frames_publish(end, header + nbytes);
    uint8_t *kept = end->kept + end->kept_at + end->kept_bytes;
    memcpy(kept, data, header); /* now, while the peer reads it */
    if (nbytes)
        memcpy(kept + header, payload, nbytes);
    end->kept_bytes += header + nbytes;
    return true;
}

/* Reads the next header: NOTHING if it is not all here, OTHER if Python has to look at it. */
enum found frames_peek(const struct message_end *end, struct frame *frame)
{
    uint8_t header[FRAME_BYTES + 8 * MOST_AXES]; /* a copy that the peer cannot change */
    uint64_t there = frames_readable(end);
    if (there > end->capacity)
        return OTHER;
    if (there < FRAME_BYTES)
        return NOTHING;
    frames_copy_out(end, 0, header, FRAME_BYTES);
    frame->kind = header[3];
    frame->content = header[4];
    frame->dtype = header[5];
    frame->axes = header[6];
    frame->tag = (int64_t)get_word(header + 8);
    frame->id = get_word(header + 16);
    frame->nbytes = get_word(header + 24);
    if (header[0] != (MAGIC & 0xFF) || header[1] != MAGIC >> 8 || header[2] != FRAME_VERSION || frame->axes > MOST_AXES)
        return OTHER;
    if (there < FRAME_BYTES + 8 * (uint64_t)frame->axes)
        return NOTHING;
    frames_copy_out(end, FRAME_BYTES, header + FRAME_BYTES, 8 * (uint64_t)frame->axes);
    for (int axis = 0; axis < frame->axes; axis++)
        frame->shape[axis] = (Py_ssize_t)get_word(header + FRAME_BYTES + 8 * axis);
    return TAKEN;
}

/* Acknowledgements and credit, as MessageLink gives and takes them */

/* Tells the peer how much of its stream is here. */
bool frames_acknowledge(struct message_end *end)
{
    const struct frame frame = {.kind = ACK, .nbytes = end->received};
    if (!frames_push(end, &frame, NULL, 0))
        return false;
    end->unacknowledged = 0;
    return true;
}

/* The same, if it is time after a frame of this cost. While a long message is sent, nothing else is: a later frame has the
 * acknowledgement sent. */
bool frames_acknowledge_after(struct message_end *end, int64_t cost)
{
    end->unacknowledged += cost;
    if (end->unacknowledged < end->ack_batch || end->message.direction == SENDING)
        return true;
    return frames_acknowledge(end);
}

bool frames_give_credit(struct message_end *end)
{
    if (!end->owed || (end->owed < end->credit_batch && end->held < end->credit_bytes))
        return true;
    const struct frame frame = {.kind = CREDIT, .nbytes = (uint64_t)end->owed};
    if (!frames_push(end, &frame, NULL, 0))
        return false;
    end->held -= end->owed;
    end->owed = 0;
    return true;
}

/* Notes that the peer has so many bytes of our stream, and drops those that were kept. */
static void note_arrived(struct message_end *end, uint64_t position)
{
    if (position <= end->has)
        return;
    end->has = position;
    /* What is kept ends where the payload of a long message begins, which stays in the memory of its array. */
    uint64_t ends = end->message.direction == SENDING ? end->message.begins : end->sent;
    uint64_t missing = position < ends ? ends - position : 0;
    if (missing < end->kept_bytes) {
        end->kept_at += end->kept_bytes - missing;
        end->kept_bytes = missing;
    }
}

/* Takes the ACK and CREDIT frames that are next. Others stay, and those that cannot be. */
bool frames_take_control(struct message_end *end)
{
    struct frame frame;
    bool is_sending = end->message.direction == SENDING; /* then no acknowledgement is sent */
    while ((is_sending || frames_writable(end) >= FRAME_BYTES) && frames_peek(end, &frame) == TAKEN) {
        bool is_plain = !frame.tag && !frame.content && !frame.dtype && !frame.axes && !frame.id;
        bool is_ack = frame.kind == ACK && frame.nbytes <= end->sent;
        bool is_credit = frame.kind == CREDIT && frame.nbytes <= (uint64_t)end->used;
        if (!is_plain || (!is_ack && !is_credit))
            return true;
        if (is_credit)
            end->used -= (int64_t)frame.nbytes;
        else
            note_arrived(end, frame.nbytes);
        frames_consume(end, FRAME_BYTES);
        if (!frames_acknowledge_after(end, end->header_cost))
            return false;
    }
    return true;
}

/* Waiting */

/* Waits until a word that the peer writes is not `seen` any more; `asleep` is our mark for it. Returns 0, or an error
 * number: EINTR for a signal, ECANCELED if Python has to go on. Changes nothing but the mark. */
int frames_wait(struct message_end *end, word *watched, word *asleep, uint64_t seen, uint64_t turn, int64_t until)
{
    int64_t since = monotonic_ns(), now = since;
    if (since >= until)
        return ECANCELED;
    bool is_crowded = now < atomic_load_explicit(&end->crowded_until, memory_order_relaxed);
    for (int looks = 1; !is_crowded && now - since < end->spin_ns + end->yield_ns; looks++) {
        if (atomic_load_explicit(watched, memory_order_acquire) != seen)
            return 0;
        if (!is_turn(end, turn))
            return ECANCELED;
        if (now - since < end->spin_ns)
            relax();
        else
            sched_yield();
        if (looks % LOOKS == 0 || now - since >= end->spin_ns) {
            int64_t before = now;
            now = monotonic_ns();
            is_crowded = now - before > LOST_NS;
        }
    }
    if (is_crowded && now >= atomic_load_explicit(&end->crowded_until, memory_order_relaxed))
        atomic_store_explicit(&end->crowded_until, now + CROWDED_NS, memory_order_relaxed);
    struct pollfd polls[3] = {
        {.fd = end->doorbell, .events = POLLIN},
        {.fd = end->bell, .events = POLLIN},
        {.fd = end->wake, .events = POLLIN},
    };
    while (now < until) {
        atomic_store_explicit(asleep, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit(watched, memory_order_acquire) != seen)
            return 0;
        if (!is_turn(end, turn))
            return ECANCELED;
        int64_t left = smaller(until - now, SLEEP_NS);
        int ready = poll(polls, 3, (int)((left + 999999) / 1000000));
        if (ready < 0)
            return errno;
        if (polls[1].revents || polls[2].revents)
            return ECANCELED;
        if (ready)
            return 0;
        now = monotonic_ns();
        if (left == SLEEP_NS)
            return EINTR; /* a signal may have come to another thread */
    }
    return ECANCELED;
}

/* The thread is awake again, and its turn lasts: clears its mark; false if the peer has hung up. */
bool frames_wake_up(struct message_end *end, word *asleep)
{
    char rung[64];
    if (!atomic_load_explicit(asleep, memory_order_relaxed))
        return true;
    atomic_store_explicit(asleep, 0, memory_order_relaxed);
    ssize_t count = recv(end->doorbell, rung, sizeof rung, MSG_DONTWAIT);
    return count > 0 || (count < 0 && would_block(errno));
}
