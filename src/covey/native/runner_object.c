/* The runner as Python sees it: its lanes, the operation that it runs, and why it returns. runner.c moves the bytes. */
#include "native.h"

#include <stdlib.h>
#include <string.h>

static const int64_t SIGNALS_NS = 100 * 1000 * 1000; /* how long signal handlers of Python may wait for an operation */
enum { LOOKED_BYTES = 1 << 14 }; /* an operation on less than this is tried for a moment with the lock held */

/* Runner(size[, recorder, ranks by slot]) */
static int runner_fill(PyObject *self, PyObject *args)
{
    struct runner *runner = (struct runner *)self;
    PyObject *recorder = NULL, *ranks = NULL;
    if (!PyArg_ParseTuple(args, "i|O!O!", &runner->size, recorder_kind.type, &recorder, &PyTuple_Type, &ranks))
        return -1;
    if (runner->size < 1 || (recorder != NULL && (ranks == NULL || PyTuple_Size(ranks) != runner->size))) {
        PyErr_SetString(PyExc_ValueError, "an attempt has at least one slot, and a recorder comes with the rank of each");
        return -1;
    }
    size_t size = (size_t)runner->size;
    runner->wake_fd = -1;
    runner->python_bytes = INT64_MAX;
    runner->lane_objects = calloc(size, sizeof *runner->lane_objects);
    runner->out_moves = calloc(size, sizeof *runner->out_moves);
    runner->in_moves = calloc(size, sizeof *runner->in_moves);
    runner->ranks = calloc(size, sizeof *runner->ranks);
    if (runner->lane_objects == NULL || runner->out_moves == NULL || runner->in_moves == NULL || runner->ranks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int32_t slot = 0; recorder != NULL && slot < runner->size; slot++) {
        long rank = PyLong_AsLong(PyTuple_GetItem(ranks, slot));
        if (!PyErr_Occurred() && recorder_traffic(recorder, (int32_t)rank) == NULL)
            PyErr_Format(PyExc_ValueError, "there is no rank %ld", rank);
        if (PyErr_Occurred())
            return -1;
        runner->ranks[slot] = (int32_t)rank;
    }
    Py_XINCREF(recorder);
    runner->recorder = recorder;
    return 0;
}

void runner_finish(struct runner *runner)
{
    if (runner->plan_object != NULL && runner->is_sending) {
        const struct send_move *send = &((const struct plan *)runner->plan_object)->sends[runner->sent];
        struct lane *lane = (struct lane *)runner->lane_objects[send->peer];
        if (lane != NULL)
            lane->functions->cancel(lane);
        runner->is_sending = false;
    }
    for (int32_t index = 0; index < runner->buffer_count; index++)
        PyBuffer_Release(&runner->buffers[index]);
    runner->buffer_count = 0;
    Py_CLEAR(runner->plan_object);
    Py_CLEAR(runner->reduction_object);
    Py_CLEAR(runner->undo_object);
}

static void forget_lane(struct runner *runner, int32_t slot)
{
    struct lane *lane = (struct lane *)runner->lane_objects[slot];
    if (lane != NULL && lane->runner == runner)
        lane->runner = NULL;
    Py_CLEAR(runner->lane_objects[slot]);
}

static void forget_lanes(struct runner *runner)
{
    runner->forgets_lanes = false;
    runner->python_bytes = INT64_MAX;
    for (int32_t slot = 0; runner->lane_objects != NULL && slot < runner->size; slot++)
        forget_lane(runner, slot);
}

static void runner_release(PyObject *self)
{
    struct runner *runner = (struct runner *)self;
    runner_finish(runner);
    forget_lanes(runner);
    free(runner->lane_objects);
    free(runner->out_moves);
    free(runner->in_moves);
    free(runner->ranks);
    Py_CLEAR(runner->recorder);
    free(runner->buffers);
    free(runner->aside);
}

/* set_lane(slot, lane, wake_fd, has_idle_core) */
static PyObject *runner_set_lane(PyObject *self, PyObject *args)
{
    struct runner *runner = (struct runner *)self;
    int slot, wake_fd, has_idle_core;
    PyObject *lane;
    if (!PyArg_ParseTuple(args, "iOip", &slot, &lane, &wake_fd, &has_idle_core))
        return NULL;
    bool is_lane = is_of(lane, &ring_kind) || is_of(lane, &stream_kind) || is_of(lane, &sealed_kind) ||
                   is_of(lane, &striped_kind);
    if (slot < 0 || slot >= runner->size || !is_lane)
        return PyErr_Format(PyExc_ValueError, "no lane to a slot of this attempt");
    Py_INCREF(lane);
    forget_lane(runner, slot);
    runner->lane_objects[slot] = lane;
    ((struct lane *)lane)->has_idle_core = has_idle_core;
    ((struct lane *)lane)->runner = runner;
    runner->python_bytes = smaller(runner->python_bytes, ((struct lane *)lane)->python_bytes);
    runner->wake_fd = wake_fd;
    Py_RETURN_NONE;
}

/* A thread that still runs an operation stops, and forgets the lanes itself. */
static PyObject *runner_forget(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct runner *runner = (struct runner *)self;
    if (runner->is_running) {
        runner->forgets_lanes = true;
        atomic_store_explicit(&runner->stop, 1, memory_order_relaxed);
    } else
        forget_lanes(runner);
    Py_RETURN_NONE;
}

static PyObject *is_busy(void) { return PyErr_Format(PyExc_RuntimeError, "another thread runs an operation"); }

/* Runs for a moment, with the interpreter's lock held. A lane that renews its key may call Python, so that this, too, may
 * leave an error behind, and other threads may have run. */
enum reason runner_look(struct runner *runner)
{
    runner->is_running = true;
    enum reason reason = runner_run(runner, true);
    runner->is_running = false;
    if (runner->forgets_lanes)
        forget_lanes(runner);
    return reason;
}

/* Runs until there is a reason to return, with the interpreter's lock released. The operation is over when it is DONE. */
static PyObject *go_on(struct runner *runner, bool may_look)
{
    enum reason reason = may_look ? runner_look(runner) : runner->pending;
    runner->pending = NOT_YET;
    if (PyErr_Occurred())
        return NULL;
    while (reason == NOT_YET || reason == SIGNALS) {
        runner->signals_at = monotonic_ns() + SIGNALS_NS;
        runner->is_running = true;
        Py_BEGIN_ALLOW_THREADS
        reason = runner_run(runner, false);
        Py_END_ALLOW_THREADS
        runner->is_running = false;
        if (runner->forgets_lanes)
            forget_lanes(runner);
        if (PyErr_Occurred() || (reason == SIGNALS && PyErr_CheckSignals() < 0))
            return NULL;
    }
    if (reason == DONE)
        runner_finish(runner);
    else if (reason == NO_MEMORY)
        return PyErr_NoMemory();
    return PyLong_FromLong(reason);
}

/* Takes over a buffer as the next one of the operation that begins; false, with a Python error, without memory. */
bool runner_take(struct runner *runner, Py_buffer *buffer)
{
    if (runner->buffer_count == runner->buffer_room) {
        int32_t room = runner->buffer_room ? 2 * runner->buffer_room : 4;
        Py_buffer *buffers = realloc(runner->buffers, (size_t)room * sizeof *buffers);
        if (buffers == NULL) {
            PyBuffer_Release(buffer);
            PyErr_NoMemory();
            return false;
        }
        runner->buffers = buffers;
        runner->buffer_room = room;
    }
    runner->buffers[runner->buffer_count++] = *buffer;
    return true;
}

static bool fits(const struct runner *runner, const struct plan *plan, const struct operation *operation)
{
    if (plan->buffer_count > runner->buffer_count || plan->peer_count > runner->size)
        return false;
    for (int32_t index = 0; index < plan->buffer_count; index++)
        if (runner->buffers[index].itemsize < 1 || plan->needs[index] > runner->buffers[index].len / runner->buffers[index].itemsize)
            return false;
    for (int64_t index = 0; index < plan->recv_count; index++) {
        const struct recv_move *recv = &plan->recvs[index];
        if (runner->buffers[recv->buffer].readonly && recv->start < recv->stop)
            return false;
        const struct reduction *reduction = (const struct reduction *)operation->reduction;
        if (recv->action & REDUCE && (reduction == NULL || reduction->itemsize != runner->buffers[recv->buffer].itemsize))
            return false;
    }
    return true;
}

/* Prepares an operation on the buffers that were taken; false, with a Python error, if the plan does not fit them. */
bool runner_begin(struct runner *runner, const struct operation *operation)
{
    if (!fits(runner, (const struct plan *)operation->plan, operation)) {
        runner_finish(runner);
        PyErr_SetString(PyExc_ValueError, "the plan does not fit the buffers");
        return false;
    }
    Py_INCREF(operation->plan);
    Py_XINCREF(operation->reduction);
    Py_XINCREF(operation->undo);
    runner->plan_object = operation->plan;
    runner->reduction_object = operation->reduction;
    runner->undo_object = operation->undo;
    runner->contributors = operation->contributors;
    memcpy(runner->prefix, operation->prefix, PREFIX_BYTES);
    runner->sequence = operation->sequence;
    runner->change_pending = operation->change_pending;
    runner->spin_ns = operation->spin_ns;
    runner->yield_ns = operation->yield_ns;
    runner->stall_ns = operation->stall_ns;
    runner->sent = runner->applied = 0;
    runner->is_sending = runner->is_receiving = runner->is_out_of_memory = false;
    runner->is_encoded = runner->is_decoded = false;
    runner->out.nbytes = 0;
    memset(runner->out_moves, 0, (size_t)runner->size * sizeof *runner->out_moves);
    memset(runner->in_moves, 0, (size_t)runner->size * sizeof *runner->in_moves);
    runner->idle_since = 0;
    runner->has_slept = false;
    runner->pending = NOT_YET;
    if (runner->recorder != NULL)
        count_up(&recorder_progress(runner->recorder)->phases, 1);
    return true;
}

/* start(plan, buffers, reduction, contributors, prefix, sequence, undo, change_pending, spin ns, yield ns,
 * stall ns) -> reason */
static PyObject *runner_start(PyObject *self, PyObject *args)
{
    struct runner *runner = (struct runner *)self;
    struct operation operation = {0};
    PyObject *buffers;
    Py_ssize_t prefix_bytes;
    long long contributors, spin_ns, yield_ns, stall_ns;
    unsigned long long sequence;
    int change_pending;
    if (runner->is_running)
        return is_busy();
    if (!PyArg_ParseTuple(args, "OOOLy#KOpLLL", &operation.plan, &buffers, &operation.reduction, &contributors,
                          &operation.prefix, &prefix_bytes, &sequence, &operation.undo, &change_pending, &spin_ns, &yield_ns,
                          &stall_ns))
        return NULL;
    if (operation.reduction == Py_None)
        operation.reduction = NULL;
    if (operation.undo == Py_None)
        operation.undo = NULL;
    if (!is_of(operation.plan, &plan_kind) || (operation.reduction != NULL && !is_of(operation.reduction, &reduction_kind)) ||
        (operation.undo != NULL && !is_of(operation.undo, &undo_kind)) || prefix_bytes != PREFIX_BYTES)
        return PyErr_Format(PyExc_TypeError, "these are not the parts of an operation");
    operation.contributors = contributors;
    operation.sequence = sequence;
    operation.change_pending = change_pending;
    operation.spin_ns = spin_ns;
    operation.yield_ns = yield_ns;
    operation.stall_ns = stall_ns;
    runner_finish(runner);
    int64_t total = 0;
    Py_ssize_t count = PySequence_Size(buffers);
    for (Py_ssize_t index = 0; index < count; index++) {
        Py_buffer view;
        PyObject *buffer = PySequence_GetItem(buffers, index);
        int failed = buffer == NULL || PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0;
        Py_XDECREF(buffer);
        if (failed || !runner_take(runner, &view)) {
            runner_finish(runner);
            return NULL;
        }
        total += view.len;
    }
    if (count < 0 || !runner_begin(runner, &operation))
        return NULL;
    return go_on(runner, total < LOOKED_BYTES && total < runner->python_bytes);
}

/* resume(stall ns): go on; report a stall that lasts so much longer. */
static PyObject *runner_resume(PyObject *self, PyObject *arg)
{
    struct runner *runner = (struct runner *)self;
    long long stall_ns = PyLong_AsLongLong(arg);
    if (stall_ns == -1 && PyErr_Occurred())
        return NULL;
    if (runner->is_running)
        return is_busy();
    if (runner->plan_object == NULL)
        return PyErr_Format(PyExc_ValueError, "there is no operation to go on with");
    runner->stall_at = monotonic_ns() + stall_ns;
    return go_on(runner, false);
}

static PyObject *runner_method_finish(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (((struct runner *)self)->is_running)
        return is_busy();
    runner_finish((struct runner *)self);
    Py_RETURN_NONE;
}

static PyObject *runner_stop(PyObject *self, PyObject *unused)
{
    (void)unused;
    atomic_store_explicit(&((struct runner *)self)->stop, 1, memory_order_relaxed);
    Py_RETURN_NONE;
}

/* What the last reason was about: (peer, expected header, header, the lane's trouble). */
static PyObject *runner_details(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct runner *runner = (struct runner *)self;
    struct lane *lane = (struct lane *)runner->lane_objects[runner->peer];
    return Py_BuildValue("(iy#y#s)", (int)runner->peer, runner->in.expected, (Py_ssize_t)HEADER_BYTES, runner->in.header,
                         (Py_ssize_t)HEADER_BYTES, lane == NULL ? "" : lane->trouble);
}

/* The slots that the operation waits for, and for how many seconds nothing has moved. */
static PyObject *runner_waiting(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct runner *runner = (struct runner *)self;
    const struct plan *plan = (const struct plan *)runner->plan_object;
    if (plan == NULL)
        return PyErr_Format(PyExc_ValueError, "there is no operation");
    double idle = runner->idle_since ? (double)(monotonic_ns() - runner->idle_since) / 1e9 : 0.0;
    int to = runner->is_sending ? plan->sends[runner->sent].peer : -1;
    int from = runner->is_receiving && runner->in.got < runner->in.nbytes ? plan->recvs[runner->applied].peer : -1;
    return Py_BuildValue("(iid)", to, from, idle);
}

static PyMethodDef runner_methods[] = {
    {"set_lane", runner_set_lane, METH_VARARGS, "set_lane(slot, lane, wake_fd, has_idle_core)"},
    {"forget_lanes", runner_forget, METH_NOARGS, "Forget all lanes."},
    {"start", runner_start, METH_VARARGS, "Start an operation, and run until there is a reason to return."},
    {"resume", runner_resume, METH_O, "Go on for up to so many idle nanoseconds."},
    {"finish", runner_method_finish, METH_NOARGS, "Release what the operation uses."},
    {"stop", runner_stop, METH_NOARGS, "Let the running operation return. On any thread."},
    {"details", runner_details, METH_NOARGS, "What the last reason was about."},
    {"waiting", runner_waiting, METH_NOARGS, "What the operation waits for."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef runner_members[] = {
    {"sent", T_LONGLONG, offsetof(struct runner, sent), READONLY, "The number of sends that are done."},
    {"applied", T_LONGLONG, offsetof(struct runner, applied), READONLY, "The number of receives that are done."},
    {"is_running", T_BOOL, offsetof(struct runner, is_running), READONLY, "Whether a thread moves bytes now."},
    {"is_open", T_BOOL, offsetof(struct runner, is_open), 0, "Whether shortcuts may run: no other operation does."},
    {"change_pending", T_BOOL, offsetof(struct runner, change_pending), READONLY, "Whether this rank knows of a change."},
    {"pending", T_INT, offsetof(struct runner, pending), READONLY, "Why a shortcut has handed its call to Python."},
    {NULL, 0, 0, 0, NULL},
};

struct kind runner_kind = {
    .name = "covey._native.Runner",
    .size = sizeof(struct runner),
    .fill = runner_fill,
    .release = runner_release,
    .methods = runner_methods,
    .members = runner_members,
};
