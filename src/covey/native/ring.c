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
 *
 * kernel_copy.c has the other way for large transfers.
 */
#include "ring.h"

#include <errno.h>
#include <unistd.h>

enum { PIECE_BYTES = 1 << 17 }; /* published at once: the other end starts on it while the next one is copied */

static uint64_t whole_lines(uint64_t nbytes) { return (nbytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES; }

/* The bytes to move at once, of `left` in the transfer, `there` in the ring, and `until_end` before the ring's end. */
static uint64_t next_piece(uint64_t left, uint64_t there, uint64_t until_end)
{
    uint64_t step = (uint64_t)smaller(smaller((int64_t)left, PIECE_BYTES), smaller((int64_t)there, (int64_t)until_end));
    return step < left ? step - step % LINE_BYTES : step;
}

enum outcome ring_nothing_moved(struct ring_lane *ring)
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
    if (ring->awaits_reader) {
        if (used)
            return ring_nothing_moved(ring);
        ring->awaits_reader = false;
        if (atomic_load_explicit(end->refused, memory_order_relaxed) != head) {
            out->sent = out->nbytes;
            return MOVED;
        }
    }
    uint64_t room = capacity - used;
    if (out->sent < 0) {
        if (room < HEADER_BYTES)
            return ring_nothing_moved(ring);
        uint8_t *header = end->bytes + head % capacity;
        memcpy(header, out->header, HEADER_BYTES);
        head += HEADER_BYTES;
        room -= HEADER_BYTES;
        out->sent = 0;
        int size = out->is_stored ? kernel_size_class(ring, out->nbytes) : -1;
        if (size >= 0 && atomic_load_explicit(end->wanted, memory_order_relaxed) >> size & 1) {
            put_word(header + ADDRESS_AT, (uintptr_t)out->data);
            ring->awaits_reader = true;
        }
    }
    uint64_t left = ring->awaits_reader ? 0 : (uint64_t)(out->nbytes - out->sent);
    if (left) {
        uint64_t at = head % capacity;
        uint64_t step = next_piece(left, room, capacity - at);
        memcpy(end->bytes + at, out->data + out->sent, step);
        out->sent += (int64_t)step;
        head += whole_lines(step);
    }
    if (head == end->position)
        return ring_nothing_moved(ring);
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
    bool is_large = in->dest != NULL && kernel_size_class(ring, in->nbytes) >= 0;
    if (in->got < 0) {
        if (available < HEADER_BYTES)
            return ring_nothing_moved(ring);
        memcpy(in->header, end->bytes + tail % capacity, HEADER_BYTES); /* a copy that the peer cannot change */
        ring->address = is_large && ring->reach == READABLE ? kernel_take_address(in->header) : 0;
        if (!header_matches(in)) /* also with an address that was not asked for */
            return OTHER_HEADER;
        kernel_try(ring);
        if (is_large)
            ring->begun_ns = monotonic_ns();
        in->got = 0;
        if (!ring->address) {
            tail += HEADER_BYTES;
            available -= HEADER_BYTES;
        }
    }
    if (ring->address)
        return kernel_receive(ring, in);
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
        if (in->got == in->nbytes && is_large)
            kernel_choose(ring, in->nbytes, false);
    }
    if (tail == end->position)
        return ring_nothing_moved(ring);
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
    if (receiving && !kernel_is_withdrawn(ring) &&
        atomic_load_explicit(ring->in.head, memory_order_acquire) != ring->in.position)
        return -1;
    if (sending) {
        uint64_t used = ring->out.position - atomic_load_explicit(ring->out.tail, memory_order_acquire);
        if (used > ring->capacity || (ring->awaits_reader ? !used : ring->capacity - used >= HEADER_BYTES))
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
    kernel_take_address(header);
    return true;
}

/* The memory of the transfer may change when this returns. The lane sends nothing afterwards. */
static void ring_cancel(struct lane *lane)
{
    struct ring_lane *ring = (struct ring_lane *)lane;
    if (ring->awaits_reader)
        kernel_withdraw(ring);
}

static void ring_close(struct lane *lane) { ((struct ring_lane *)lane)->doorbell = -1; }

static void ring_release(struct lane *lane)
{
    if (lane->owns_descriptors)
        close(((struct ring_lane *)lane)->doorbell);
}

static const struct lane_functions ring_functions = {
    ring_transmit, ring_receive, ring_park, ring_unpark, ring_peek, ring_cancel, ring_close, ring_release,
};

/* Ring(memory, capacity, doorbell, first, token, kernel copies: 0 never, 1 by measurement, 2 always) */
static int ring_fill(PyObject *self, PyObject *args)
{
    struct lane *lane = (struct lane *)self;
    struct ring_lane *ring = (struct ring_lane *)self;
    PyObject *memory;
    long long capacity;
    const char *token;
    Py_ssize_t token_bytes;
    int doorbell, first, kernel_copy;
    if (!PyArg_ParseTuple(args, "OLipy#i", &memory, &capacity, &doorbell, &first, &token, &token_bytes, &kernel_copy))
        return -1;
    if (PyObject_GetBuffer(memory, &lane->memory, PyBUF_WRITABLE) < 0)
        return -1;
    if (!ring_fits(&lane->memory, capacity))
        return -1;
    if (token_bytes != TOKEN_BYTES || kernel_copy < NEVER || kernel_copy > ALWAYS) {
        PyErr_SetString(PyExc_ValueError, "a token has 32 bytes, and the kernel copies never, by measurement or always");
        return -1;
    }
    ring->capacity = (uint64_t)capacity;
    ring->out = ring_end_of(lane->memory.buf, ring->capacity, first ? 0 : 1);
    ring->in = ring_end_of(lane->memory.buf, ring->capacity, first ? 1 : 0);
    ring->doorbell = doorbell;
    ring->kernel_copy = (enum kernel_copy)kernel_copy;
    memcpy(ring->token, token, TOKEN_BYTES);
    if (ring->kernel_copy != NEVER)
        kernel_offer(ring);
    lane->functions = &ring_functions;
    lane->spin_bytes = INT64_MAX;
    lane->python_bytes = INT64_MAX;
    return 0;
}

struct kind ring_kind = {
    .name = "covey._native.Ring",
    .size = sizeof(struct ring_lane),
    .fill = ring_fill,
    .release = lane_release,
    .methods = lane_methods,
    .members = lane_members,
};
