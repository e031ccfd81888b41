/* Streams of bytes that may outlive their connections: what plain, sealed and striped lanes are made of.
 *
 * Every byte of a stream has a position, whatever connections have carried it. A lane that is resumable does not end when a
 * connection breaks: the stream waits until the control loop attaches another one, which goes on at the byte that the other
 * end expects next. What was sent is kept until the other end has it (kept.h); covey/net/lanes/lasting.py has the
 * invariants.
 *
 * The two halves of a lane, sending and receiving, have a lock each, or one for both, because the control loop uses them as
 * well as the operation's thread. No thread waits for one half while it holds the other, or waits for a half while it holds
 * the interpreter's lock that the holder may need: the control loop gives that up first. Streams of a lane that is not
 * resumable need no lock for their connection.
 */
#ifndef COVEY_LASTING_H
#define COVEY_LASTING_H

#include "kept.h"

#include <pthread.h>
#include <sys/uio.h>

enum {
    WAIT_MS = 5, /* between looks whether a stream goes on, which no descriptor tells */
    MOST_PARTS = 2,
};

struct lasting {
    /* The half that sends. */
    int out_fd;                  /* of the connection; the same as in_fd, except while another one is attached */
    _Atomic bool is_out_broken;  /* nothing more is sent on the connection */
    bool is_full;                /* as much is kept as may be */
    struct kept kept;

    /* The half that receives. */
    int in_fd;
    _Atomic bool is_in_broken;
    bool is_direct;       /* the connection goes through no relay: its end is the doing of the other end */
    bool is_drained;      /* all that the broken connection had was read */
    int64_t received;     /* bytes, on all connections */
    uint8_t *spill;       /* spill[spill_start:spill_end] was read from a connection that was left */
    int64_t spill_start, spill_end;
};

struct lasting_lane {
    struct lane base;
    pthread_mutex_t locks[2];
    pthread_mutex_t *out_lock, *in_lock; /* of the halves; NULL until they are made */
    bool is_resumable;
    _Atomic bool is_over;         /* no connection will be attached any more; `over` says why */
    char over[TROUBLE_BYTES];
    int32_t count;
    struct lasting *streams;
};

/* Makes the streams and their locks. The lane is resumable if `directs`, a tuple or NULL, tells of each stream whether its
 * connection is direct. False with a Python error set if that cannot be. */
bool lasting_fill(struct lasting_lane *lane, Py_ssize_t count, PyObject *directs, bool has_one_lock);
void lasting_use(struct lasting *stream, int fd);
void lasting_close(struct lasting_lane *lane);   /* forgets the descriptors */
void lasting_release(struct lasting_lane *lane); /* frees all, and closes the descriptors if the lane owns them */

/* Sends some of `parts`, and keeps what was sent; *taken is how much that is. IDLE if nothing can be sent now: a stream that
 * waits for a connection is one on which nothing moves. ENDED with `trouble` set if the stream has ended. */
enum outcome lasting_send(struct lasting_lane *lane, struct lasting *stream, const struct iovec *parts, int count,
                          int64_t *taken, char trouble[TROUBLE_BYTES]);

/* Gives the kernel what is kept and was not sent; false if the stream has ended. */
bool lasting_flush(struct lasting_lane *lane, struct lasting *stream, bool *moved, char trouble[TROUBLE_BYTES]);

/* Takes what has arrived into `parts`; *taken is how much that is. ENDED with lane->trouble set if the stream has ended;
 * `at_end` is what is then said of an end in order. */
enum outcome lasting_take(struct lasting_lane *lane, struct lasting *stream, const struct iovec *parts, int count,
                          int64_t *taken, const char *at_end);

static inline bool lasting_has_spill(const struct lasting *stream) { return stream->spill_start < stream->spill_end; }

/* peek, close, and what the control loop does with streams; lasting_methods has these alone. */
#define LASTING_METHODS \
    {"peek", lane_peek, METH_NOARGS, "Return the next header that has arrived, or no bytes."}, \
    {"close", lane_close, METH_NOARGS, "Forget the descriptors, and tell whether the owner may close them."}, \
    {"broken", lasting_broken, METH_NOARGS, "Return the streams that wait for a connection."}, \
    {"freeze", lasting_freeze, METH_VARARGS, "Use the connection of a stream no more."}, \
    {"drain", lasting_drain, METH_VARARGS, "Take what the connection of a frozen stream still has."}, \
    {"attach", lasting_attach, METH_VARARGS, "Go on with a frozen stream on another connection."}, \
    {"push", lasting_push, METH_NOARGS, "Send what is kept and can be sent."}, \
    {"acknowledge", lasting_acknowledge, METH_VARARGS, "Note what the other end has."}, \
    {"received", lasting_received, METH_VARARGS, "Return how many bytes a stream has brought."}, \
    {"end", lasting_end, METH_VARARGS, "Let the lane end instead of waiting for a connection."},
PyObject *lasting_broken(PyObject *self, PyObject *unused);
PyObject *lasting_freeze(PyObject *self, PyObject *args);
PyObject *lasting_drain(PyObject *self, PyObject *args);
PyObject *lasting_attach(PyObject *self, PyObject *args);
PyObject *lasting_push(PyObject *self, PyObject *unused);
PyObject *lasting_acknowledge(PyObject *self, PyObject *args);
PyObject *lasting_received(PyObject *self, PyObject *args);
PyObject *lasting_end(PyObject *self, PyObject *args);
extern PyMethodDef lasting_methods[];

#endif
