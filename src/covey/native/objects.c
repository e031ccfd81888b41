/* Plans, undo buffers and what lanes have in common: the objects that Python prepares for the runner. */
#include "native.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { STREAMED_BYTES = 1 << 14 }; /* ranges from this on are saved past the cache */

/* Lanes */

enum outcome lane_ended(struct lane *lane, const char *what)
{
    PyOS_snprintf(lane->trouble, TROUBLE_BYTES, "%s", what);
    return ENDED;
}

void say_error(char trouble[TROUBLE_BYTES], int error)
{
    char text[TROUBLE_BYTES - 32];
#if defined(__GLIBC__) && defined(_GNU_SOURCE)
    const char *said = strerror_r(error, text, sizeof text);
#else
    const char *said = strerror_r(error, text, sizeof text) == 0 ? text : "unknown error";
#endif
    PyOS_snprintf(trouble, TROUBLE_BYTES, "[Errno %d] %s", error, said);
}

enum outcome lane_failed(struct lane *lane, int error)
{
    say_error(lane->trouble, error);
    return ENDED;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

enum outcome could_not(struct lane *lane, int error) { return would_block(error) ? IDLE : lane_failed(lane, error); }

/* Shows nothing while a thread moves bytes, without the interpreter's lock: it is that thread's to look. */
PyObject *lane_peek(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct lane *lane = (struct lane *)self;
    uint8_t header[HEADER_BYTES];
    bool is_free = lane->runner == NULL || !lane->runner->is_running;
    bool is_there = is_free && lane->functions->peek(lane, header);
    if (PyErr_Occurred())
        return NULL;
    return PyBytes_FromStringAndSize((const char *)header, is_there ? HEADER_BYTES : 0);
}

/* Forgets the descriptors, which the owner closes next. False if a thread is using them: that thread is told to leave, and
 * the descriptors are the lane's now, which closes them when it is freed. */
PyObject *lane_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct lane *lane = (struct lane *)self;
    if (!lane->owns_descriptors && (lane->runner == NULL || !lane->runner->is_running)) {
        lane->functions->close(lane);
        Py_RETURN_TRUE;
    }
    lane->owns_descriptors = true;
    if (lane->runner != NULL)
        atomic_store_explicit(&lane->runner->stop, 1, memory_order_relaxed);
    Py_RETURN_FALSE;
}

void lane_release(PyObject *self)
{
    struct lane *lane = (struct lane *)self;
    if (lane->functions != NULL)
        lane->functions->release(lane);
    if (lane->memory.obj != NULL)
        PyBuffer_Release(&lane->memory);
}

PyMethodDef lane_methods[] = {
    {"peek", lane_peek, METH_NOARGS, "Return the next header that has arrived, or no bytes."},
    {"close", lane_close, METH_NOARGS, "Forget the descriptors, and tell whether the owner may close them."},
    {NULL, NULL, 0, NULL},
};
PyMemberDef lane_members[] = {
    {"kernel_copies", T_LONGLONG, offsetof(struct lane, kernel_copies), READONLY,
     "The transfers that the kernel has copied out of the peer's memory."},
    {NULL, 0, 0, 0, NULL},
};

/* Undo buffers */

/* Copies whole lines past the cache, and the rest through it: a copy that is hardly ever read must not displace what is
 * being worked on. `to` is aligned to a line. */
static void copy_past_cache(uint8_t *to, const uint8_t *from, int64_t nbytes)
{
    int64_t at = 0;
#if defined(__SSE2__)
    for (; at + LINE_BYTES <= nbytes; at += LINE_BYTES)
        for (int part = 0; part < LINE_BYTES; part += 16)
            _mm_stream_si128((__m128i *)(to + at + part), _mm_loadu_si128((const __m128i *)(from + at + part)));
    _mm_sfence();
#endif
    memcpy(to + at, from + at, (size_t)(nbytes - at));
}

/* Saves a range before it is overwritten; false if there is no memory. Ranges that the pool has no room for get their own. */
bool undo_save(struct undo *undo, uint8_t *target, int64_t nbytes)
{
    if (undo->count == undo->room) {
        int64_t room = undo->room ? 2 * undo->room : 64;
        struct saved_range *ranges = realloc(undo->ranges, (size_t)room * sizeof *ranges);
        if (ranges == NULL)
            return false;
        undo->ranges = ranges;
        undo->room = room;
    }
    struct saved_range *range = &undo->ranges[undo->count];
    range->target = target;
    range->nbytes = nbytes;
    range->is_own = undo->used + nbytes > undo->pool_bytes;
    range->copy = range->is_own ? malloc(nbytes ? (size_t)nbytes : 1) : undo->pool + undo->used;
    if (range->copy == NULL)
        return false;
    if (!range->is_own && nbytes >= STREAMED_BYTES)
        copy_past_cache(range->copy, target, nbytes);
    else
        memcpy(range->copy, target, (size_t)nbytes);
    if (!range->is_own)
        undo->used += (nbytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    undo->count++;
    return true;
}

void undo_forget(struct undo *undo)
{
    for (int64_t index = 0; index < undo->count; index++)
        if (undo->ranges[index].is_own)
            free(undo->ranges[index].copy);
    undo->count = undo->used = 0;
}

static void undo_restore(struct undo *undo)
{
    for (int64_t index = undo->count; index-- > 0;)
        memcpy(undo->ranges[index].target, undo->ranges[index].copy, (size_t)undo->ranges[index].nbytes);
    undo_forget(undo);
}

static PyObject *undo_method_restore(PyObject *self, PyObject *unused)
{
    (void)unused;
    undo_restore((struct undo *)self);
    Py_RETURN_NONE;
}

static PyObject *undo_method_forget(PyObject *self, PyObject *unused)
{
    (void)unused;
    undo_forget((struct undo *)self);
    Py_RETURN_NONE;
}

/* make_room(nbytes): allocate memory for all ranges of an operation before a transfer starts. */
static PyObject *undo_method_make_room(PyObject *self, PyObject *arg)
{
    struct undo *undo = (struct undo *)self;
    long long nbytes = PyLong_AsLongLong(arg);
    if (nbytes < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "no negative room");
    nbytes += (1 << 16); /* ranges start at lines: some room is lost between them */
    if (!undo->count && undo->pool_bytes < nbytes) {
        size_t room = (size_t)(nbytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
        free(undo->pool);
        undo->pool = aligned_alloc(LINE_BYTES, room);
        undo->pool_bytes = undo->pool == NULL ? 0 : (int64_t)room;
        if (undo->pool == NULL)
            return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

/* save(buffer): save memory that Python is about to overwrite. */
static PyObject *undo_method_save(PyObject *self, PyObject *arg)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(arg, &buffer, PyBUF_WRITABLE) < 0)
        return NULL;
    bool is_saved = undo_save((struct undo *)self, buffer.buf, buffer.len);
    PyBuffer_Release(&buffer);
    if (!is_saved)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static int undo_fill(PyObject *self, PyObject *args)
{
    (void)self;
    return PyArg_ParseTuple(args, "") ? 0 : -1;
}

static void undo_release(PyObject *self)
{
    struct undo *undo = (struct undo *)self;
    undo_forget(undo);
    free(undo->ranges);
    free(undo->pool);
}

static PyMethodDef undo_methods[] = {
    {"make_room", undo_method_make_room, METH_O, "Allocate memory for so many bytes."},
    {"save", undo_method_save, METH_O, "Save memory before it is overwritten."},
    {"restore", undo_method_restore, METH_NOARGS, "Write all saved ranges back, and forget them."},
    {"forget", undo_method_forget, METH_NOARGS, "Forget the saved ranges."},
    {NULL, NULL, 0, NULL},
};

struct kind undo_kind = {
    .name = "covey._native.Undo",
    .size = sizeof(struct undo),
    .fill = undo_fill,
    .release = undo_release,
    .methods = undo_methods,
};

/* Plans */

enum { MOST_INDEX = 1 << 20 }; /* of a peer or a buffer */

/* `coded` has a flag for each move, or is NULL. */
static bool read_moves(PyObject *moves, struct plan *plan, bool is_send, PyObject *saves, PyObject *coded)
{
    Py_ssize_t count = PyTuple_Size(moves);
    for (Py_ssize_t index = 0; index < count; index++) {
        int peer, buffer, after = 0, action = 0;
        long long start, stop;
        PyObject *move = PyTuple_GetItem(moves, index);
        int is_read = is_send ? PyArg_ParseTuple(move, "iiLLi", &peer, &buffer, &start, &stop, &after)
                              : PyArg_ParseTuple(move, "iiLLii", &peer, &buffer, &start, &stop, &action, &after);
        if (!is_read)
            return false;
        if (peer < 0 || peer > MOST_INDEX || buffer < 0 || buffer > MOST_INDEX || after < 0 || start < 0 || stop < start) {
            PyErr_SetString(PyExc_ValueError, "a move has an impossible number, or ends before it starts");
            return false;
        }
        bool is_coded = coded != NULL && PyObject_IsTrue(PyTuple_GetItem(coded, index)) > 0;
        if (is_send)
            plan->sends[index] = (struct send_move){peer, buffer, after, start, stop, is_coded};
        else {
            int is_first = PyObject_IsTrue(PyTuple_GetItem(saves, index));
            plan->recvs[index] = (struct recv_move){peer, buffer, after, action, start, stop, is_first > 0, is_coded};
        }
        if (peer >= plan->peer_count)
            plan->peer_count = peer + 1;
        if (buffer >= plan->buffer_count)
            plan->buffer_count = buffer + 1;
    }
    return true;
}

static void need(struct plan *plan, int32_t buffer, int64_t stop)
{
    if (stop > plan->needs[buffer])
        plan->needs[buffer] = stop;
}

/* Plan(sends, recvs, saves[, encodes, decodes]): the moves of covey.plan. `saves` has a flag for each receive: whether it is
 * the first to change its range. The last two have a flag for each send and receive. */
static int plan_fill(PyObject *self, PyObject *args)
{
    struct plan *plan = (struct plan *)self;
    PyObject *sends, *recvs, *saves, *encodes = NULL, *decodes = NULL;
    if (!PyArg_ParseTuple(args, "O!O!O!|O!O!", &PyTuple_Type, &sends, &PyTuple_Type, &recvs, &PyTuple_Type, &saves,
                          &PyTuple_Type, &encodes, &PyTuple_Type, &decodes))
        return -1;
    plan->send_count = PyTuple_Size(sends);
    plan->recv_count = PyTuple_Size(recvs);
    if (PyTuple_Size(saves) != plan->recv_count || (encodes != NULL && PyTuple_Size(encodes) != plan->send_count) ||
        (decodes != NULL && PyTuple_Size(decodes) != plan->recv_count)) {
        PyErr_SetString(PyExc_ValueError, "there is one flag for each move");
        return -1;
    }
    plan->sends = calloc((size_t)plan->send_count + 1, sizeof *plan->sends);
    plan->recvs = calloc((size_t)plan->recv_count + 1, sizeof *plan->recvs);
    if (plan->sends == NULL || plan->recvs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (!read_moves(sends, plan, true, saves, encodes) || !read_moves(recvs, plan, false, saves, decodes))
        return -1;
    plan->needs = calloc((size_t)plan->buffer_count + 1, sizeof *plan->needs);
    if (plan->needs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t index = 0; index < plan->send_count; index++)
        need(plan, plan->sends[index].buffer, plan->sends[index].stop);
    for (int64_t index = 0; index < plan->recv_count; index++)
        need(plan, plan->recvs[index].buffer, plan->recvs[index].stop);
    return 0;
}

static void plan_release(PyObject *self)
{
    struct plan *plan = (struct plan *)self;
    free(plan->sends);
    free(plan->recvs);
    free(plan->needs);
}

struct kind plan_kind = {
    .name = "covey._native.Plan", .size = sizeof(struct plan), .fill = plan_fill, .release = plan_release};
