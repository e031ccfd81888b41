/* Streams of bytes that may outlive their connections; lasting.h and covey/net/lanes/lasting.py have the invariants. */
#include "lasting.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SPILL_LIMIT = 1 << 26, /* bytes that a connection may still hold for this end when it is left */
    SPILL_STEP = 1 << 18,
};

bool lasting_fill(struct lasting_lane *lane, Py_ssize_t count, PyObject *directs, bool has_one_lock)
{
    if (count < 1 || count > MOST_STREAMS || (directs != NULL && PyTuple_Size(directs) != count)) {
        PyErr_SetString(PyExc_ValueError, "a lane has 1 to 64 streams, and tells of all of them or none whether they are direct");
        return false;
    }
    lane->streams = calloc((size_t)count, sizeof *lane->streams);
    if (pthread_mutex_init(&lane->locks[0], NULL) == 0)
        lane->out_lock = &lane->locks[0];
    if (has_one_lock)
        lane->in_lock = lane->out_lock;
    else if (pthread_mutex_init(&lane->locks[1], NULL) == 0)
        lane->in_lock = &lane->locks[1];
    if (lane->streams == NULL || lane->out_lock == NULL || lane->in_lock == NULL) {
        PyErr_NoMemory();
        return false;
    }
    lane->count = (int32_t)count;
    lane->is_resumable = directs != NULL;
    for (int32_t index = 0; index < lane->count; index++) {
        struct lasting *stream = &lane->streams[index];
        stream->in_fd = stream->out_fd = -1;
        stream->is_direct = directs == NULL || PyObject_IsTrue(PyTuple_GetItem(directs, index)) == 1;
        stream->kept.is_direct = stream->is_direct;
    }
    return true;
}

void lasting_use(struct lasting *stream, int fd) { stream->in_fd = stream->out_fd = fd; }

void lasting_close(struct lasting_lane *lane)
{
    Py_BEGIN_ALLOW_THREADS /* the control loop may be at it, for a moment */
    pthread_mutex_lock(lane->out_lock);
    for (int32_t index = 0; index < lane->count; index++)
        lane->streams[index].out_fd = -1;
    pthread_mutex_unlock(lane->out_lock);
    pthread_mutex_lock(lane->in_lock);
    for (int32_t index = 0; index < lane->count; index++)
        lane->streams[index].in_fd = -1;
    pthread_mutex_unlock(lane->in_lock);
    Py_END_ALLOW_THREADS
}

void lasting_release(struct lasting_lane *lane)
{
    for (int32_t index = 0; index < lane->count; index++) {
        struct lasting *stream = &lane->streams[index];
        if (lane->base.owns_descriptors)
            close(stream->in_fd);
        kept_release(&stream->kept);
        free(stream->spill);
    }
    free(lane->streams);
    if (lane->in_lock != NULL && lane->in_lock != lane->out_lock)
        pthread_mutex_destroy(lane->in_lock);
    if (lane->out_lock != NULL)
        pthread_mutex_destroy(lane->out_lock);
}

/* Sending */

static enum outcome cannot_send(const char *what, char trouble[TROUBLE_BYTES])
{
    PyOS_snprintf(trouble, TROUBLE_BYTES, "%s", what);
    return ENDED;
}

bool lasting_flush(struct lasting_lane *lane, struct lasting *stream, bool *moved, char trouble[TROUBLE_BYTES])
{
    if (stream->is_out_broken || kept_flush(&stream->kept, stream->out_fd, moved))
        return true;
    say_error(trouble, errno);
    stream->is_out_broken = lane->is_resumable;
    return lane->is_resumable;
}

/* Sends `parts`, of which at most `room` bytes. */
static ssize_t send_parts(int fd, const struct iovec *parts, int count, int64_t room)
{
    struct iovec fitting[MOST_PARTS];
    int used = 0;
    for (; used < count && room > 0; used++) {
        fitting[used] = parts[used];
        fitting[used].iov_len = (size_t)smaller((int64_t)parts[used].iov_len, room);
        room -= (int64_t)fitting[used].iov_len;
    }
    struct msghdr message = {.msg_iov = fitting, .msg_iovlen = (size_t)used};
    return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void copy_parts(uint8_t *into, const struct iovec *parts, int64_t nbytes)
{
    for (; nbytes; parts++) {
        int64_t step = smaller((int64_t)parts->iov_len, nbytes);
        memcpy(into, parts->iov_base, (size_t)step);
        into += step;
        nbytes -= step;
    }
}

enum outcome lasting_send(struct lasting_lane *lane, struct lasting *stream, const struct iovec *parts, int count,
                          int64_t *taken, char trouble[TROUBLE_BYTES])
{
    int64_t room = INT64_MAX;
    uint8_t *place = NULL;
    bool moved = false;
    *taken = 0;
    if (lane->is_resumable) {
        if (lane->is_over)
            return cannot_send(lane->over, trouble);
        lasting_flush(lane, stream, &moved, trouble); /* what another connection has to send again */
        if (stream->is_out_broken || kept_unsent(&stream->kept))
            return moved ? MOVED : IDLE;
        place = kept_place(&stream->kept, stream->out_fd, 1, &room);
        stream->is_full = place == NULL;
        if (stream->is_full)
            return moved ? MOVED : IDLE;
    }
    ssize_t sent = send_parts(stream->out_fd, parts, count, room);
    if (sent < 0 && would_block(errno))
        return moved ? MOVED : IDLE;
    if (sent < 0) {
        say_error(trouble, errno);
        stream->is_out_broken = true;
        return lane->is_resumable ? IDLE : ENDED;
    }
    if (place != NULL)
        copy_parts(place, parts, sent);
    kept_sent(&stream->kept, sent);
    *taken = sent;
    return sent || moved ? MOVED : IDLE;
}

/* Receiving */

/* Leaves a connection that has broken, if another one may be attached; the rest of the lane goes on. */
static enum outcome leave(struct lasting_lane *lane, struct lasting *stream, enum outcome otherwise)
{
    if (!lane->is_resumable || lane->is_over)
        return otherwise;
    stream->is_in_broken = stream->is_drained = true;
    return IDLE;
}

static int64_t take_spill(struct lasting *stream, const struct iovec *parts, int count)
{
    int64_t taken = 0;
    for (int index = 0; index < count; index++) {
        int64_t step = smaller(stream->spill_end - stream->spill_start, (int64_t)parts[index].iov_len);
        if (step)
            memcpy(parts[index].iov_base, stream->spill + stream->spill_start, (size_t)step);
        stream->spill_start += step;
        taken += step;
    }
    return taken;
}

enum outcome lasting_take(struct lasting_lane *lane, struct lasting *stream, const struct iovec *parts, int count,
                          int64_t *taken, const char *at_end)
{
    *taken = 0;
    if (lasting_has_spill(stream)) {
        *taken = take_spill(stream, parts, count);
        return MOVED;
    }
    if (stream->is_in_broken)
        return lane->is_over ? lane_ended(&lane->base, lane->over) : IDLE;
    struct msghdr message = {.msg_iov = (struct iovec *)parts, .msg_iovlen = (size_t)count};
    ssize_t got = recvmsg(stream->in_fd, &message, MSG_DONTWAIT);
    if (got < 0)
        return would_block(errno) ? IDLE : leave(lane, stream, lane_failed(&lane->base, errno));
    if (got == 0) {
        enum outcome ended = lane_ended(&lane->base, at_end);
        return stream->is_direct ? ended : leave(lane, stream, ended);
    }
    stream->received += got;
    *taken = got;
    return MOVED;
}

/* What the control loop does with streams. Each gives the interpreter's lock up while it waits for a half of the lane. */

static struct lasting *stream_at(struct lasting_lane *lane, int stream)
{
    if (lane->is_resumable && stream >= 0 && stream < lane->count)
        return &lane->streams[stream];
    PyErr_SetString(PyExc_ValueError, "the lane has no such stream that could be resumed");
    return NULL;
}

/* broken(): the streams that wait for a connection. */
PyObject *lasting_broken(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct lasting_lane *lane = (struct lasting_lane *)self;
    PyObject *found = PyList_New(0);
    for (int32_t index = 0; found != NULL && index < lane->count; index++) {
        if (!lane->streams[index].is_out_broken && !lane->streams[index].is_in_broken)
            continue;
        PyObject *number = PyLong_FromLong(index);
        if (number == NULL || PyList_Append(found, number) < 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

/* freeze(stream): use the connection of a stream no more, and count none of its acknowledgements. */
PyObject *lasting_freeze(PyObject *self, PyObject *args)
{
    struct lasting_lane *lane = (struct lasting_lane *)self;
    struct lasting *stream;
    int number;
    if (!PyArg_ParseTuple(args, "i", &number) || (stream = stream_at(lane, number)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lane->out_lock);
    stream->is_out_broken = true;
    stream->kept.is_direct = false;
    pthread_mutex_unlock(lane->out_lock);
    pthread_mutex_lock(lane->in_lock);
    stream->is_in_broken = true;
    pthread_mutex_unlock(lane->in_lock);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Reads all that the connection of a frozen stream still has. False if there is no memory for it. */
static bool drain(struct lasting *stream)
{
    int64_t room = stream->spill_end;
    while (!stream->is_drained) {
        if (stream->spill_end == room) {
            uint8_t *grown = room < SPILL_LIMIT ? realloc(stream->spill, (size_t)(room + SPILL_STEP)) : NULL;
            if (grown == NULL)
                return false;
            stream->spill = grown;
            room += SPILL_STEP;
        }
        ssize_t taken =
            recv(stream->in_fd, stream->spill + stream->spill_end, (size_t)(room - stream->spill_end), MSG_DONTWAIT);
        if (taken < 0 && errno == EINTR)
            continue;
        stream->is_drained = taken <= 0;
        stream->spill_end += taken > 0 ? taken : 0;
        stream->received += taken > 0 ? taken : 0;
    }
    return true;
}

/* drain(stream): take what the connection of a frozen stream still has; return how many bytes the stream has brought. */
PyObject *lasting_drain(PyObject *self, PyObject *args)
{
    struct lasting_lane *lane = (struct lasting_lane *)self;
    struct lasting *stream;
    int number;
    bool is_done;
    int64_t received;
    if (!PyArg_ParseTuple(args, "i", &number) || (stream = stream_at(lane, number)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lane->in_lock);
    if (stream->spill_start) { /* what was read before it was taken */
        stream->spill_end -= stream->spill_start;
        memmove(stream->spill, stream->spill + stream->spill_start, (size_t)stream->spill_end);
        stream->spill_start = 0;
    }
    is_done = drain(stream);
    received = stream->received;
    pthread_mutex_unlock(lane->in_lock);
    Py_END_ALLOW_THREADS
    return is_done ? PyLong_FromLongLong(received) : PyErr_NoMemory();
}

/* attach(stream, fd, position, is_direct): go on with a frozen stream at this position, on another connection. False if what
 * the other end expects there is not kept. */
PyObject *lasting_attach(PyObject *self, PyObject *args)
{
    struct lasting_lane *lane = (struct lasting_lane *)self;
    struct lasting *stream;
    int number, fd, is_direct;
    long long position;
    bool is_kept;
    if (!PyArg_ParseTuple(args, "iiLp", &number, &fd, &position, &is_direct) || (stream = stream_at(lane, number)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lane->out_lock);
    is_kept = kept_rewind(&stream->kept, position, is_direct);
    if (is_kept) {
        stream->out_fd = fd;
        stream->is_out_broken = false;
    }
    pthread_mutex_unlock(lane->out_lock);
    pthread_mutex_lock(lane->in_lock);
    if (is_kept) {
        stream->in_fd = fd;
        stream->is_direct = is_direct;
        stream->is_drained = stream->is_in_broken = false;
    }
    pthread_mutex_unlock(lane->in_lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_kept);
}

/* push(): send what is kept and can be sent; whether there is more of it. */
PyObject *lasting_push(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct lasting_lane *lane = (struct lasting_lane *)self;
    bool has_more = false, moved = false;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lane->out_lock);
    for (int32_t index = 0; index < lane->count; index++) {
        struct lasting *stream = &lane->streams[index];
        if (!stream->is_out_broken && stream->out_fd >= 0 && !kept_flush(&stream->kept, stream->out_fd, &moved))
            stream->is_out_broken = true;
        has_more |= !stream->is_out_broken && stream->out_fd >= 0 && kept_unsent(&stream->kept);
    }
    pthread_mutex_unlock(lane->out_lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_more);
}

/* acknowledge(stream, position): the other end has all before this position. False if it cannot have. */
PyObject *lasting_acknowledge(PyObject *self, PyObject *args)
{
    struct lasting_lane *lane = (struct lasting_lane *)self;
    struct lasting *stream;
    int number;
    long long position;
    bool is_possible;
    if (!PyArg_ParseTuple(args, "iL", &number, &position) || (stream = stream_at(lane, number)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lane->out_lock);
    is_possible = kept_acknowledge(&stream->kept, position);
    pthread_mutex_unlock(lane->out_lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_possible);
}

/* received(stream): how many bytes the stream has brought, on all connections. */
PyObject *lasting_received(PyObject *self, PyObject *args)
{
    struct lasting_lane *lane = (struct lasting_lane *)self;
    struct lasting *stream;
    int number;
    int64_t received;
    if (!PyArg_ParseTuple(args, "i", &number) || (stream = stream_at(lane, number)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lane->in_lock);
    received = stream->received;
    pthread_mutex_unlock(lane->in_lock);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(received);
}

/* end(why): no connection will be attached any more, and what waits for one has ended. */
PyObject *lasting_end(PyObject *self, PyObject *args)
{
    struct lasting_lane *lane = (struct lasting_lane *)self;
    const char *why;
    if (!PyArg_ParseTuple(args, "s", &why))
        return NULL;
    if (!lane->is_over) {
        PyOS_snprintf(lane->over, TROUBLE_BYTES, "%s", why);
        lane->is_over = true; /* the text is complete before */
    }
    Py_RETURN_NONE;
}

PyMethodDef lasting_methods[] = {
    LASTING_METHODS
    {NULL, NULL, 0, NULL},
};
