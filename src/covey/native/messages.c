/* Short messages over a pair of rings: a send or a receive is one call, if nothing has to be decided.
 *
 * The stream of frames is that of covey/proto/message_link.py, which owns its state and lends it: while it is lent,
 * MessageEnd keeps the counters, and Python knows nothing of the messages that pass. A thread that takes the messenger's
 * lock takes the state back first. Both happen with the interpreter's lock held, which `send` never gives up, and
 * `receive` only to wait. Invariants:
 *   - A frame is consumed whole or not at all. Whatever is not an array that the waiting receive takes, or an ACK or a
 *     CREDIT that is as it should be, stays in the ring: the call returns False, and Python reads it from there.
 *   - What is sent is kept until the peer acknowledges it, because the lane may be replaced.
 *   - A thread that waits without the interpreter's lock reads nothing but `is_lent` and the ring's `head`. It changes
 *     its mark in the ring only while the state is lent, so that it never wakes, or hides, another reader.
 */
#include "ring.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAGIC = 0xC0FE,
    FRAME_VERSION = 1,
    EAGER = 1,
    CREDIT = 5,
    ACK = 6,
    FRAME_BYTES = 32, /* of a header without a shape */
    MOST_AXES = 8,
    MOST_DTYPES = 64,
    LOOKS = 64, /* at the ring between two looks at the clock */
};
static const int64_t RESERVED_TAGS = (int64_t)1 << 62;
static const int64_t LOOK_NS = 20 * 1000;         /* of a receive with the interpreter's lock held */
static const int64_t SLEEP_NS = 1000 * 1000 * 1000; /* the longest sleep: descriptors may be closed meanwhile */

struct frame {
    uint8_t kind, content, dtype, axes;
    int64_t tag;
    uint64_t id, nbytes;
    Py_ssize_t shape[MOST_AXES];
};

struct message_end {
    PyObject_HEAD
    Py_buffer memory;
    struct ring_end out, in;
    uint64_t capacity;
    int doorbell, bell, wake;
    PyObject *dtypes, *array_type, *empty;
    int64_t itemsizes[MOST_DTYPES];
    int64_t eager_bytes, credit_bytes, credit_batch, ack_batch, header_cost;
    int64_t spin_ns, yield_ns;
    _Atomic bool is_lent;
    int waiting; /* threads that wait in `receive` */

    /* What is lent; the names are those of MessageLink, Inlet and Outlet. */
    uint64_t next_id, sent, has;
    int64_t used;
    uint64_t expected_id, received;
    int64_t held, owed, unacknowledged;
    uint8_t *kept; /* the last bytes that were sent: kept_bytes from kept_at, in memory of kept_room bytes */
    uint64_t kept_at, kept_bytes, kept_room;
    int64_t sent_count, sent_bytes, received_count, received_bytes;
};

static PyObject *name_dtype;

/* MessageEnd(memory, capacity, doorbell, first, bell, wake, dtypes, array type, empty, spin ns, yield ns,
 * (eager bytes, credit bytes, credit batch, ack batch, header cost)) */
static int message_end_fill(PyObject *self, PyObject *args)
{
    struct message_end *end = (struct message_end *)self;
    PyObject *memory, *dtypes, *array_type, *empty;
    long long capacity, spin_ns, yield_ns, sizes[5];
    int first;
    if (!PyArg_ParseTuple(args, "OLipiiO!OOLL(LLLLL)", &memory, &capacity, &end->doorbell, &first, &end->bell, &end->wake,
                          &PyTuple_Type, &dtypes, &array_type, &empty, &spin_ns, &yield_ns, &sizes[0], &sizes[1],
                          &sizes[2], &sizes[3], &sizes[4]))
        return -1;
    if (name_dtype == NULL && (name_dtype = PyUnicode_InternFromString("dtype")) == NULL)
        return -1;
    if (PyObject_GetBuffer(memory, &end->memory, PyBUF_WRITABLE) < 0 || !ring_fits(&end->memory, capacity))
        return -1;
    Py_ssize_t count = PyTuple_Size(dtypes);
    if (count > MOST_DTYPES) {
        PyErr_SetString(PyExc_ValueError, "too many dtypes");
        return -1;
    }
    for (Py_ssize_t code = 0; code < count; code++) {
        PyObject *itemsize = PyObject_GetAttrString(PyTuple_GetItem(dtypes, code), "itemsize");
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
    end->dtypes = dtypes;
    end->array_type = array_type;
    end->empty = empty;
    end->spin_ns = spin_ns;
    end->yield_ns = yield_ns;
    end->eager_bytes = sizes[0];
    end->credit_bytes = sizes[1];
    end->credit_batch = sizes[2];
    end->ack_batch = sizes[3];
    end->header_cost = sizes[4];
    return 0;
}

static void message_end_release(PyObject *self)
{
    struct message_end *end = (struct message_end *)self;
    Py_CLEAR(end->dtypes);
    Py_CLEAR(end->array_type);
    Py_CLEAR(end->empty);
    free(end->kept);
    if (end->memory.obj != NULL)
        PyBuffer_Release(&end->memory);
}

/* Rings: a position of the peer is compared with our own before it is used. */

static uint64_t readable(const struct message_end *end)
{
    return atomic_load_explicit(end->in.head, memory_order_acquire) - end->in.position;
}

static uint64_t writable(const struct message_end *end)
{
    uint64_t used = end->out.position - atomic_load_explicit(end->out.tail, memory_order_acquire);
    return used <= end->capacity ? end->capacity - used : 0;
}

static void copy_out(const struct message_end *end, uint64_t offset, uint8_t *to, uint64_t nbytes)
{
    uint64_t at = (end->in.position + offset) % end->capacity, first = end->capacity - at;
    first = nbytes < first ? nbytes : first;
    memcpy(to, end->in.bytes + at, first);
    memcpy(to + first, end->in.bytes, nbytes - first);
}

static void consume(struct message_end *end, uint64_t nbytes)
{
    end->received += nbytes;
    end->in.position += nbytes;
    atomic_store_explicit(end->in.tail, end->in.position, memory_order_release);
    ring_wake_if(end->doorbell, end->in.writer_asleep);
}

/* Frames */

/* Makes room to keep `nbytes` more, and returns where; NULL, with a Python error, without memory. */
static uint8_t *make_room(struct message_end *end, uint64_t nbytes)
{
    if (end->kept_at + end->kept_bytes + nbytes > end->kept_room) {
        if (end->kept_at)
            memmove(end->kept, end->kept + end->kept_at, end->kept_bytes);
        end->kept_at = 0;
        uint64_t room = 2 * (end->kept_bytes + nbytes);
        uint8_t *kept = room <= end->kept_room ? end->kept : realloc(end->kept, room);
        if (kept == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        end->kept = kept;
        end->kept_room = room <= end->kept_room ? end->kept_room : room;
    }
    return end->kept + end->kept_at + end->kept_bytes;
}

static void copy_in(const struct message_end *end, uint64_t offset, const uint8_t *from, uint64_t nbytes)
{
    uint64_t at = (end->out.position + offset) % end->capacity, first = end->capacity - at;
    first = nbytes < first ? nbytes : first;
    memcpy(end->out.bytes + at, from, first);
    memcpy(end->out.bytes, from + first, nbytes - first);
}

/* Writes a frame to the ring, which has room for it, and keeps it; false, with a Python error, without memory. */
static bool push(struct message_end *end, const struct frame *frame, const uint8_t *payload, uint64_t nbytes)
{
    uint64_t header = FRAME_BYTES + 8 * (uint64_t)frame->axes;
    uint8_t data[FRAME_BYTES + 8 * MOST_AXES], *kept = make_room(end, header + nbytes);
    if (kept == NULL)
        return false;
    const uint8_t fixed[8] = {
        MAGIC & 0xFF, MAGIC >> 8, FRAME_VERSION, frame->kind, frame->content, frame->dtype, frame->axes, 0,
    };
    memcpy(data, fixed, sizeof fixed);
    put_word(data + 8, (uint64_t)frame->tag);
    put_word(data + 16, frame->id);
    put_word(data + 24, frame->nbytes);
    for (int axis = 0; axis < frame->axes; axis++)
        put_word(data + FRAME_BYTES + 8 * axis, (uint64_t)frame->shape[axis]);
    copy_in(end, 0, data, header);
    if (nbytes)
        copy_in(end, header, payload, nbytes);
    end->sent += header + nbytes;
    end->out.position += header + nbytes;
    atomic_store_explicit(end->out.head, end->out.position, memory_order_release);
    ring_wake_if(end->doorbell, end->out.reader_asleep);
    memcpy(kept, data, header); /* now, while the peer reads it */
    if (nbytes)
        memcpy(kept + header, payload, nbytes);
    end->kept_bytes += header + nbytes;
    return true;
}

enum found { NOTHING, OTHER, TAKEN };

/* Reads the next header: NOTHING if it is not all here, OTHER if Python has to look at it. */
static enum found peek(const struct message_end *end, struct frame *frame)
{
    uint8_t header[FRAME_BYTES + 8 * MOST_AXES]; /* a copy that the peer cannot change */
    uint64_t there = readable(end);
    if (there > end->capacity)
        return OTHER;
    if (there < FRAME_BYTES)
        return NOTHING;
    copy_out(end, 0, header, FRAME_BYTES);
    frame->kind = header[3];
    frame->content = header[4];
    frame->dtype = header[5];
    frame->axes = header[6];
    frame->tag = (int64_t)get_word(header + 8);
    frame->id = get_word(header + 16);
    frame->nbytes = get_word(header + 24);
    if (header[0] != (MAGIC & 0xFF) || header[1] != MAGIC >> 8 || header[2] != FRAME_VERSION || frame->axes > MOST_AXES)
        return OTHER;
    if (there < FRAME_BYTES + 8 * (uint64_t)frame->axes)
        return NOTHING;
    copy_out(end, FRAME_BYTES, header + FRAME_BYTES, 8 * (uint64_t)frame->axes);
    for (int axis = 0; axis < frame->axes; axis++)
        frame->shape[axis] = (Py_ssize_t)get_word(header + FRAME_BYTES + 8 * axis);
    return TAKEN;
}

/* Acknowledgements and credit, as MessageLink gives and takes them */

static bool acknowledge_after(struct message_end *end, int64_t cost)
{
    end->unacknowledged += cost;
    if (end->unacknowledged < end->ack_batch)
        return true;
    const struct frame frame = {.kind = ACK, .nbytes = end->received};
    if (!push(end, &frame, NULL, 0))
        return false;
    end->unacknowledged = 0;
    return true;
}

static bool give_credit(struct message_end *end)
{
    if (!end->owed || (end->owed < end->credit_batch && end->held < end->credit_bytes))
        return true;
    const struct frame frame = {.kind = CREDIT, .nbytes = (uint64_t)end->owed};
    if (!push(end, &frame, NULL, 0))
        return false;
    end->held -= end->owed;
    end->owed = 0;
    return true;
}

/* Notes that the peer has so many bytes of our stream, and drops those that were kept. */
static void note_arrived(struct message_end *end, uint64_t position)
{
    if (position <= end->has)
        return;
    end->has = position;
    uint64_t missing = end->sent - position;
    if (missing < end->kept_bytes) {
        end->kept_at += end->kept_bytes - missing;
        end->kept_bytes = missing;
    }
}

/* Takes the ACK and CREDIT frames that are next; false with a Python error. Others stay, and those that cannot be. */
static bool take_control(struct message_end *end)
{
    struct frame frame;
    while (writable(end) >= FRAME_BYTES && peek(end, &frame) == TAKEN) {
        bool is_plain = !frame.tag && !frame.content && !frame.dtype && !frame.axes && !frame.id;
        bool is_ack = frame.kind == ACK && frame.nbytes <= end->sent;
        bool is_credit = frame.kind == CREDIT && frame.nbytes <= (uint64_t)end->used;
        if (!is_plain || (!is_ack && !is_credit))
            return true;
        if (is_credit)
            end->used -= (int64_t)frame.nbytes;
        else
            note_arrived(end, frame.nbytes);
        consume(end, FRAME_BYTES);
        if (!acknowledge_after(end, end->header_cost))
            return false;
    }
    return true;
}

/* Arrays */

/* Takes the memory of a plain array and its code; false, with no error, if Python has to look at it. */
static bool take_array(const struct message_end *end, PyObject *x, int flags, Py_buffer *view, int *code)
{
    if ((PyObject *)Py_TYPE(x) != end->array_type)
        return false;
    PyObject *dtype = PyObject_GetAttr(x, name_dtype);
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

/* send(x, tag) -> whether it is sent; if not, Python has to do it */
static PyObject *method_send(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct message_end *end = (struct message_end *)self;
    Py_buffer view;
    int code;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "send takes an array and a tag");
    if (!end->is_lent || !PyLong_CheckExact(args[1]))
        Py_RETURN_FALSE;
    long long tag = PyLong_AsLongLong(args[1]);
    if (tag < 0 || tag >= RESERVED_TAGS) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (end->used > end->credit_bytes / 2 && !take_control(end))
        return NULL;
    if (end->used >= end->credit_bytes || !take_array(end, args[0], PyBUF_ND, &view, &code))
        Py_RETURN_FALSE;
    uint64_t length = FRAME_BYTES + 8 * (uint64_t)view.ndim + (uint64_t)view.len;
    bool is_sent = false;
    if (view.ndim <= MOST_AXES && view.len <= end->eager_bytes && length <= writable(end)) {
        struct frame frame = {
            .kind = EAGER,
            .dtype = (uint8_t)code,
            .axes = (uint8_t)view.ndim,
            .tag = tag,
            .id = end->next_id,
            .nbytes = (uint64_t)view.len,
        };
        for (int axis = 0; axis < view.ndim; axis++)
            frame.shape[axis] = view.shape[axis];
        is_sent = push(end, &frame, view.buf, frame.nbytes);
        if (is_sent) {
            end->next_id++;
            end->used += end->header_cost + view.len;
            end->sent_count++;
            end->sent_bytes += view.len;
        }
    }
    PyBuffer_Release(&view);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_sent);
}

/* Whether a frame is the next message, an array as its header says, and has the wanted tag (negative: any). */
static bool is_wanted(const struct message_end *end, const struct frame *frame, long long tag)
{
    if (frame->kind != EAGER || frame->content || frame->dtype >= PyTuple_Size(end->dtypes) ||
        frame->id != end->expected_id || frame->nbytes > (uint64_t)end->eager_bytes || end->held >= end->credit_bytes ||
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
        array = PyObject_CallFunctionObjArgs(end->empty, shape, PyTuple_GetItem(end->dtypes, frame->dtype), NULL);
    Py_XDECREF(shape);
    return array;
}

/* Receives the next message, if it is the wanted one and all of it is here, into `out` or, if that is None, a new array. */
static enum found take_message(struct message_end *end, PyObject *out, long long tag, PyObject **taken)
{
    struct frame frame;
    Py_buffer view;
    int code;
    if (!take_control(end))
        return OTHER;
    enum found found = peek(end, &frame);
    if (found != TAKEN)
        return found;
    uint64_t header = FRAME_BYTES + 8 * (uint64_t)frame.axes, length = header + frame.nbytes;
    if (!is_wanted(end, &frame, tag) || writable(end) < 2 * FRAME_BYTES || length > end->capacity)
        return OTHER;
    if (readable(end) < length)
        return NOTHING;
    PyObject *array = out;
    if (out == Py_None)
        array = new_array(end, &frame);
    else
        Py_INCREF(array);
    if (array == NULL)
        return OTHER;
    if (!take_array(end, array, PyBUF_WRITABLE | PyBUF_ND, &view, &code)) {
        Py_DECREF(array);
        return OTHER;
    }
    bool fits = code == frame.dtype && (uint64_t)view.len == frame.nbytes;
    if (fits)
        copy_out(end, header, view.buf, frame.nbytes);
    PyBuffer_Release(&view);
    if (!fits) {
        Py_DECREF(array);
        return OTHER;
    }
    int64_t cost = end->header_cost + (int64_t)frame.nbytes;
    end->expected_id++;
    end->held += cost;
    end->owed += cost;
    end->received_count++;
    end->received_bytes += (int64_t)frame.nbytes;
    consume(end, length);
    if (!acknowledge_after(end, cost) || !give_credit(end)) {
        Py_DECREF(array);
        return OTHER;
    }
    *taken = array;
    return TAKEN;
}

/* Waits, without the interpreter's lock, until more than `seen` is in the ring. Returns 0, or an error number: EINTR for
 * a signal, ECANCELED if Python has to go on. */
static int wait_for_more(struct message_end *end, uint64_t seen, int64_t until)
{
    int64_t since = monotonic_ns(), now = since;
    for (int looks = 1; now - since < end->spin_ns + end->yield_ns; looks++) {
        if (atomic_load_explicit(end->in.head, memory_order_acquire) != seen)
            return 0;
        if (!atomic_load_explicit(&end->is_lent, memory_order_relaxed))
            return ECANCELED;
        if (now - since < end->spin_ns)
            relax();
        else
            sched_yield();
        if (looks % LOOKS == 0 || now - since >= end->spin_ns)
            now = monotonic_ns();
    }
    struct pollfd polls[3] = {
        {.fd = end->doorbell, .events = POLLIN},
        {.fd = end->bell, .events = POLLIN},
        {.fd = end->wake, .events = POLLIN},
    };
    while (now < until) {
        atomic_store_explicit(end->in.reader_asleep, 1, memory_order_relaxed);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit(end->in.head, memory_order_acquire) != seen)
            return 0;
        if (!atomic_load_explicit(&end->is_lent, memory_order_relaxed))
            return ECANCELED;
        int64_t left = smaller(until - now, SLEEP_NS);
        int ready = poll(polls, 3, (int)((left + 999999) / 1000000));
        if (ready < 0)
            return errno;
        if (polls[1].revents || polls[2].revents)
            return ECANCELED;
        if (ready)
            return 0;
        now = monotonic_ns();
        if (left == SLEEP_NS)
            return EINTR; /* a signal may have come to another thread */
    }
    return ECANCELED;
}

/* The thread is awake again: clears its mark, unless Python has the ring now; false if the peer has hung up. */
static bool wake_up(struct message_end *end)
{
    char rung[64];
    if (!end->is_lent || !atomic_load_explicit(end->in.reader_asleep, memory_order_relaxed))
        return true;
    atomic_store_explicit(end->in.reader_asleep, 0, memory_order_relaxed);
    ssize_t count = recv(end->doorbell, rung, sizeof rung, MSG_DONTWAIT);
    return count > 0 || (count < 0 && would_block(errno));
}

/* receive(out or None, tag or -1, deadline) -> the array, or False if Python has to receive it. The deadline is on
 * time.monotonic(). */
static PyObject *method_receive(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct message_end *end = (struct message_end *)self;
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "receive takes an array or None, a tag and a deadline");
    if (!end->is_lent || !PyLong_CheckExact(args[1]) || end->waiting)
        Py_RETURN_FALSE;
    long long tag = PyLong_AsLongLong(args[1]);
    double deadline = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() || tag < -1 || tag >= RESERVED_TAGS) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    int64_t until = deadline < 9e9 ? (int64_t)(deadline * 1e9) : INT64_MAX, look_until = 0;
    for (unsigned looks = 0; end->is_lent; looks++) {
        PyObject *taken = NULL;
        uint64_t seen = atomic_load_explicit(end->in.head, memory_order_acquire);
        enum found found = take_message(end, args[0], tag, &taken);
        if (found == TAKEN)
            return taken;
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
        trouble = wait_for_more(end, seen, until);
        Py_END_ALLOW_THREADS
        end->waiting--;
        bool is_there = wake_up(end);
        Py_DECREF(self); /* the caller has another reference */
        if (trouble == EINTR && PyErr_CheckSignals() < 0)
            return NULL;
        if ((trouble && trouble != EINTR) || (!is_there && readable(end) == 0))
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
    if (end->is_lent)
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
    end->is_lent = true;
    Py_RETURN_NONE;
}

/* take_back() -> what `lend` got as it is now, the last bytes that were sent, and whether a thread waits that must be
 * woken. */
static PyObject *method_take_back(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct message_end *end = (struct message_end *)self;
    if (!end->is_lent)
        return PyErr_Format(PyExc_RuntimeError, "the messages are not lent");
    PyObject *state = Py_BuildValue(
        "((KKKLKKKLLLK)y#O)", (unsigned long long)end->out.position, (unsigned long long)end->in.position,
        (unsigned long long)end->next_id, (long long)end->used, (unsigned long long)end->sent, (unsigned long long)end->has,
        (unsigned long long)end->expected_id, (long long)end->held, (long long)end->owed, (long long)end->unacknowledged,
        (unsigned long long)end->received, end->kept_bytes ? (const char *)end->kept + end->kept_at : "",
        (Py_ssize_t)end->kept_bytes, end->waiting ? Py_True : Py_False);
    if (state != NULL)
        end->is_lent = false;
    return state;
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
