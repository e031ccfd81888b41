/* The shortcut for repeated small calls, such as `group.all_reduce(x)` with an array like one that was reduced before.
 *
 * A call that is over within a moment never gives up the interpreter's lock, so no other thread can see it halfway; the
 * records of the group are brought up to date afterwards, as `Engine.perform` would have. A call that takes longer is
 * handed to Python, which keeps its records and lets the runner go on.
 *
 * In a group that survives losses, a call is over when the commit barrier is, and the operation saves what it overwrites.
 * The control loop may ask at any moment how far this rank is, so a call that is handed to Python has told
 * AtomicOperations before: that the operation runs or, before the first byte of the barrier can be missed, that it is
 * complete.
 */
#include "attributes.h"

#include <string.h>

enum { ENTRIES = 64, MOST_AXES = 8 };

/* The second array of a call, which gets a range of the first one before the plan runs: a rank's part for itself. */
struct output {
    bool is_there;
    int axes;
    Py_ssize_t shape[MOST_AXES];
    int64_t from, to, nbytes; /* of the range: where it begins in the first array and in this one */
};

struct entry {
    PyObject *dtype, *what, *call, *plan, *reduction; /* `what` is compared by identity; reduction may be NULL */
    int axes;
    Py_ssize_t shape[MOST_AXES];
    int64_t contributors;
    uint8_t prefix[PREFIX_BYTES], commit_prefix[PREFIX_BYTES];
    struct output output;
};

/* What a group that survives losses adds; all NULL in others. */
struct atomic {
    PyObject *operations, *commit, *running, *complete, *barrier, *undo;
};

struct shortcut {
    PyObject_HEAD
    PyObject *runner, *operation, *call_log, *calls, *array_type;
    struct entry entries[ENTRIES];
    int count, next;
    int64_t spin_ns, yield_ns, stall_ns;
    struct atomic atomic;
};

static void free_entry(struct entry *entry)
{
    Py_CLEAR(entry->dtype);
    Py_CLEAR(entry->what);
    Py_CLEAR(entry->call);
    Py_CLEAR(entry->plan);
    Py_CLEAR(entry->reduction);
}

static void shortcut_release(PyObject *self)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    for (int index = 0; index < ENTRIES; index++)
        free_entry(&shortcut->entries[index]);
    Py_CLEAR(shortcut->runner);
    Py_CLEAR(shortcut->operation);
    Py_CLEAR(shortcut->call_log);
    Py_CLEAR(shortcut->calls);
    Py_CLEAR(shortcut->array_type);
    struct atomic *atomic = &shortcut->atomic;
    Py_CLEAR(atomic->operations);
    Py_CLEAR(atomic->commit);
    Py_CLEAR(atomic->running);
    Py_CLEAR(atomic->complete);
    Py_CLEAR(atomic->barrier);
    Py_CLEAR(atomic->undo);
}

/* Shortcut(runner, operation, call log, its list of calls, array type, spin ns, yield ns, stall ns), and in a group that
 * survives losses (AtomicOperations, Commit, its phases of a running and a complete operation, the barrier's plan, the
 * undo buffer) */
static int shortcut_fill(PyObject *self, PyObject *args)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    PyObject *parts[5];
    long long spin_ns, yield_ns, stall_ns;
    struct atomic atomic = {0};
    if (!PyArg_ParseTuple(args, "OOOO!OLLL|(OOOOOO)", &parts[0], &parts[1], &parts[2], &PyList_Type, &parts[3], &parts[4],
                          &spin_ns, &yield_ns, &stall_ns, &atomic.operations, &atomic.commit, &atomic.running,
                          &atomic.complete, &atomic.barrier, &atomic.undo))
        return -1;
    if (!is_of(parts[0], &runner_kind) ||
        (atomic.operations != NULL && (!is_of(atomic.barrier, &plan_kind) || !is_of(atomic.undo, &undo_kind)))) {
        PyErr_SetString(PyExc_TypeError, "these are not the parts of a shortcut");
        return -1;
    }
    if (!has_attributes(parts[1], OPERATION) || !has_attributes(parts[2], CALL_LOG) ||
        (atomic.operations != NULL &&
         (!has_attributes(atomic.operations, OPERATIONS) || !has_attributes(atomic.commit, COMMIT))))
        return -1;
    Py_XINCREF(atomic.operations);
    Py_XINCREF(atomic.commit);
    Py_XINCREF(atomic.running);
    Py_XINCREF(atomic.complete);
    Py_XINCREF(atomic.barrier);
    Py_XINCREF(atomic.undo);
    shortcut->atomic = atomic;
    for (int index = 0; index < 5; index++)
        Py_INCREF(parts[index]);
    shortcut->runner = parts[0];
    shortcut->operation = parts[1];
    shortcut->call_log = parts[2];
    shortcut->calls = parts[3];
    shortcut->array_type = parts[4];
    shortcut->spin_ns = spin_ns;
    shortcut->yield_ns = yield_ns;
    shortcut->stall_ns = stall_ns;
    return 0;
}

static struct entry *find(struct shortcut *shortcut, PyObject *dtype, PyObject *what, int axes, const Py_ssize_t *shape)
{
    for (int index = 0; index < shortcut->count; index++) {
        struct entry *entry = &shortcut->entries[index];
        if (entry->dtype == dtype && entry->what == what && entry->axes == axes &&
            memcmp(entry->shape, shape, (size_t)axes * sizeof *shape) == 0)
            return entry;
    }
    return NULL;
}

/* Reads the lengths of an array's axes, and returns how many there are; -1, with or without an error, if it cannot. */
static int read_shape(PyObject *shape, Py_ssize_t lengths[MOST_AXES])
{
    Py_ssize_t axes = PyTuple_Size(shape);
    if (axes > MOST_AXES)
        return -1;
    for (Py_ssize_t axis = 0; axis < axes; axis++)
        lengths[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
    return PyErr_Occurred() ? -1 : (int)axes;
}

/* add(dtype, shape, what, call, plan, reduction or None, contributors, prefix, prefix of the commit barrier, and for a
 * call with an output its shape, and the range that is copied to it: from, to, bytes): remember how such a call runs;
 * False if there is no room. */
static PyObject *shortcut_add(PyObject *self, PyObject *args)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    PyObject *dtype, *shape, *what, *call, *plan, *reduction, *out_shape = NULL;
    long long contributors, from = 0, to = 0, nbytes = 0;
    const char *prefix, *commit_prefix;
    Py_ssize_t prefix_bytes, commit_bytes;
    if (!PyArg_ParseTuple(args, "OO!OOOOLy#y#|O!LLL", &dtype, &PyTuple_Type, &shape, &what, &call, &plan, &reduction,
                          &contributors, &prefix, &prefix_bytes, &commit_prefix, &commit_bytes, &PyTuple_Type, &out_shape,
                          &from, &to, &nbytes))
        return NULL;
    if (prefix_bytes != PREFIX_BYTES || commit_bytes != PREFIX_BYTES || !is_of(plan, &plan_kind) || (reduction != Py_None && !is_of(reduction, &reduction_kind)) || from < 0 ||
        to < 0 || nbytes < 0)
        return PyErr_Format(PyExc_TypeError, "these are not the parts of a call");
    struct entry made = {.contributors = contributors};
    made.axes = read_shape(shape, made.shape);
    made.output = (struct output){.is_there = out_shape != NULL, .from = from, .to = to, .nbytes = nbytes};
    if (out_shape != NULL)
        made.output.axes = read_shape(out_shape, made.output.shape);
    if (PyErr_Occurred())
        return NULL;
    if (made.axes < 0 || made.output.axes < 0)
        Py_RETURN_FALSE;
    if (find(shortcut, dtype, what, made.axes, made.shape) != NULL)
        Py_RETURN_TRUE;
    struct entry *entry = &shortcut->entries[shortcut->next];
    shortcut->next = (shortcut->next + 1) % ENTRIES;
    if (shortcut->count < ENTRIES)
        shortcut->count++;
    free_entry(entry);
    reduction = reduction == Py_None ? NULL : reduction;
    Py_INCREF(dtype);
    Py_INCREF(what);
    Py_INCREF(call);
    Py_INCREF(plan);
    Py_XINCREF(reduction);
    made.dtype = dtype;
    made.what = what;
    made.call = call;
    made.plan = plan;
    made.reduction = reduction;
    memcpy(made.prefix, prefix, PREFIX_BYTES);
    memcpy(made.commit_prefix, commit_prefix, PREFIX_BYTES);
    *entry = made;
    Py_RETURN_TRUE;
}

/* Records a call that has returned, as Engine.perform does. */
static bool record(struct shortcut *shortcut, const struct entry *entry, uint64_t sequence)
{
    PyObject *number = PyLong_FromUnsignedLongLong(sequence), *logged = NULL;
    bool is_recorded = false;
    if (number != NULL)
        logged = PyTuple_Pack(2, number, entry->call);
    if (logged != NULL) {
        Py_ssize_t at = (Py_ssize_t)(sequence % (uint64_t)PyList_Size(shortcut->calls));
        is_recorded = PyList_SetItem(shortcut->calls, at, logged) == 0 &&
                      set_attribute(shortcut->call_log, CALL_LOG_ENTERED, number) &&
                      set_attribute(shortcut->operation, OPERATION_SEQUENCE, number) &&
                      set_attribute(shortcut->operation, OPERATION_RETURNED, number) &&
                      set_attribute(shortcut->operation, OPERATION_CALL, entry->call);
        if (is_recorded && shortcut->atomic.commit != NULL)
            is_recorded = set_attribute(shortcut->atomic.commit, COMMIT_RETURNED, number);
    }
    Py_XDECREF(number);
    return is_recorded;
}

/* Whether loops over elements may run on this memory. */
static bool is_aligned(const Py_buffer *view)
{
    return (uintptr_t)view->buf % (size_t)smaller(view->itemsize > 0 ? view->itemsize : 1, sizeof(uint64_t)) == 0;
}

/* Takes the memory of a plain array and its dtype, which the array keeps; false if the long way has to look at it. */
static bool look_at(const struct shortcut *shortcut, PyObject *x, int flags, Py_buffer *view, PyObject **dtype)
{
    if ((PyObject *)Py_TYPE(x) != shortcut->array_type)
        return false;
    *dtype = get_attribute(x, ARRAY_DTYPE);
    if (*dtype == NULL || PyObject_GetBuffer(x, view, flags) < 0) {
        Py_XDECREF(*dtype);
        PyErr_Clear(); /* the long way says what is wrong with it */
        return false;
    }
    Py_DECREF(*dtype);
    if (is_aligned(view) && view->len < ((struct runner *)shortcut->runner)->python_bytes)
        return true;
    PyBuffer_Release(view);
    return false;
}

/* Takes the output of a call into `view`, after `x` was taken; false if it is not like the one of the entry. */
static bool take_output(const struct shortcut *shortcut, const struct entry *entry, PyObject *out, const Py_buffer *x,
                        Py_buffer *view)
{
    const struct output *output = &entry->output;
    PyObject *dtype;
    if (!look_at(shortcut, out, PyBUF_WRITABLE | PyBUF_ND, view, &dtype))
        return false;
    const uint8_t *from = (const uint8_t *)x->buf, *to = (const uint8_t *)view->buf;
    bool is_apart = from + x->len <= to || to + view->len <= from;
    /* One of the arrays is the range itself: no move of the plan reads that part of the first array. */
    bool is_in_place = from + output->from == to + output->to && (output->nbytes == x->len || output->nbytes == view->len);
    if (dtype == entry->dtype && view->ndim == output->axes && (is_apart || is_in_place) &&
        memcmp(view->shape, output->shape, (size_t)output->axes * sizeof *view->shape) == 0 &&
        output->nbytes <= x->len - output->from && output->nbytes <= view->len - output->to)
        return true;
    PyBuffer_Release(view);
    return false;
}

/* The memory of a call without an array. */
static Py_buffer nothing(void)
{
    static Py_ssize_t no_axes[1];
    static uint8_t no_bytes[1];
    return (Py_buffer){.buf = no_bytes, .itemsize = 1, .shape = no_axes};
}

/* Finds how a call runs, and takes its arrays; NULL, with or without an error, if it needs the long way. */
static struct entry *take(struct shortcut *shortcut, struct runner *runner, PyObject *x, PyObject *what, PyObject *out)
{
    Py_buffer view, out_view;
    PyObject *dtype = Py_None;
    if (x == Py_None)
        view = nothing();
    else if (!look_at(shortcut, x, out == NULL ? PyBUF_WRITABLE | PyBUF_ND : PyBUF_ND, &view, &dtype))
        return NULL;
    struct entry *entry = find(shortcut, dtype, what, view.ndim, view.shape);
    if (entry == NULL || entry->output.is_there != (out != NULL) ||
        (out != NULL && !take_output(shortcut, entry, out, &view, &out_view))) {
        PyBuffer_Release(&view);
        return NULL;
    }
    if (!runner_take(runner, &view)) {
        if (out != NULL)
            PyBuffer_Release(&out_view);
        return NULL;
    }
    if (out != NULL && !runner_take(runner, &out_view)) {
        runner_finish(runner);
        return NULL;
    }
    return entry;
}

/* Begins the commit barrier of a call whose result is complete, and looks; returns as runner_look does. */
static enum reason look_at_barrier(struct shortcut *shortcut, struct operation *operation, const struct entry *entry)
{
    struct runner *runner = (struct runner *)shortcut->runner;
    bool change_pending = runner->change_pending;
    runner_finish(runner);
    Py_buffer no_array = nothing();
    if (!runner_take(runner, &no_array))
        return NO_MEMORY;
    operation->plan = shortcut->atomic.barrier;
    operation->reduction = operation->undo = NULL;
    operation->prefix = entry->commit_prefix;
    operation->change_pending = change_pending;
    return runner_begin(runner, operation) ? runner_look(runner) : NO_MEMORY;
}

/* Tells AtomicOperations how far a call is that Python goes on with. */
static bool hand_over(struct atomic *atomic, bool is_complete)
{
    return atomic->operations == NULL ||
           (set_attribute(atomic->operations, OPERATIONS_IS_EXECUTING, Py_True) &&
            set_attribute(atomic->commit, COMMIT_PHASE, is_complete ? atomic->complete : atomic->running));
}

static PyObject *run(struct shortcut *shortcut, PyObject *const *args, Py_ssize_t count, int64_t spin_ns)
{
    struct runner *runner = (struct runner *)shortcut->runner;
    if (count != 2 && count != 3)
        return PyErr_Format(PyExc_TypeError, "a call has an array, an operation, and sometimes an output");
    if (!runner->is_open || runner->is_running)
        Py_RETURN_FALSE;
    int64_t begun_ns = runner->recorder == NULL ? 0 : monotonic_ns();
    struct entry *entry = take(shortcut, runner, args[0], args[1], count == 3 ? args[2] : NULL);
    if (entry == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_FALSE;
    }
    PyObject *last = get_attribute(shortcut->operation, OPERATION_SEQUENCE);
    if (last == NULL) {
        runner_finish(runner);
        return NULL;
    }
    uint64_t sequence = PyLong_AsUnsignedLongLong(last) + 1;
    Py_DECREF(last);
    struct operation operation = {
        .plan = entry->plan,
        .reduction = entry->reduction,
        .contributors = entry->contributors,
        .prefix = entry->prefix,
        .sequence = sequence,
        .undo = shortcut->atomic.undo,
        .spin_ns = spin_ns,
        .yield_ns = shortcut->yield_ns,
        .stall_ns = shortcut->stall_ns,
    };
    if (!runner_begin(runner, &operation))
        return NULL;
    const struct output *output = &entry->output;
    if (output->nbytes)
        memmove((uint8_t *)runner->buffers[1].buf + output->to, (uint8_t *)runner->buffers[0].buf + output->from,
                (size_t)output->nbytes);
    enum reason reason = runner_look(runner);
    bool is_complete = reason == DONE && shortcut->atomic.operations != NULL;
    if (is_complete)
        reason = look_at_barrier(shortcut, &operation, entry);
    if (reason != DONE) {
        runner->is_open = false;
        runner->pending = reason;
        if (PyErr_Occurred() || !hand_over(&shortcut->atomic, is_complete))
            return NULL;
        if (runner->recorder != NULL)
            recorder_early(runner->recorder, sequence, begun_ns);
        Py_INCREF(entry->call);
        return entry->call;
    }
    bool change_pending = runner->change_pending;
    runner_finish(runner);
    if (shortcut->atomic.undo != NULL)
        undo_forget((struct undo *)shortcut->atomic.undo);
    if (!record(shortcut, entry, sequence))
        return NULL;
    if (shortcut->atomic.commit != NULL && change_pending &&
        !set_attribute(shortcut->atomic.commit, COMMIT_PENDING, Py_True))
        return NULL;
    if (runner->recorder != NULL)
        recorder_note(runner->recorder, entry->prefix, sequence, begun_ns);
    Py_RETURN_TRUE;
}

/* run(x or None, what[, out]) -> False if this call needs the long way, True if it has returned; else it has begun: then Python
 * records the call, which is returned, and resumes the runner. */
static PyObject *shortcut_run(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    return run(shortcut, args, count, shortcut->spin_ns);
}

/* begin(x, what[, out]) -> as run, but it waits for nothing: another thread goes on with what is not over at once */
static PyObject *shortcut_begin(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    return run((struct shortcut *)self, args, count, 0);
}

static PyMethodDef shortcut_methods[] = {
    {"add", shortcut_add, METH_VARARGS, "Remember how a call with such an array runs."},
    {"run", (PyCFunction)(void (*)(void))shortcut_run, METH_FASTCALL, "Run a call like one that was added."},
    {"begin", (PyCFunction)(void (*)(void))shortcut_begin, METH_FASTCALL, "Begin such a call, and do not wait."},
    {NULL, NULL, 0, NULL},
};

struct kind shortcut_kind = {
    .name = "covey._native.Shortcut",
    .size = sizeof(struct shortcut),
    .fill = shortcut_fill,
    .release = shortcut_release,
    .methods = shortcut_methods,
};
