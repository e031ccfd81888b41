/* Large transfers that the kernel copies, once, from the memory of the sending process: a ring copies in and out.
 *
 * Only the header goes through the ring, with the address of the payload in its last word; the reader calls
 * process_vm_readv (Linux). Invariants:
 *   - The reader asks for it (`wanted`), after it has read a random token of the writer out of that process. Which process
 *     it reads is what the kernel says of the other end of the doorbell, and the kernel lets a process read only those that
 *     it could also trace. So a peer can make this process read nothing but the peer's own memory.
 *   - The reader moves `tail` past the header when it has the whole payload. Until then the transfer is not sent, and the
 *     writer's memory stays as it is. If the kernel cannot read it (memory of a device, say), the reader notes that in
 *     `refused` before it moves `tail`, and the payload follows through the ring.
 *   - A writer that gives up sets `withdrawn`, with a fence, before the memory may change. The reader looks at it after each
 *     copy, and before it counts the copied bytes: what it counts was not changed.
 *   - After the last copy the doorbell must still be open. So its process lived, and its number was no other process's.
 * The reader decides by measurement: it compares how long transfers take both ways, from their headers to their ends.
 * Which way is faster depends on the machine, and on whether both ends have a core at the same time.
 */
#include "ring.h"

#include <errno.h>
#include <sys/uio.h>

enum {
    LEAST_BYTES = 1 << 18, /* transfers from this on may be copied by the kernel */
    STEP_BYTES = 1 << 20,  /* copied by one call: some 100 us */
    FIRST_TRIES = 8,       /* transfers that take both ways in turn */
    TRY_AGAIN = 64,        /* transfers after which the slower way is measured again */
};

/* The class of a transfer's size, by powers of four; -1 for those that go through the ring in any case. */
int kernel_size_class(const struct ring_lane *ring, int64_t nbytes)
{
    int found = 0;
    if (ring->kernel_copy == NEVER || nbytes < LEAST_BYTES)
        return -1;
    while (found < SIZE_CLASSES - 1 && nbytes >= (int64_t)LEAST_BYTES << 2 * (found + 1))
        found++;
    return found;
}

/* Finds out which process the peer is, and lets it find out whether it can read this one. */
void kernel_offer(struct ring_lane *ring)
{
#if defined(__linux__)
    struct ucred peer;
    socklen_t room = sizeof peer;
    if (getsockopt(ring->doorbell, SOL_SOCKET, SO_PEERCRED, &peer, &room) == 0)
        ring->peer = peer.pid;
#endif
    for (int index = 0; index < TOKEN_WORDS; index++) {
        uint64_t value;
        memcpy(&value, ring->token + 8 * index, sizeof value);
        atomic_store_explicit(ring->out.token + index, value, memory_order_relaxed);
    }
    atomic_store_explicit(ring->out.token_address, (uintptr_t)ring->token, memory_order_release);
}

static int64_t read_peer(const struct ring_lane *ring, uint64_t address, uint8_t *into, int64_t nbytes)
{
#if defined(__linux__)
    struct iovec here = {into, (size_t)nbytes}, there = {(void *)(uintptr_t)address, (size_t)nbytes};
    return process_vm_readv(ring->peer, &here, 1, &there, 1, 0);
#else
    (void)ring, (void)address, (void)into, (void)nbytes;
    errno = ENOSYS;
    return -1;
#endif
}

/* Finds out, once, whether the peer's memory can be read; the peer has to say first where its token is. */
void kernel_try(struct ring_lane *ring)
{
    uint64_t address = atomic_load_explicit(ring->in.token_address, memory_order_acquire);
    uint64_t told[TOKEN_WORDS], found[TOKEN_WORDS];
    if (ring->kernel_copy == NEVER || ring->reach != NOT_TRIED || !address || !ring->peer)
        return;
    for (int index = 0; index < TOKEN_WORDS; index++)
        told[index] = atomic_load_explicit(ring->in.token + index, memory_order_relaxed);
    bool is_same = read_peer(ring, address, (uint8_t *)found, TOKEN_BYTES) == TOKEN_BYTES && !memcmp(told, found, TOKEN_BYTES);
    ring->reach = is_same ? READABLE : UNREADABLE;
    if (is_same && ring->kernel_copy == ALWAYS)
        atomic_store_explicit(ring->in.wanted, UINT64_MAX, memory_order_relaxed);
}

/* Takes the address out of a header that has arrived, and leaves the header as it is compared. */
uint64_t kernel_take_address(uint8_t header[HEADER_BYTES])
{
    uint64_t address = get_word(header + ADDRESS_AT);
    put_word(header + ADDRESS_AT, 0);
    return address;
}

/* Whether the writer's process still has its end of the doorbell. */
static bool is_there(const struct ring_lane *ring)
{
    struct pollfd doorbell = {.fd = ring->doorbell};
    int found;
    do
        found = poll(&doorbell, 1, 0);
    while (found < 0 && errno == EINTR);
    return found == 0;
}

/* Whether the peer has given up the transfer that is being received. It tells why over the link. */
bool kernel_is_withdrawn(const struct ring_lane *ring)
{
    return ring->address && atomic_load_explicit(ring->in.withdrawn, memory_order_relaxed);
}

void kernel_withdraw(struct ring_lane *ring)
{
    atomic_store_explicit(ring->out.withdrawn, 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}

/* Moves past the header: the payload is here, or was refused. */
static enum outcome acknowledge(struct ring_lane *ring)
{
    ring->address = 0;
    ring->in.position += HEADER_BYTES;
    atomic_store_explicit(ring->in.tail, ring->in.position, memory_order_release);
    ring_wake_if(ring->doorbell, ring->in.writer_asleep);
    return MOVED;
}

/* Lets the payload come through the ring, from its beginning, and asks for no more addresses. */
static enum outcome refuse(struct ring_lane *ring, struct incoming *in)
{
    in->got = 0;
    ring->reach = UNREADABLE;
    atomic_store_explicit(ring->in.wanted, 0, memory_order_relaxed);
    atomic_store_explicit(ring->in.refused, ring->in.position + HEADER_BYTES, memory_order_relaxed);
    return acknowledge(ring);
}

/* Copies the next part of the payload out of the peer's memory. */
enum outcome kernel_receive(struct ring_lane *ring, struct incoming *in)
{
    if (kernel_is_withdrawn(ring))
        return ring_nothing_moved(ring);
    int64_t step = smaller(in->nbytes - in->got, STEP_BYTES);
    int64_t taken = read_peer(ring, ring->address + (uint64_t)in->got, in->dest + in->got, step);
    if (taken < 0 && errno == ESRCH)
        return lane_ended(&ring->base, "the peer has exited");
    if (taken <= 0)
        return refuse(ring, in);
    atomic_thread_fence(memory_order_acquire);
    if (kernel_is_withdrawn(ring))
        return ring_nothing_moved(ring);
    if (in->got + taken == in->nbytes && !is_there(ring))
        return lane_ended(&ring->base, "the peer closed its doorbell");
    in->got += taken;
    if (in->got < in->nbytes)
        return MOVED;
    ring->base.kernel_copies++;
    kernel_choose(ring, in->nbytes, true);
    return acknowledge(ring);
}

/* After a large transfer: notes how long it took from its header to its end, and decides which way the next one takes. */
void kernel_choose(struct ring_lane *ring, int64_t nbytes, bool was_kernel)
{
    int size = kernel_size_class(ring, nbytes);
    struct ways *ways = &ring->ways[size];
    int64_t each = (monotonic_ns() - ring->begun_ns) * LEAST_BYTES / nbytes + 1, *ns = &ways->ns[was_kernel];
    /* An average in which one that was interrupted counts no more than twice. */
    *ns = *ns ? *ns + (smaller(each, 2 * *ns) - *ns) / 4 : each;
    if (ring->reach != READABLE || ring->kernel_copy == ALWAYS)
        return;
    uint64_t count = ways->count++;
    bool is_wanted = count < FIRST_TRIES ? count % 2 == 0 : (ways->ns[1] < ways->ns[0]) != (count % TRY_AGAIN == 0);
    ring->wanted = (ring->wanted & ~((uint64_t)1 << size)) | (uint64_t)is_wanted << size;
    atomic_store_explicit(ring->in.wanted, ring->wanted, memory_order_relaxed);
}
