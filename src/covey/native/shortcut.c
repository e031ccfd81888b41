/* The shortcut for repeated small calls, such as `group.all_reduce(x)` with an array like one that was reduced before.
 *
 * A call that is over within a moment never gives up the interpreter's lock, so no other thread can see it halfway; the
 * records of the group are brought up to date afterwards, as `Engine.perform` would have. A call that takes longer is
 * handed to Python, which keeps its records and lets the runner go on.
 */
#include "native.h"

#include <string.h>

enum { ENTRIES = 64, MOST_AXES = 8 };

struct entry {
    PyObject *dtype, *what, *call, *plan, *reduction; /* `what` is compared by identity; reduction may be NULL */
    int axes;
    Py_ssize_t shape[MOST_AXES];
    int64_t contributors;
    uint8_t prefix[PREFIX_BYTES];
};

struct shortcut {
    PyObject_HEAD
    PyObject *runner, *operation, *call_log, *calls, *array_type;
    struct entry entries[ENTRIES];
    int count, next;
    int64_t spin_ns, yield_ns, stall_ns;
};

const size_t shortcut_size = sizeof(struct shortcut);

static PyObject *name_dtype, *name_sequence, *name_call, *name_entered, *name_returned;

static void free_entry(struct entry *entry)
{
    Py_CLEAR(entry->dtype);
    Py_CLEAR(entry->what);
    Py_CLEAR(entry->call);
    Py_CLEAR(entry->plan);
    Py_CLEAR(entry->reduction);
}

void shortcut_release(PyObject *self)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    for (int index = 0; index < ENTRIES; index++)
        free_entry(&shortcut->entries[index]);
    Py_CLEAR(shortcut->runner);
    Py_CLEAR(shortcut->operation);
    Py_CLEAR(shortcut->call_log);
    Py_CLEAR(shortcut->calls);
    Py_CLEAR(shortcut->array_type);
}

/* Shortcut(runner, operation, call log, its list of calls, array type, spin ns, yield ns, stall ns) */
int shortcut_init(PyObject *self, PyObject *args)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    PyObject *parts[5];
    long long spin_ns, yield_ns, stall_ns;
    if (!PyArg_ParseTuple(args, "OOOO!OLLL", &parts[0], &parts[1], &parts[2], &PyList_Type, &parts[3], &parts[4],
                          &spin_ns, &yield_ns, &stall_ns))
        return -1;
    if (name_dtype == NULL) {
        name_dtype = PyUnicode_InternFromString("dtype");
        name_sequence = PyUnicode_InternFromString("sequence");
        name_call = PyUnicode_InternFromString("call");
        name_entered = PyUnicode_InternFromString("entered");
        name_returned = PyUnicode_InternFromString("returned");
    }
    if (!is_runner(parts[0]) || name_returned == NULL) {
        PyErr_SetString(PyExc_TypeError, "the first argument is a Runner");
        return -1;
    }
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

/* add(dtype, shape, what, call, plan, reduction or None, contributors, prefix): remember how such a call runs. */
PyObject *shortcut_add(PyObject *self, PyObject *args)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    PyObject *dtype, *shape, *what, *call, *plan, *reduction;
    long long contributors;
    const char *prefix;
    Py_ssize_t prefix_bytes;
    if (!PyArg_ParseTuple(args, "OO!OOOOLy#", &dtype, &PyTuple_Type, &shape, &what, &call, &plan, &reduction, &contributors,
                          &prefix, &prefix_bytes))
        return NULL;
    Py_ssize_t axes = PyTuple_Size(shape);
    if (axes > MOST_AXES || prefix_bytes != PREFIX_BYTES || !is_plan(plan) ||
        (reduction != Py_None && !is_reduction(reduction)))
        Py_RETURN_FALSE;
    Py_ssize_t lengths[MOST_AXES];
    for (Py_ssize_t axis = 0; axis < axes; axis++)
        lengths[axis] = PyLong_AsSsize_t(PyTuple_GetItem(shape, axis));
    if (find(shortcut, dtype, what, (int)axes, lengths) != NULL)
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
    *entry = (struct entry){dtype, what, call, plan, reduction, (int)axes, {0}, contributors, {0}};
    memcpy(entry->prefix, prefix, PREFIX_BYTES);
    memcpy(entry->shape, lengths, (size_t)axes * sizeof *lengths);
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
                      PyObject_SetAttr(shortcut->call_log, name_entered, number) == 0 &&
                      PyObject_SetAttr(shortcut->operation, name_sequence, number) == 0 &&
                      PyObject_SetAttr(shortcut->operation, name_returned, number) == 0 &&
                      PyObject_SetAttr(shortcut->operation, name_call, entry->call) == 0;
    }
    Py_XDECREF(number);
    return is_recorded;
}

/* run(x, what) -> False if this call needs the long way, True if it has returned; else it has begun: then Python records the
 * call, which is returned, and resumes the runner. */
PyObject *shortcut_run(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct shortcut *shortcut = (struct shortcut *)self;
    struct runner *runner = (struct runner *)shortcut->runner;
    Py_buffer view;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "run takes an array and an operation");
    PyObject *x = args[0];
    if (!runner->is_open || runner->is_running || (PyObject *)Py_TYPE(x) != shortcut->array_type)
        Py_RETURN_FALSE;
    PyObject *dtype = PyObject_GetAttr(x, name_dtype);
    if (dtype == NULL)
        return NULL;
    Py_DECREF(dtype); /* the array keeps it */
    if (PyObject_GetBuffer(x, &view, PyBUF_WRITABLE | PyBUF_ND) < 0) {
        PyErr_Clear(); /* the long way says what is wrong with it */
        Py_RETURN_FALSE;
    }
    struct entry *entry = find(shortcut, dtype, args[1], view.ndim, view.shape);
    PyObject *last = entry == NULL ? NULL : PyObject_GetAttr(shortcut->operation, name_sequence);
    if (last == NULL) {
        PyBuffer_Release(&view);
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_FALSE;
    }
    uint64_t sequence = PyLong_AsUnsignedLongLong(last) + 1;
    Py_DECREF(last);
    struct operation operation = {
        .plan = entry->plan,
        .reduction = entry->reduction,
        .contributors = entry->contributors,
        .prefix = entry->prefix,
        .sequence = sequence,
        .spin_ns = shortcut->spin_ns,
        .yield_ns = shortcut->yield_ns,
        .stall_ns = shortcut->stall_ns,
    };
    if (!runner_take(runner, &view) || !runner_begin(runner, &operation))
        return NULL;
    enum reason reason = runner_run(runner, true);
    if (reason != DONE) {
        runner->is_open = false;
        runner->pending = reason;
        Py_INCREF(entry->call);
        return entry->call;
    }
    runner_finish(runner);
    if (!record(shortcut, entry, sequence))
        return NULL;
    Py_RETURN_TRUE;
}
