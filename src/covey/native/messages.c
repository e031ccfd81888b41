/* Messages over a pair of rings: a send or a receive is one call, if nothing has to be decided.
 *
 * The stream of frames is that of covey/proto/message_link.py, which owns its state and lends it: while it is lent,
 * MessageEnd keeps the counters, and Python knows nothing of the messages that pass. A thread that takes the messenger's
 * lock takes the state back first. Both happen with the interpreter's lock held. Short messages never give it up, except
 * that a receive does to wait. Invariants:
 *   - The frame of a short message is consumed whole or not at all. Whatever is not an array that the waiting receive
 *     takes, or an ACK or a CREDIT that is as it should be, stays in the ring: the call returns False, and Python reads it
 *     from there. What a call has to hand over in the middle of a long message is in long_messages.c.
 *   - What is sent is kept until the peer acknowledges it, because the lane may be replaced.
 *   - The state has one user. A thread with the interpreter's lock, while no long message is under way; or the thread of the
 *     long message, without that lock, which says so in `is_moving` and then looks at `turn`. `take_back` changes `turn` and
 *     then waits for `is_moving`, so one of them sees the other.
 *   - A thread that waits without the interpreter's lock reads nothing but `turn` and a position of the peer. It clears its
 *     mark in the ring only in its turn, so that it never hides another reader.
 */
#include "attributes.h"
#include "messages.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

static const int64_t LOOK_NS = 20 * 1000; /* of a receive with the interpreter's lock held */

/* MessageEnd(memory, capacity, doorbell, first, bell, wake, dtypes, array type, empty, empty for large arrays, spin ns,
 * yield ns, (eager bytes, credit bytes, credit batch, ack batch, header cost, bytes of a piece, those of a large array)) */
static int message_end_fill(PyObject *self, PyObject *args)
{
    struct message_end *end = (struct message_end *)self;
    PyObject *memory, *dtypes, *array_type, *empty, *empty_large;
    long long capacity, spin_ns, yield_ns, sizes[7];
    int first;
    if (!PyArg_ParseTuple(args, "OLipiiO!OOOLL(LLLLLLL)", &memory, &capacity, &end->doorbell, &first, &end->bell, &end->wake,
                          &PyTuple_Type, &dtypes, &array_type, &empty, &empty_large, &spin_ns, &yield_ns, &sizes[0],
                          &sizes[1], &sizes[2], &sizes[3], &sizes[4], &sizes[5], &sizes[6]))
        return -1;
    if (PyObject_GetBuffer(memory, &end->memory, PyBUF_WRITABLE) < 0 || !ring_fits(&end->memory, capacity))
        return -1;
    Py_ssize_t count = PyTuple_Size(dtypes);
    if (count > MOST_DTYPES || sizes[5] <= 0) {
        PyErr_SetString(PyExc_ValueError, "too many dtypes, or pieces without a byte");
        return -1;
    }
    for (Py_ssize_t code = 0; code < count; code++) {
        PyObject *itemsize = get_attribute(PyTuple_GetItem(dtypes, code), DTYPE_ITEMSIZE);
        end->itemsizes[code] = itemsize == NULL ? -1 : PyLong_AsLongLong(itemsize);
        Py_XDECREF(itemsize);
        if (PyErr_Occurred())
            return -1;
    }
    end->capacity = (uint64_t)capacity;
    end->out = ring_end_of(end->memory.buf, end->capacity, first ? 0 : 1);
    end->in = ring_end_of(end->memory.buf, end->capacity, first ? 1 : 0);
    Py_INCREF(dtypes);
    Py_INCREF(array_type);
    Py_INCREF(empty);
    Py_INCREF(empty_large);
    end->dtypes = dtypes;
    end->array_type = array_type;
    end->empty = empty;
    end->empty_large = empty_large;
    end->spin_ns = spin_ns;
    end->yield_ns = yield_ns;
    end->eager_bytes = sizes[0];
    end->credit_bytes = sizes[1];
    end->credit_batch = sizes[2];
    end->ack_batch = sizes[3];
    end->header_cost = sizes[4];
    end->piece_bytes = sizes[5];
    end->large_bytes = sizes[6];
    return 0;
}

static void message_end_release(PyObject *self)
{
    struct message_end *end = (struct message_end *)self;
    Py_CLEAR(end->dtypes);
    Py_CLEAR(end->array_type);
    Py_CLEAR(end->empty);
    Py_CLEAR(end->empty_large);
    long_release(end);
    free(end->kept);
    if (end->memory.obj != NULL)
        PyBuffer_Release(&end->memory);
}

/* Arrays */

/* Takes the memory of a plain array and its code; false, with no error, if Python has to look at it. */
static bool take_array(const struct message_end *end, PyObject *x, int flags, Py_buffer *view, int *code)
{
    if ((PyObject *)Py_TYPE(x) != end->array_type)
        return false;
    PyObject *dtype = get_attribute(x, ARRAY_DTYPE);
    Py_ssize_t count = PyTuple_Size(end->dtypes);
    *code = 0;
    while (*code < count && PyTuple_GetItem(end->dtypes, *code) != dtype)
        ++*code;
    Py_XDECREF(dtype);
    if (dtype == NULL || *code == count || PyObject_GetBuffer(x, view, flags) < 0) {
        PyErr_Clear(); /* Python says what is wrong with it */
        return false;
    }
    return true;
}

/* The instant at which a timeout in seconds from now ends. */
static int64_t instant_after(double seconds)
{
    return seconds < 9e9 ? monotonic_ns() + (int64_t)(seconds * 1e9) : INT64_MAX;
}

/* send(x, tag, timeout) -> whether it is sent; if not, Python has to do it. For a message that Python has to finish, what
 * `long_send` returns. */
static PyObject *method_send(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct message_end *end = (struct message_end *)self;
    struct long_message message = {.direction = SENDING};
    int code;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "send takes an array, a tag and a timeout");
    if (!is_lent(end) || end->message.direction != NO_MESSAGE || !PyLong_CheckExact(args[1]))
        Py_RETURN_FALSE;
    long long tag = PyLong_AsLongLong(args[1]);
    if (tag < 0 || tag >= RESERVED_TAGS) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (end->used > end->credit_bytes / 2 && !frames_take_control(end))
        return PyErr_NoMemory();
    Py_buffer *view = &message.view;
    if (end->used >= end->credit_bytes || !take_array(end, args[0], PyBUF_ND, view, &code))
        Py_RETURN_FALSE;
    bool is_long = view->len > end->eager_bytes;
    uint64_t length = FRAME_BYTES + 8 * (uint64_t)view->ndim + (is_long ? 0 : (uint64_t)view->len);
    if (view->ndim > MOST_AXES || length > frames_writable(end) || (is_long && end->waiting)) {
        PyBuffer_Release(view);
        Py_RETURN_FALSE;
    }
    struct frame *frame = &message.frame;
    *frame = (struct frame){
        .kind = is_long ? RTS : EAGER,
        .dtype = (uint8_t)code,
        .axes = (uint8_t)view->ndim,
        .tag = tag,
        .id = end->next_id,
        .nbytes = (uint64_t)view->len,
    };
    for (int axis = 0; axis < view->ndim; axis++)
        frame->shape[axis] = view->shape[axis];
    if (is_long) {
        double timeout = PyFloat_AsDouble(args[2]);
        if (PyErr_Occurred()) {
            PyBuffer_Release(view);
            return NULL;
        }
        Py_INCREF(args[0]);
        message.array = args[0];
        return long_send(end, &message, instant_after(timeout));
    }
    bool has_memory = frames_push(end, frame, view->buf, frame->nbytes);
    if (has_memory) {
        end->next_id++;
        end->used += end->header_cost + view->len;
        count_up(&end->sent_count, 1);
        count_up(&end->sent_bytes, view->len);
    }
    PyBuffer_Release(view);
    return has_memory ? PyBool_FromLong(true) : PyErr_NoMemory();
}

/* Whether a frame is the next message, an array as its header says, and has the wanted tag (negative: any). */
static bool is_wanted(const struct message_end *end, const struct frame *frame, long long tag)
{
    if (frame->kind != (frame->nbytes > (uint64_t)end->eager_bytes ? RTS : EAGER) || frame->content ||
        frame->dtype >= PyTuple_Size(end->dtypes) || frame->id != end->expected_id || end->held >= end->credit_bytes ||
        frame->tag < 0 || frame->tag >= RESERVED_TAGS || (tag >= 0 && frame->tag != tag))
        return false;
    int64_t nbytes = end->itemsizes[frame->dtype];
    for (int axis = 0; axis < frame->axes; axis++)
        if (frame->shape[axis] < 0 || __builtin_mul_overflow(nbytes, frame->shape[axis], &nbytes) || nbytes == 0)
            return false; /* an empty array takes the long way: its other axes must be checked, too */
    return (uint64_t)nbytes == frame->nbytes;
}

/* Returns an array like that of the frame, for a receive without `out`. */
static PyObject *new_array(const struct message_end *end, const struct frame *frame)
{
    PyObject *shape = PyTuple_New(frame->axes), *array = NULL;
    for (int axis = 0; shape != NULL && axis < frame->axes; axis++) {
        PyObject *length = PyLong_FromSsize_t(frame->shape[axis]);
        if (length == NULL || PyTuple_SetItem(shape, axis, length) < 0)
            Py_CLEAR(shape);
    }
    if (shape != NULL)
        array = PyObject_CallFunctionObjArgs(frame->nbytes < (uint64_t)end->large_bytes ? end->empty : end->empty_large,
                                             shape, PyTuple_GetItem(end->dtypes, frame->dtype), NULL);
    Py_XDECREF(shape);
    return array;
}

/* Takes the memory of `out`, or of a new array if that is None, for the message of a frame; false if it does not fit. */
static bool take_target(const struct message_end *end, PyObject *out, struct long_message *message)
{
    int code;
    if (out == Py_None)
        message->array = new_array(end, &message->frame);
    else
        Py_INCREF(message->array = out);
    if (message->array == NULL) {
        PyErr_Clear(); /* a peer may ask for any amount of memory: Python tells that there is too little */
        return false;
    }
    if (take_array(end, message->array, PyBUF_WRITABLE | PyBUF_ND, &message->view, &code)) {
        if (code == message->frame.dtype && (uint64_t)message->view.len == message->frame.nbytes)
            return true;
        PyBuffer_Release(&message->view);
    }
    Py_CLEAR(message->array);
    return false;
}

/* As `take_target`. Python runs while an array is made, or a destructor, and other threads with it: false, too, if one of them
 * has used the state, so that the frame may not be the next one any more. */
static bool take_target_alone(const struct message_end *end, PyObject *out, struct long_message *message)
{
    uint64_t turn = atomic_load(&end->turn), position = end->in.position;
    if (!take_target(end, out, message))
        return false;
    if (is_turn(end, turn) && end->in.position == position && end->message.direction == NO_MESSAGE)
        return true;
    PyBuffer_Release(&message->view);
    Py_CLEAR(message->array);
    return false;
}

/* Receives the next message, if it is the wanted one and is short, and all of it is here; of a long one it takes the memory.
 * TAKEN says that `message` has the array and, if it is a long one, its view. */
static enum found take_message(struct message_end *end, PyObject *out, long long tag, struct long_message *message)
{
    struct frame *frame = &message->frame;
    if (!frames_take_control(end)) {
        PyErr_NoMemory();
        return OTHER;
    }
    enum found found = frames_peek(end, frame);
    if (found != TAKEN)
        return found;
    uint64_t header = FRAME_BYTES + 8 * (uint64_t)frame->axes, length = header + frame->nbytes;
    if (!is_wanted(end, frame, tag))
        return OTHER;
    if (frame->kind == RTS)
        return take_target_alone(end, out, message) ? TAKEN : OTHER;
    if (length > end->capacity)
        return OTHER;
    if (frames_readable(end) < length)
        return NOTHING;
    if (!take_target_alone(end, out, message))
        return OTHER;
    if (frames_writable(end) < 2 * FRAME_BYTES) {
        PyBuffer_Release(&message->view);
        Py_CLEAR(message->array);
        return OTHER;
    }
    frames_copy_out(end, header, message->view.buf, frame->nbytes);
    PyBuffer_Release(&message->view);
    int64_t cost = end->header_cost + (int64_t)frame->nbytes;
    end->expected_id++;
    end->held += cost;
    end->owed += cost;
    count_up(&end->received_count, 1);
    count_up(&end->received_bytes, (int64_t)frame->nbytes);
    frames_consume(end, length);
    if (!frames_acknowledge_after(end, cost) || !frames_give_credit(end)) {
        Py_CLEAR(message->array);
        PyErr_NoMemory();
        return OTHER;
    }
    return TAKEN;
}

/* receive(out or None, tag or -1, deadline) -> the array, or False if Python has to receive it. The deadline is on
 * time.monotonic(). For a message that Python has to finish, what `long_receive` returns. */
static PyObject *method_receive(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct message_end *end = (struct message_end *)self;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "receive takes an array or None, a tag and a deadline");
    if (!is_lent(end) || end->message.direction != NO_MESSAGE || !PyLong_CheckExact(args[1]) || end->waiting)
        Py_RETURN_FALSE;
    long long tag = PyLong_AsLongLong(args[1]);
    double deadline = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() || tag < -1 || tag >= RESERVED_TAGS) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    int64_t until = deadline < 9e9 ? (int64_t)(deadline * 1e9) : INT64_MAX, look_until = 0;
    for (unsigned looks = 0; is_lent(end) && end->message.direction == NO_MESSAGE; looks++) {
        struct long_message message = {.direction = RECEIVING};
        uint64_t seen = atomic_load_explicit(end->in.head, memory_order_acquire), turn = atomic_load(&end->turn);
        enum found found = take_message(end, args[0], tag, &message);
        if (found == TAKEN)
            return message.frame.kind == RTS ? long_receive(end, &message, until) : message.array;
        if (PyErr_Occurred())
            return NULL;
        if (found == OTHER)
            break;
        if (end->spin_ns && looks % LOOKS == 0) {
            int64_t now = monotonic_ns();
            look_until = look_until ? look_until : now + LOOK_NS;
            if (now >= look_until)
                look_until = -1;
        }
        if (end->spin_ns && look_until >= 0) {
            relax();
            continue;
        }
        int trouble;
        Py_INCREF(self);
        end->waiting++;
        Py_BEGIN_ALLOW_THREADS
        trouble = frames_wait(end, end->in.head, end->in.reader_asleep, seen, turn, until);
        Py_END_ALLOW_THREADS
        end->waiting--;
        bool is_there = !is_turn(end, turn) || frames_wake_up(end, end->in.reader_asleep);
        Py_DECREF(self); /* the caller has another reference */
        if (trouble == EINTR && PyErr_CheckSignals() < 0)
            return NULL;
        if ((trouble && trouble != EINTR) || (!is_there && frames_readable(end) == 0))
            break;
    }
    Py_RETURN_FALSE;
}

/* lend(head, tail, next id, used, sent, has, expected id, held, owed, unacknowledged, received): the state of the
 * streams, from Outlet, Inlet and MessageLink. */
static PyObject *method_lend(PyObject *self, PyObject *args)
{
    struct message_end *end = (struct message_end *)self;
    unsigned long long head, tail, next_id, sent, has, expected_id, received;
    long long used, held, owed, unacknowledged;
    if (!PyArg_ParseTuple(args, "KKKLKKKLLLK", &head, &tail, &next_id, &used, &sent, &has, &expected_id, &held, &owed,
                          &unacknowledged, &received))
        return NULL;
    if (is_lent(end))
        return PyErr_Format(PyExc_RuntimeError, "the messages are lent already");
    end->kept_at = end->kept_bytes = 0;
    end->out.position = head;
    end->in.position = tail;
    end->next_id = next_id;
    end->used = used;
    end->sent = sent;
    end->has = has;
    end->expected_id = expected_id;
    end->held = held;
    end->owed = owed;
    end->unacknowledged = unacknowledged;
    end->received = received;
    end->sent_count = end->sent_bytes = end->received_count = end->received_bytes = 0;
    atomic_fetch_add(&end->turn, 1);
    Py_RETURN_NONE;
}

/* take_back() -> what `lend` got as it is now, the last bytes that were sent, the long message that is under way, as
 * `long_take_back` describes it, and whether a thread waits that must be woken. */
static PyObject *method_take_back(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct message_end *end = (struct message_end *)self;
    if (!is_lent(end))
        return PyErr_Format(PyExc_RuntimeError, "the messages are not lent");
    atomic_fetch_add(&end->turn, 1);
    while (atomic_load(&end->is_moving)) { /* at most for one piece */
        Py_BEGIN_ALLOW_THREADS
        sched_yield();
        Py_END_ALLOW_THREADS
    }
    frames_ring(end);
    PyObject *message = long_take_back(end);
    if (message == NULL)
        return NULL;
    return Py_BuildValue(
        "((KKKLKKKLLLK)y#NO)", (unsigned long long)end->out.position, (unsigned long long)end->in.position,
        (unsigned long long)end->next_id, (long long)end->used, (unsigned long long)end->sent, (unsigned long long)end->has,
        (unsigned long long)end->expected_id, (long long)end->held, (long long)end->owed, (long long)end->unacknowledged,
        (unsigned long long)end->received, end->kept_bytes ? (const char *)end->kept + end->kept_at : "",
        (Py_ssize_t)end->kept_bytes, message, end->waiting ? Py_True : Py_False);
}

/* counts() -> (messages sent, their bytes, messages received, their bytes) since the state was lent */
static PyObject *method_counts(PyObject *self, PyObject *unused)
{
    (void)unused;
    const struct message_end *end = (const struct message_end *)self;
    return Py_BuildValue("(LLLL)", (long long)end->sent_count, (long long)end->sent_bytes, (long long)end->received_count,
                         (long long)end->received_bytes);
}

static PyMethodDef message_end_methods[] = {
    {"send", (PyCFunction)(void (*)(void))method_send, METH_FASTCALL, "Send an array, if nothing is in the way."},
    {"receive", (PyCFunction)(void (*)(void))method_receive, METH_FASTCALL, "Receive an array, if it comes next."},
    {"lend", method_lend, METH_VARARGS, "Let messages pass from now on."},
    {"take_back", method_take_back, METH_NOARGS, "Let none pass, and return the state of the streams."},
    {"counts", method_counts, METH_NOARGS, "Return how many messages have passed, and their bytes."},
    {NULL, NULL, 0, NULL},
};

struct kind message_end_kind = {
    .name = "covey._native.MessageEnd",
    .size = sizeof(struct message_end),
    .fill = message_end_fill,
    .release = message_end_release,
    .methods = message_end_methods,
};
