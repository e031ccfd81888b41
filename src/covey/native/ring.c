/* A lane through memory that both ends can see: one ring of bytes in each direction.
 *
 * The layout is that of covey/net/lanes/ring.py, and either end may be Python. Invariants:
 *   - Each control word has one writer: a ring's writer moves `head`, its reader moves `tail`, and each end marks itself
 *     asleep in a word of its own. Nothing locks, so a killed peer leaves nothing locked.
 *   - head - tail is the number of bytes in the ring: whole lines, between 0 and its capacity. A peer that breaks this has
 *     ended the lane; no byte outside of the ring is ever touched.
 *   - `head` is stored with release after the bytes before it, and loaded with acquire before they are read; `tail`
 *     likewise for the room that it frees.
 *   - Transfers start at multiples of LINE_BYTES, and a piece is whole lines unless it is the last one of its transfer.
 *   - Before an end sleeps it stores its mark and then loads the other's position; after a move an end stores its
 *     position and then loads the other's mark. A sequentially consistent fence stands in between, so one of them sees
 *     the other: no wake-up is lost.
 */
#include "ring.h"

#include <errno.h>

enum {
    PIECE_BYTES = 1 << 17, /* published at once: the other end starts on it while the next one is copied */
};

struct ring_lane {
    struct lane base;
    struct ring_end out, in;
    uint64_t capacity;
    int doorbell;
    bool peer_is_gone, parked_sending, parked_receiving;
};

const size_t ring_size = sizeof(struct ring_lane);

static uint64_t whole_lines(uint64_t nbytes) { return (nbytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES; }

/* The bytes to move at once, of `left` in the transfer, `there` in the ring, and `until_end` before the ring's end. */
static uint64_t next_piece(uint64_t left, uint64_t there, uint64_t until_end)
{
    uint64_t step = (uint64_t)smaller(smaller((int64_t)left, PIECE_BYTES), smaller((int64_t)there, (int64_t)until_end));
    return step < left ? step - step % LINE_BYTES : step;
}

static enum outcome nothing_moved(struct ring_lane *ring)
{
    return ring->peer_is_gone ? lane_ended(&ring->base, "the peer closed its doorbell") : IDLE;
}

static enum outcome corrupt(struct ring_lane *ring)
{
    return lane_ended(&ring->base, "the peer wrote an impossible position into the shared memory");
}

static enum outcome ring_transmit(struct lane *lane, struct outgoing *out)
{
    struct ring_lane *ring = (struct ring_lane *)lane;
    struct ring_end *end = &ring->out;
    uint64_t head = end->position, capacity = ring->capacity;
    uint64_t used = head - atomic_load_explicit(end->tail, memory_order_acquire);
    if (used > capacity || used % LINE_BYTES)
        return corrupt(ring);
    uint64_t room = capacity - used;
    if (out->sent < 0) {
        if (room < HEADER_BYTES)
            return nothing_moved(ring);
        memcpy(end->bytes + head % capacity, out->header, HEADER_BYTES);
        head += HEADER_BYTES;
        room -= HEADER_BYTES;
        out->sent = 0;
    }
    uint64_t left = (uint64_t)(out->nbytes - out->sent);
    if (left) {
        uint64_t at = head % capacity;
        uint64_t step = next_piece(left, room, capacity - at);
        memcpy(end->bytes + at, out->data + out->sent, step);
        out->sent += (int64_t)step;
        head += whole_lines(step);
    }
    if (head == end->position)
        return nothing_moved(ring);
    end->position = head;
    atomic_store_explicit(end->head, head, memory_order_release);
    ring_wake_if(ring->doorbell, end->reader_asleep);
    return MOVED;
}

static enum outcome ring_receive(struct lane *lane, struct incoming *in)
{
    struct ring_lane *ring = (struct ring_lane *)lane;
    struct ring_end *end = &ring->in;
    uint64_t tail = end->position, capacity = ring->capacity;
    uint64_t available = atomic_load_explicit(end->head, memory_order_acquire) - tail;
    if (available > capacity || available % LINE_BYTES)
        return corrupt(ring);
    if (in->got < 0) {
        if (available < HEADER_BYTES)
            return nothing_moved(ring);
        memcpy(in->header, end->bytes + tail % capacity, HEADER_BYTES); /* a copy that the peer cannot change */
        if (!header_matches(in))
            return OTHER_HEADER;
        tail += HEADER_BYTES;
        available -= HEADER_BYTES;
        in->got = 0;
    }
    uint64_t left = (uint64_t)(in->nbytes - in->got);
    uint64_t at = tail % capacity;
    uint64_t step = next_piece(left, available, capacity - at);
    if (step) {
        if (in->dest != NULL)
            memcpy(in->dest + in->got, end->bytes + at, step);
        else
            in->absorb(in, in->got, end->bytes + at, (int64_t)step);
        in->got += (int64_t)step;
        tail += whole_lines(step);
    }
    if (tail == end->position)
        return nothing_moved(ring);
    end->position = tail;
    atomic_store_explicit(end->tail, tail, memory_order_release);
    ring_wake_if(ring->doorbell, end->writer_asleep);
    return MOVED;
}

static int ring_park(struct lane *lane, struct pollfd *polls, bool sending, bool receiving)
{
    struct ring_lane *ring = (struct ring_lane *)lane;
    ring->parked_sending = sending;
    ring->parked_receiving = receiving;
    if (sending)
        atomic_store_explicit(ring->out.writer_asleep, 1, memory_order_relaxed);
    if (receiving)
        atomic_store_explicit(ring->in.reader_asleep, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
    if (receiving && atomic_load_explicit(ring->in.head, memory_order_acquire) != ring->in.position)
        return -1;
    if (sending) {
        uint64_t used = ring->out.position - atomic_load_explicit(ring->out.tail, memory_order_acquire);
        if (used > ring->capacity || ring->capacity - used >= HEADER_BYTES)
            return -1;
    }
    if (ring->peer_is_gone)
        return -1;
    polls[0] = (struct pollfd){.fd = ring->doorbell, .events = POLLIN};
    return 1;
}

static void ring_unpark(struct lane *lane)
{
    struct ring_lane *ring = (struct ring_lane *)lane;
    char rung[4096];
    ssize_t count;
    if (ring->parked_sending)
        atomic_store_explicit(ring->out.writer_asleep, 0, memory_order_relaxed);
    if (ring->parked_receiving)
        atomic_store_explicit(ring->in.reader_asleep, 0, memory_order_relaxed);
    ring->parked_sending = ring->parked_receiving = false;
    do
        count = recv(ring->doorbell, rung, sizeof rung, MSG_DONTWAIT);
    while (count == sizeof rung);
    if (count == 0 || (count < 0 && !would_block(errno)))
        ring->peer_is_gone = true;
}

static bool ring_peek(struct lane *lane, uint8_t header[HEADER_BYTES])
{
    struct ring_lane *ring = (struct ring_lane *)lane;
    uint64_t available = atomic_load_explicit(ring->in.head, memory_order_acquire) - ring->in.position;
    if (available < HEADER_BYTES || available > ring->capacity)
        return false;
    memcpy(header, ring->in.bytes + ring->in.position % ring->capacity, HEADER_BYTES);
    return true;
}

static void ring_cancel(struct lane *lane) { (void)lane; }

static void ring_close(struct lane *lane) { ((struct ring_lane *)lane)->doorbell = -1; }

static void ring_release(struct lane *lane) { (void)lane; }

static const struct lane_functions ring_functions = {
    ring_transmit, ring_receive, ring_park, ring_unpark, ring_peek, ring_cancel, ring_close, ring_release,
};

/* Ring(memory, capacity, doorbell, first) */
int ring_init(PyObject *self, PyObject *args)
{
    struct lane *lane = (struct lane *)self;
    struct ring_lane *ring = (struct ring_lane *)self;
    PyObject *memory;
    long long capacity;
    int doorbell, first;
    if (!PyArg_ParseTuple(args, "OLip", &memory, &capacity, &doorbell, &first))
        return -1;
    if (PyObject_GetBuffer(memory, &lane->memory, PyBUF_WRITABLE) < 0)
        return -1;
    if (!ring_fits(&lane->memory, capacity))
        return -1;
    ring->capacity = (uint64_t)capacity;
    ring->out = ring_end_of(lane->memory.buf, ring->capacity, first ? 0 : 1);
    ring->in = ring_end_of(lane->memory.buf, ring->capacity, first ? 1 : 0);
    ring->doorbell = doorbell;
    lane->functions = &ring_functions;
    lane->spin_bytes = INT64_MAX;
    lane->python_bytes = INT64_MAX;
    return 0;
}
