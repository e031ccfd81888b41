/* Long messages: announced, asked for, moved in pieces and acknowledged, by one call at each end.
 *
 * The sender writes RTS and waits for CTS; then it writes DATA frames, and waits until the peer has acknowledged all of
 * them. The receiver answers RTS with CTS, writes the DATA frames to the memory of its array, and acknowledges them. All of
 * it runs without the interpreter's lock, in steps between which Python may take the state back. Invariants:
 *   - `message` in the state says how far the message is, after every step: Python can go on from there with the array. It
 *     does if anything else arrives than the frame that must come next, at the deadline, if the peer hangs up, or if another
 *     thread needs the streams. A call that has not finished its message says so to its caller, which goes on in Python.
 *   - While a message is sent, no other frame is: so what is kept is what was sent before its payload, and the payload, of
 *     which nothing is kept, stays in the array until the peer has all of it.
 *   - Before CTS is sent, there is room and memory for the other frames that a receive has to send.
 *   - A header is checked before the first byte of its piece is taken, so a peer writes into this array and nowhere else.
 */
#include "messages.h"

#include <errno.h>

enum { STEP_BYTES = 1 << 16 };                          /* moved at once: the other end works on it meanwhile */
static const int64_t LOOK_UP_NS = 50 * 1000 * 1000;     /* without the interpreter's lock, before signals are looked for */
enum advance {
    ADVANCED,
    NEEDS_FRAME, /* more bytes from the peer */
    NEEDS_ROOM,
    FINISHED,
    LEFT_TO_PYTHON, /* which has to go on */
    TAKEN_BACK,     /* Python goes on already */
    LOOKS_UP,       /* for signals */
};

/* Whether a header has nothing but a kind, an id and a number of bytes. */
static bool is_plain(const struct frame *frame)
{
    return !frame->tag && !frame->content && !frame->dtype && !frame->axes;
}

/* Writes the next bytes of the DATA frames: pieces of the payload, each with its header. */
static enum advance send_payload(struct message_end *end)
{
    struct long_message *message = &end->message;
    uint64_t piece_bytes = (uint64_t)end->piece_bytes, frame_bytes = FRAME_BYTES + piece_bytes;
    uint64_t begins = message->moved / frame_bytes * piece_bytes, at = message->moved % frame_bytes;
    uint64_t used = end->out.position - atomic_load_explicit(end->out.tail, memory_order_acquire);
    if (used > end->capacity)
        return LEFT_TO_PYTHON;
    uint64_t room = end->capacity - used, header = 0;
    uint64_t piece = (uint64_t)smaller((int64_t)piece_bytes, (int64_t)(message->frame.nbytes - begins));
    if (at == 0) {
        uint8_t data[FRAME_BYTES + 8 * MOST_AXES];
        const struct frame frame = {.kind = DATA, .id = message->frame.id, .nbytes = piece};
        if (room < FRAME_BYTES)
            return NEEDS_ROOM;
        frames_encode(&frame, data);
        frames_write(end, 0, data, FRAME_BYTES);
        at = header = FRAME_BYTES;
    }
    uint64_t from = at - FRAME_BYTES;
    uint64_t step = (uint64_t)smaller(smaller((int64_t)(piece - from), STEP_BYTES), (int64_t)(room - header));
    if (header + step == 0)
        return NEEDS_ROOM;
    frames_write(end, header, (const uint8_t *)message->view.buf + begins + from, step);
    message->moved += header + step;
    frames_publish_part(end, header + step);
    return ADVANCED;
}

static enum advance send_step(struct message_end *end)
{
    struct long_message *message = &end->message;
    struct frame frame;
    if (!frames_take_control(end))
        return LEFT_TO_PYTHON;
    if (message->is_cleared && end->sent < message->ends)
        return send_payload(end);
    if (message->is_cleared && end->has >= message->ends) {
        message->is_over = true;
        return FINISHED;
    }
    enum found found = frames_peek(end, &frame);
    if (found == NOTHING)
        return NEEDS_FRAME;
    bool is_answer = found == TAKEN && !message->is_cleared && frame.kind == CTS && frame.id == message->frame.id &&
                     is_plain(&frame) && (frame.nbytes == message->frame.nbytes || frame.nbytes == 0);
    if (!is_answer)
        return LEFT_TO_PYTHON;
    message->is_cleared = frame.nbytes != 0;
    message->is_over = !message->is_cleared; /* the receiver has dropped the message */
    frames_consume(end, FRAME_BYTES);
    frames_acknowledge_after(end, end->header_cost);
    return message->is_over ? FINISHED : ADVANCED;
}

static enum advance receive_step(struct message_end *end)
{
    struct long_message *message = &end->message;
    uint64_t missing = message->frame.nbytes - message->moved;
    if (!message->left && missing) {
        struct frame frame;
        if (!frames_take_control(end))
            return LEFT_TO_PYTHON;
        enum found found = frames_peek(end, &frame);
        if (found == NOTHING)
            return NEEDS_FRAME;
        bool is_next = found == TAKEN && frame.kind == DATA && frame.id == message->frame.id && is_plain(&frame) &&
                       frame.nbytes > 0 && frame.nbytes <= missing && frames_writable(end) >= 2 * FRAME_BYTES;
        if (!is_next)
            return LEFT_TO_PYTHON;
        message->left = frame.nbytes;
        frames_consume_part(end, FRAME_BYTES);
        if (!frames_acknowledge_after(end, end->header_cost))
            return LEFT_TO_PYTHON;
    }
    uint64_t there = frames_readable(end);
    if (there > end->capacity)
        return LEFT_TO_PYTHON;
    uint64_t step = (uint64_t)smaller(smaller((int64_t)message->left, STEP_BYTES), (int64_t)there);
    if (!step)
        return NEEDS_FRAME;
    frames_copy_out(end, 0, (uint8_t *)message->view.buf + message->moved, step);
    message->moved += step;
    message->left -= step;
    frames_consume_part(end, step);
    if (message->moved < message->frame.nbytes)
        return ADVANCED;
    if (frames_writable(end) < FRAME_BYTES || !frames_acknowledge(end))
        return LEFT_TO_PYTHON;
    count_up(&end->received_count, 1);
    count_up(&end->received_bytes, (int64_t)message->frame.nbytes);
    message->is_over = true;
    return FINISHED;
}

/* Says that this thread changes the state now; false if it may not. `leave` follows in any case. */
static bool enter(struct message_end *end, uint64_t turn)
{
    atomic_store(&end->is_moving, true);
    return is_turn(end, turn);
}

static void leave(struct message_end *end) { atomic_store(&end->is_moving, false); }

/* Waits until there is a frame, or room; says whether it goes on. */
static enum advance wait_for(struct message_end *end, bool for_room, uint64_t seen, uint64_t turn, int64_t until)
{
    word *watched = for_room ? end->out.tail : end->in.head;
    word *asleep = for_room ? end->out.writer_asleep : end->in.reader_asleep;
    int trouble = frames_wait(end, watched, asleep, seen, turn, until);
    enum advance advance = TAKEN_BACK;
    if (enter(end, turn)) {
        bool is_there = frames_wake_up(end, asleep);
        advance = trouble == EINTR ? LOOKS_UP : trouble || !is_there ? LEFT_TO_PYTHON : ADVANCED;
    }
    leave(end);
    return advance;
}

/* Moves the message until it is finished or something else is to be done. Without the interpreter's lock. */
static enum advance run(struct message_end *end, uint64_t turn, int64_t until)
{
    int64_t look_up = monotonic_ns() + LOOK_UP_NS;
    enum advance advance = ADVANCED;
    for (unsigned steps = 1; advance == ADVANCED; steps++) {
        uint64_t head = 0, tail = 0;
        advance = TAKEN_BACK;
        if (enter(end, turn)) {
            head = atomic_load_explicit(end->in.head, memory_order_acquire);
            tail = atomic_load_explicit(end->out.tail, memory_order_acquire);
            advance = end->message.direction == SENDING ? send_step(end) : receive_step(end);
            if (advance == ADVANCED && steps % LOOKS == 0 && monotonic_ns() > look_up)
                advance = LOOKS_UP;
            if (advance != ADVANCED)
                frames_ring(end);
        }
        leave(end);
        if (advance == NEEDS_FRAME || advance == NEEDS_ROOM)
            advance = wait_for(end, advance == NEEDS_ROOM, advance == NEEDS_ROOM ? tail : head, turn, until);
    }
    return advance;
}

/* Forgets the message, with the interpreter's lock. */
void long_release(struct message_end *end)
{
    struct long_message *message = &end->message;
    if (message->direction == NO_MESSAGE)
        return;
    message->direction = NO_MESSAGE;
    PyBuffer_Release(&message->view);
    Py_CLEAR(message->array);
}

/* The exception that is set, as an object. */
static PyObject *take_exception(void)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* Moves the message that has begun. Returns a new reference to `result`, or (turn, deadline, exception or None) for a
 * message that Python has to finish, or to abandon because a signal handler raised. */
static PyObject *move_long(struct message_end *end, PyObject *result, int64_t until)
{
    uint64_t turn = atomic_load(&end->turn);
    PyObject *raised = NULL;
    enum advance advance = ADVANCED;
    Py_INCREF(result);
    Py_INCREF((PyObject *)end);
    do {
        end->waiting++;
        Py_BEGIN_ALLOW_THREADS
        advance = run(end, turn, until);
        Py_END_ALLOW_THREADS
        end->waiting--;
        if (advance == LOOKS_UP && PyErr_CheckSignals() < 0) {
            raised = take_exception();
            advance = LEFT_TO_PYTHON;
        }
    } while (advance == LOOKS_UP);
    if (advance == FINISHED) {
        long_release(end);
    } else {
        PyObject *error = raised == NULL ? Py_None : raised;
        Py_DECREF(result);
        result = Py_BuildValue("(KdO)", (unsigned long long)turn, (double)until / 1e9, error);
        Py_XDECREF(raised);
    }
    Py_DECREF((PyObject *)end); /* the caller has another reference */
    return result;
}

/* Announces a message, for whose header there is room and credit, and sends it. */
PyObject *long_send(struct message_end *end, const struct long_message *message, int64_t until)
{
    const struct frame *frame = &message->frame;
    if (!frames_push(end, frame, NULL, 0)) {
        PyBuffer_Release((Py_buffer *)&message->view);
        Py_DECREF(message->array);
        return PyErr_NoMemory();
    }
    end->next_id++;
    end->used += end->header_cost;
    count_up(&end->sent_count, 1);
    count_up(&end->sent_bytes, (int64_t)frame->nbytes);
    uint64_t pieces = (frame->nbytes + (uint64_t)end->piece_bytes - 1) / (uint64_t)end->piece_bytes;
    end->message = *message;
    end->message.begins = end->sent;
    end->message.ends = end->sent + frame->nbytes + pieces * FRAME_BYTES;
    return move_long(end, Py_True, until);
}

/* Asks for a message whose RTS is next, and receives it; False if Python has to. */
PyObject *long_receive(struct message_end *end, const struct long_message *message, int64_t until)
{
    const struct frame *frame = &message->frame;
    const struct frame answer = {.kind = CTS, .id = frame->id, .nbytes = frame->nbytes};
    if (frames_writable(end) < 5 * FRAME_BYTES || !frames_reserve(end, 5 * FRAME_BYTES)) {
        PyBuffer_Release((Py_buffer *)&message->view);
        Py_DECREF(message->array);
        Py_RETURN_FALSE;
    }
    end->message = *message;
    end->expected_id++;
    end->held += end->header_cost;
    end->owed += end->header_cost;
    frames_consume(end, FRAME_BYTES + 8 * (uint64_t)frame->axes);
    frames_acknowledge_after(end, end->header_cost);
    frames_push(end, &answer, NULL, 0);
    frames_give_credit(end);
    return move_long(end, message->array, until);
}

/* Hands the message that is under way to Python, which takes the state back: None if there is none, else (turn, array, tag,
 * dtype code, shape, id, whether it is sent, bytes moved, then for a send whether it is cleared, and for a receive the bytes
 * of its present frame that are still to come). */
PyObject *long_take_back(struct message_end *end)
{
    struct long_message *message = &end->message;
    const struct frame *frame = &message->frame;
    if (message->direction == NO_MESSAGE || message->is_over)
        Py_RETURN_NONE;
    PyObject *shape = PyTuple_New(frame->axes);
    for (int axis = 0; shape != NULL && axis < frame->axes; axis++) {
        PyObject *length = PyLong_FromSsize_t(frame->shape[axis]);
        if (length == NULL || PyTuple_SetItem(shape, axis, length) < 0)
            Py_CLEAR(shape);
    }
    if (shape == NULL)
        return NULL;
    bool is_sent = message->direction == SENDING;
    PyObject *state = Py_BuildValue(
        "(KOLiNKOKK)", (unsigned long long)atomic_load(&end->turn) - 1, message->array, (long long)frame->tag, frame->dtype, shape,
        (unsigned long long)frame->id, is_sent ? Py_True : Py_False, (unsigned long long)message->moved,
        (unsigned long long)(is_sent ? message->is_cleared : message->left));
    long_release(end);
    return state;
}
