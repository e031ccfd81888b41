/* The memory of a pair of rings, as covey/net/lanes/ring.py describes it, and one end of a lane made of them. */
#ifndef COVEY_RING_H
#define COVEY_RING_H

#include "native.h"

#include <string.h>

enum {
    CONTROL_BYTES = 1024,
    WORDS_PER_LINE = 8,
    WORDS_PER_RING = 32,
    HEAD = 0,
    TAIL = 8,
    WRITER_ASLEEP = 16,
    READER_ASLEEP = 24,
    KERNEL_WORDS = 2 * WORDS_PER_RING, /* for each ring a line that its writer changes, and one that its reader changes */

    TOKEN_WORDS = 4,
    TOKEN_BYTES = 8 * TOKEN_WORDS,
    SIZE_CLASSES = 4,              /* of transfers that the kernel may copy, each with a choice of its own */
    ADDRESS_AT = HEADER_BYTES - 8, /* in the header of one that it copies */
};
enum kernel_copy { NEVER, BY_MEASUREMENT, ALWAYS };
enum reach { NOT_TRIED, READABLE, UNREADABLE };

typedef _Atomic uint64_t word;
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "two processes share these words, and a lock of one is none for the other");

/* The control words and the bytes of one ring. Each word has one writer. */
struct ring_end {
    word *head, *writer_asleep, *token_address, *withdrawn, *token; /* of the end that writes the ring */
    word *tail, *reader_asleep, *wanted, *refused;                  /* of the end that reads it */
    uint8_t *bytes;
    uint64_t position; /* our own: `head` of the ring that we write, `tail` of the one that we read */
};

static inline struct ring_end ring_end_of(uint8_t *memory, uint64_t capacity, int index)
{
    word *words = (word *)memory + index * WORDS_PER_RING;
    word *kernel = (word *)memory + KERNEL_WORDS + index * 2 * WORDS_PER_LINE;
    return (struct ring_end){
        .head = words + HEAD,
        .tail = words + TAIL,
        .writer_asleep = words + WRITER_ASLEEP,
        .reader_asleep = words + READER_ASLEEP,
        .token_address = kernel,
        .withdrawn = kernel + 1,
        .token = kernel + 2,
        .wanted = kernel + WORDS_PER_LINE,
        .refused = kernel + WORDS_PER_LINE + 1,
        .bytes = memory + CONTROL_BYTES + (uint64_t)index * capacity,
    };
}

/* Whether two rings of `capacity` fit into the memory; else sets a Python error. */
static inline bool ring_fits(const Py_buffer *memory, long long capacity)
{
    if (capacity > 0 && capacity % LINE_BYTES == 0 && capacity <= (memory->len - CONTROL_BYTES) / 2 &&
        (uintptr_t)memory->buf % sizeof(uint64_t) == 0)
        return true;
    PyErr_SetString(PyExc_ValueError, "the memory is too small for two rings of this capacity, or not aligned");
    return false;
}

/* Rings the other end's doorbell if it has marked itself asleep; our position was stored before. */
static inline void ring_wake_if(int doorbell, word *asleep)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(asleep, memory_order_relaxed)) {
        /* A full doorbell has rung already; a closed one is found when its owner is needed. */
        ssize_t ignored = send(doorbell, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        (void)ignored;
    }
}

/* How long transfers of one class of sizes take: through the ring, and by the kernel. */
struct ways {
    int64_t ns[2]; /* for 256 KiB; 0: not measured */
    uint64_t count;
};

struct ring_lane {
    struct lane base;
    struct ring_end out, in;
    uint64_t capacity;
    int doorbell;
    bool peer_is_gone, parked_sending, parked_receiving;

    enum kernel_copy kernel_copy;
    uint8_t token[TOKEN_BYTES]; /* that the peer reads out of this process */
    int peer;                   /* its process; 0 if that is not known */
    bool awaits_reader;         /* of the transfer that is being sent */
    enum reach reach;           /* whether the peer's memory can be read */
    uint64_t address;           /* of the payload that is being received in the peer's memory, or 0 */
    uint64_t wanted;            /* what this end asks for */
    int64_t begun_ns;           /* when the header of the current large transfer came */
    struct ways ways[SIZE_CLASSES];
};

enum outcome ring_nothing_moved(struct ring_lane *ring);

/* Copies by the kernel (kernel_copy.c) */
int kernel_size_class(const struct ring_lane *ring, int64_t nbytes);
void kernel_offer(struct ring_lane *ring);
void kernel_try(struct ring_lane *ring);
uint64_t kernel_take_address(uint8_t header[HEADER_BYTES]);
enum outcome kernel_receive(struct ring_lane *ring, struct incoming *in);
void kernel_choose(struct ring_lane *ring, int64_t nbytes, bool was_kernel);
void kernel_withdraw(struct ring_lane *ring);
bool kernel_is_withdrawn(const struct ring_lane *ring);

#endif
