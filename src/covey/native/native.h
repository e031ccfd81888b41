/* What the files of covey._native share: transfers, lanes, reductions, plans and the runner that ties them together.
 *
 * Everything below `Python.h` in this header can be used without the interpreter's lock. Nothing here decides anything:
 * a function that cannot go on says why, and Python decides. Bytes of a peer are hostile until they were checked: every
 * length and every word that another process can write is checked before it is used.
 */
#ifndef COVEY_NATIVE_H
#define COVEY_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

enum {
    HEADER_BYTES = 64,
    PREFIX_BYTES = 32,
    VIEW_AT = 8,
    FLAGS_AT = 12,
    CHANGE_PENDING = 1,
    SMALL_BYTES = 2048,   /* a payload up to this travels together with its header */
    LINE_BYTES = 64,
    TROUBLE_BYTES = 160,
    MOST_STREAMS = 64,    /* of one sealed or striped lane */
};

/* A type of objects for Python, in the file that knows them; module.c makes the types. */
struct kind {
    const char *name;
    size_t size;
    int (*fill)(PyObject *self, PyObject *args); /* zeroed memory; returns -1 with a Python error set if it cannot */
    void (*release)(PyObject *self);             /* frees what was filled, also in part; NULL if there is nothing */
    PyMethodDef *methods;
    PyMemberDef *members;
    PyObject *type;
};
extern struct kind ring_kind, stream_kind, sealed_kind, striped_kind, plan_kind, reduction_kind, undo_kind, recorder_kind,
    runner_kind, shortcut_kind, message_end_kind;
static inline bool is_of(PyObject *object, const struct kind *kind) { return (PyObject *)Py_TYPE(object) == kind->type; }

/* What became of an attempt to move a transfer. */
enum outcome {
    IDLE,          /* nothing could be moved now */
    MOVED,         /* something was moved */
    ENDED,         /* the lane has ended; lane->trouble says why */
    OTHER_HEADER,  /* another header arrived than the plan says; incoming->header has it */
};

/* A transfer on its way out: a header, then `nbytes` of `data`. */
struct outgoing {
    uint8_t header[HEADER_BYTES];
    const uint8_t *data;
    int64_t nbytes;
    int64_t sent;  /* payload bytes sent; negative while the header is on its way */
    bool is_stored; /* the receiver stores the payload as it is: it may be copied to its place at once */
};

struct incoming;

/* Takes whole elements that start `offset` bytes into the payload; `piece` is valid during the call only. */
typedef void absorb_function(struct incoming *incoming, int64_t offset, const uint8_t *piece, int64_t nbytes);

/* A transfer on its way in: into `dest`, or, where that is NULL, piece by piece through `absorb`. */
struct incoming {
    uint8_t expected[HEADER_BYTES];
    uint8_t header[HEADER_BYTES];  /* as it arrived */
    uint8_t *dest;
    absorb_function *absorb;
    void *context;
    int64_t nbytes;
    int64_t itemsize;
    int64_t got;         /* payload bytes received; negative while the header is on its way */
    bool change_pending; /* set when the header carries that flag, which may differ from what is expected */
};

/* Compares the header that arrived with the expected one; a CHANGE_PENDING flag is noted and accepted. */
bool header_matches(struct incoming *incoming);

/* A byte pipe to one peer. It is used by one thread at a time, without the interpreter's lock. */
struct lane;
struct lane_functions {
    enum outcome (*transmit)(struct lane *lane, struct outgoing *out);
    enum outcome (*receive)(struct lane *lane, struct incoming *incoming);
    /* Announces a sleep. Adds descriptors to `polls` and returns how many, or -1 to try again at once. */
    int (*park)(struct lane *lane, struct pollfd *polls, bool sending, bool receiving);
    void (*unpark)(struct lane *lane);
    /* Copies the next header that has arrived, if all of it is here; the lane may not be received from afterwards. */
    bool (*peek)(struct lane *lane, uint8_t header[HEADER_BYTES]);
    /* Ends a transfer on its way out that is given up: nothing reads its payload from now on. */
    void (*cancel)(struct lane *lane);
    void (*close)(struct lane *lane);    /* forgets the descriptors, which their owner closes next */
    void (*release)(struct lane *lane);  /* frees what the lane allocated, and closes its descriptors if it owns them */
};
struct lane {
    PyObject_HEAD
    const struct lane_functions *functions;
    Py_buffer memory;       /* of a ring: the shared memory; else empty */
    int64_t spin_bytes;     /* transfers up to this are worth spinning for */
    int64_t python_bytes;   /* transfers from this on call Python, which may let other threads run */
    int64_t kernel_copies;  /* transfers that the kernel has copied out of the peer's memory */
    struct runner *runner;  /* that moves its transfers, or NULL */
    bool owns_descriptors;  /* it was closed while a thread was using them */
    bool has_idle_core;     /* a helper thread may seal what goes out */
    char trouble[TROUBLE_BYTES];
};

/* Moves what can be moved of a transfer; if nothing can, adds the descriptors to poll, and counts them in *count. */
typedef enum outcome helper_step(struct lane *lane, struct outgoing *out, struct pollfd *polls, int *count);
struct helper;
struct helper *helper_start(struct lane *lane, helper_step *step);
void helper_post(struct helper *helper, struct outgoing *out);
bool helper_result(struct helper *helper, enum outcome *outcome);
int helper_fd(const struct helper *helper);
void helper_cancel(struct helper *helper);
void helper_end(struct helper *helper);

void lane_release(PyObject *self);
PyObject *lane_peek(PyObject *self, PyObject *unused);
PyObject *lane_close(PyObject *self, PyObject *unused);
extern PyMethodDef lane_methods[];
extern PyMemberDef lane_members[];
enum outcome lane_ended(struct lane *lane, const char *what);
void say_error(char trouble[TROUBLE_BYTES], int error); /* on any thread, also while others do */
enum outcome lane_failed(struct lane *lane, int error);

/* What a failed call on a socket means: IDLE if it may work later, else the lane has ended. */
bool would_block(int error);
enum outcome could_not(struct lane *lane, int error);

static inline void put_word(uint8_t *at, uint64_t value)
{
    for (int index = 0; index < 8; index++)
        at[index] = (uint8_t)(value >> (8 * index));
}

static inline uint64_t get_word(const uint8_t *at)
{
    uint64_t value = 0;
    for (int index = 0; index < 8; index++)
        value |= (uint64_t)at[index] << (8 * index);
    return value;
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Adds to a counter that one thread at a time changes, and any thread may read. */
static inline void count_up(_Atomic int64_t *counter, int64_t amount)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + amount, memory_order_relaxed);
}

/* How two ranges of elements are combined: by numpy's own loops, or, for 16-bit floats, by ours. */
typedef void numpy_loop(char **args, intptr_t const *dimensions, intptr_t const *strides, void *data);
enum half_op { HALF_SUM, HALF_MEAN, HALF_PROD, HALF_MIN, HALF_MAX };
enum { HALF_OPS = 5, MOST_ITEM_BYTES = 16 };

struct reduction {
    PyObject_HEAD
    int64_t itemsize;
    numpy_loop *combine, *divide; /* `divide` is NULL unless this is a mean */
    void *combine_data, *divide_data;
    uint8_t divisor[MOST_ITEM_BYTES] __attribute__((aligned(16))); /* of a mean by numpy's loops, as an element */
    bool is_half, is_bfloat16, keeps_left;
    enum half_op half_op;
};

/* Combines `count` elements: out = left op right, and divides by `contributors` at the end of a mean. */
void combine(const struct reduction *reduction, const uint8_t *left, const uint8_t *right, uint8_t *out, int64_t count,
             bool divides, int64_t contributors);

/* The undo buffer: copies of the ranges that an operation has overwritten. */
struct saved_range {
    uint8_t *target;
    int64_t nbytes;
    uint8_t *copy;
    bool is_own; /* whether `copy` was allocated for this range alone */
};
struct undo {
    PyObject_HEAD
    uint8_t *pool;
    int64_t pool_bytes, used;
    struct saved_range *ranges;
    int64_t count, room;
};
bool undo_save(struct undo *undo, uint8_t *target, int64_t nbytes);
void undo_forget(struct undo *undo);

/* One rank's part of a collective. Ranges count elements. */
struct send_move {
    int32_t peer, buffer, after;
    int64_t start, stop;
    bool is_coded; /* Python encodes the range first */
};
struct recv_move {
    int32_t peer, buffer, after, action;
    int64_t start, stop;
    bool saves; /* whether this is the first receive that changes its range */
    bool is_coded; /* Python decodes what arrived */
};
struct plan {
    PyObject_HEAD
    struct send_move *sends;
    struct recv_move *recvs;
    int64_t send_count, recv_count;
    int32_t buffer_count, peer_count; /* one more than the highest index that the moves use */
    int64_t *needs;                   /* by buffer: the elements that it must have */
};
enum { STORE = 0, REDUCE = 1, LEFT = 2, FINAL = 4 };

/* What the transfers with one rank of a group have moved, and what the operation in progress has. */
struct traffic {
    _Atomic int64_t sent_bytes, sends, received_bytes, receives;
};
struct progress {
    _Atomic int64_t sent, received, phases;
    _Atomic uint64_t peers; /* a bit for each of the first ranks */
};
struct traffic *recorder_traffic(PyObject *self, int32_t rank);
struct progress *recorder_progress(PyObject *self);
void recorder_note(PyObject *self, const uint8_t *prefix, uint64_t sequence, int64_t begun_ns);
void recorder_early(PyObject *self, uint64_t sequence, int64_t begun_ns);

/* Why the runner returns. */
enum reason {
    DONE,
    STALLED,       /* nothing moved for as long as Python said */
    WRONG_HEADER,  /* from runner->peer */
    LANE_ENDED,    /* to runner->peer */
    STOPPED,       /* the stop word is set, or the wake descriptor is readable */
    NEEDS_LANE,    /* to runner->peer */
    NO_MEMORY,
    ENCODE,        /* the range of the next send */
    DECODE,        /* what the current receive has received */
    SIGNALS,       /* time to let the interpreter run its signal handlers; never leaves the extension */
    NOT_YET,       /* the first look, with the interpreter's lock held, was not enough; never leaves the extension */
};

struct runner {
    PyObject_HEAD
    _Atomic int stop;
    bool is_running;     /* a thread is in runner_run */
    bool forgets_lanes;  /* that thread forgets the lanes when it returns */
    bool is_open;        /* shortcuts may run: no other operation does, and none has failed */
    int32_t size;
    PyObject **lane_objects; /* struct lane, by slot */
    PyObject *recorder;      /* of the group; NULL if nothing is counted */
    int32_t *ranks;          /* of the group, by slot */
    int64_t python_bytes;    /* the smallest of the lanes */

    /* The operation. */
    PyObject *plan_object, *reduction_object, *undo_object;
    Py_buffer *buffers;
    int32_t buffer_count, buffer_room;
    int64_t contributors;
    uint8_t prefix[PREFIX_BYTES];
    uint64_t sequence;
    bool change_pending;
    int wake_fd;

    /* Where it is. */
    int64_t sent, applied;
    bool is_sending, is_receiving;
    bool is_encoded, is_decoded; /* Python was asked to, for the next send and the current receive */
    struct outgoing out;
    struct incoming in;
    uint64_t *out_moves, *in_moves; /* by slot: transfers started */
    uint8_t *target;                /* of the current receive */
    bool is_aside, is_whole;        /* received into `aside`, applied at the end; combined in one call */
    uint8_t *aside;
    int64_t aside_room;
    bool is_out_of_memory;

    /* How it waits. */
    int64_t spin_ns, yield_ns, stall_ns;
    int64_t idle_since, stall_at, signals_at; /* idle_since is 0 while something moves */
    bool has_slept;

    int32_t peer;        /* that the reason is about */
    enum reason pending; /* the reason that a shortcut met and Python has not heard of; NOT_YET if there is none */
};

/* What the caller knows of an operation; borrowed references. */
struct operation {
    PyObject *plan, *reduction, *undo; /* reduction and undo may be NULL */
    int64_t contributors;
    const uint8_t *prefix;
    uint64_t sequence;
    bool change_pending;
    int64_t spin_ns, yield_ns, stall_ns;
};

/* With the interpreter's lock: */
bool runner_take(struct runner *runner, Py_buffer *buffer);
bool runner_begin(struct runner *runner, const struct operation *operation);
enum reason runner_look(struct runner *runner);
void runner_finish(struct runner *runner);

/* Without it: */
enum reason runner_run(struct runner *runner, bool only_look);
int64_t monotonic_ns(void);
void relax(void);

/* Whether numpy's ufuncs are laid out as reduce.c reads them. */
PyObject *is_ufunc_as_expected(PyObject *module, PyObject *args);

/* libcrypto's functions, from the library that Python's ssl has loaded. */
bool crypto_load(const char *library, char *trouble, size_t room);
bool crypto_is_loaded(void);
int64_t crypto_time(int64_t nbytes);

/* The codecs (codec.c) */
extern PyMethodDef codec_methods[];

#endif
