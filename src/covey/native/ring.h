/* One end of a pair of rings, as ring.c, kernel_copy.c and messages.c use it. */
#ifndef COVEY_RING_H
#define COVEY_RING_H

#include "native.h"

typedef _Atomic uint64_t word;

enum {
    CONTROL_BYTES = 1024,
    WORDS_PER_RING = 32,
    WORDS_PER_LINE = 8,
    HEAD = 0,
    TAIL = 8,
    WRITER_ASLEEP = 16,
    READER_ASLEEP = 24,
    TOKEN_WORDS = 4,
    TOKEN_BYTES = 8 * TOKEN_WORDS,
    SIZE_CLASSES = 4,              /* of transfers that the kernel may copy, each with a choice of its own */
    ADDRESS_AT = HEADER_BYTES - 8, /* in the header of one that it copies */
};
enum kernel_copy { NEVER, BY_MEASUREMENT, ALWAYS };
enum reach { NOT_TRIED, READABLE, UNREADABLE };

/* The control words and the bytes of one ring. Each word has one writer. */
struct ring_end {
    word *head, *writer_asleep, *token_address, *token, *withdrawn; /* of the end that writes the ring */
    word *tail, *reader_asleep, *wanted, *refused;                  /* of the end that reads it */
    uint8_t *bytes;
    uint64_t position; /* our own: `head` of the ring that we write, `tail` of the one that we read */
};

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

/* The words and bytes of one of the two rings in such memory. */
struct ring_end ring_end_of(uint8_t *memory, uint64_t capacity, int index);
/* Whether two rings of `capacity` fit into the memory; else sets a Python error. */
bool ring_fits(const Py_buffer *memory, long long capacity);
/* Rings the doorbell if the other end has marked itself asleep; our position was stored before. */
void ring_wake(int doorbell, word *asleep);
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
