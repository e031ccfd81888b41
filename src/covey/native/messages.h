/* What the files of messages share: one end of a pair of rings, through which frames of messages pass. */
#ifndef COVEY_MESSAGES_H
#define COVEY_MESSAGES_H

#include "ring.h"

enum {
    EAGER = 1,
    RTS = 2,
    CTS = 3,
    DATA = 4,
    CREDIT = 5,
    ACK = 6,
    FRAME_BYTES = 32, /* of a header without a shape */
    MOST_AXES = 8,
    MOST_DTYPES = 64,
    LOOKS = 64, /* at the ring between two looks at the clock */
};
static const int64_t RESERVED_TAGS = (int64_t)1 << 62;

struct frame {
    uint8_t kind, content, dtype, axes;
    int64_t tag;
    uint64_t id, nbytes;
    Py_ssize_t shape[MOST_AXES];
};

/* A message above `eager_bytes` that is under way: announced by us, or asked for by us. */
enum direction { NO_MESSAGE, SENDING, RECEIVING };
struct long_message {
    enum direction direction;
    bool is_over;
    struct frame frame; /* that announced it */
    PyObject *array;    /* ours until it is over or taken back, with its memory */
    Py_buffer view;
    bool is_cleared;  /* SENDING: whether the peer has asked for it */
    uint64_t moved;   /* SENDING: bytes of its DATA frames, headers included; RECEIVING: bytes of the payload */
    uint64_t left;    /* RECEIVING: bytes of the present DATA frame that are still to come */
    uint64_t begins;  /* SENDING: where its DATA frames begin in the stream, */
    uint64_t ends;    /* and where they end */
};

struct message_end {
    PyObject_HEAD
    Py_buffer memory;
    struct ring_end out, in;
    uint64_t capacity;
    int doorbell, bell, wake;
    PyObject *dtypes, *array_type, *empty, *empty_large;
    int64_t itemsizes[MOST_DTYPES];
    int64_t eager_bytes, credit_bytes, credit_batch, ack_batch, header_cost, piece_bytes, large_bytes;
    int64_t spin_ns, yield_ns;
    _Atomic uint64_t turn; /* counts every lend and every take_back: odd while the state is lent */
    _Atomic bool is_moving; /* a thread without the interpreter's lock changes the state at this moment */
    _Atomic int64_t crowded_until; /* when to look again for more than a moment: other programs want this core */
    int waiting;                   /* threads that wait without the interpreter's lock */

    /* What is lent; the names are those of MessageLink, Inlet and Outlet. */
    uint64_t next_id, sent, has;
    int64_t used;
    uint64_t expected_id, received;
    int64_t held, owed, unacknowledged;
    uint8_t *kept; /* the last bytes that were sent: kept_bytes from kept_at, in memory of kept_room bytes */
    uint64_t kept_at, kept_bytes, kept_room;
    uint64_t unrung_out, unrung_in; /* bytes written, and read, since the peer was woken for them if it sleeps */
    struct long_message message;
    _Atomic int64_t sent_count, sent_bytes, received_count, received_bytes;
};

static inline bool is_lent(const struct message_end *end) { return atomic_load(&end->turn) & 1; }

/* Whether a thread that began in `turn` may still change the state. */
static inline bool is_turn(const struct message_end *end, uint64_t turn) { return atomic_load(&end->turn) == turn; }

/* Frames (message_frames.c). None of these needs the interpreter's lock; those that return bool return false without
 * memory. */
enum found { NOTHING, OTHER, TAKEN };
uint64_t frames_readable(const struct message_end *end);
uint64_t frames_writable(const struct message_end *end);
void frames_copy_out(const struct message_end *end, uint64_t offset, uint8_t *to, uint64_t nbytes);
void frames_consume(struct message_end *end, uint64_t nbytes);
enum found frames_peek(const struct message_end *end, struct frame *frame);
bool frames_push(struct message_end *end, const struct frame *frame, const uint8_t *payload, uint64_t nbytes);
void frames_write(const struct message_end *end, uint64_t offset, const uint8_t *from, uint64_t nbytes);
void frames_publish(struct message_end *end, uint64_t nbytes);
void frames_publish_part(struct message_end *end, uint64_t nbytes);
void frames_consume_part(struct message_end *end, uint64_t nbytes);
void frames_ring(struct message_end *end);
void frames_encode(const struct frame *frame, uint8_t data[FRAME_BYTES + 8 * MOST_AXES]);
bool frames_reserve(struct message_end *end, uint64_t nbytes);
bool frames_acknowledge(struct message_end *end);
bool frames_acknowledge_after(struct message_end *end, int64_t cost);
bool frames_give_credit(struct message_end *end);
bool frames_take_control(struct message_end *end);
int frames_wait(struct message_end *end, word *watched, word *asleep, uint64_t seen, uint64_t turn, int64_t until);
bool frames_wake_up(struct message_end *end, word *asleep);

/* Long messages (long_messages.c), with the interpreter's lock. `message` has its frame, its array and its view; both
 * functions return what their callers return, and take the message over in any case. */
PyObject *long_send(struct message_end *end, const struct long_message *message, int64_t until);
PyObject *long_receive(struct message_end *end, const struct long_message *message, int64_t until);
PyObject *long_take_back(struct message_end *end);
void long_release(struct message_end *end);

#endif
