/* The memory of a pair of rings, which ring.c and messages.c share; covey/net/lanes/ring.py says what the words mean. */
#ifndef COVEY_RING_H
#define COVEY_RING_H

#include "native.h"

#include <string.h>

enum {
    CONTROL_BYTES = 1024,
    WORDS_PER_RING = 32,
    HEAD = 0,
    TAIL = 8,
    WRITER_ASLEEP = 16,
    READER_ASLEEP = 24,
};

typedef _Atomic uint64_t word;

struct ring_end {
    word *head, *tail, *writer_asleep, *reader_asleep;
    uint8_t *bytes;
    uint64_t position; /* our own: `head` of the ring that we write, `tail` of the one that we read */
};

static inline struct ring_end ring_end_of(uint8_t *memory, uint64_t capacity, int index)
{
    word *words = (word *)memory + index * WORDS_PER_RING;
    return (struct ring_end){
        .head = words + HEAD,
        .tail = words + TAIL,
        .writer_asleep = words + WRITER_ASLEEP,
        .reader_asleep = words + READER_ASLEEP,
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

#endif
