/* What the operations of one group have done: totals by operation, traffic by rank, and the last operations in a ring.
 *
 * The interpreter's lock guards everything but the atomic counters: a runner changes those while it moves bytes without
 * the lock, on one thread at a time, and any thread may read them. src/covey/runtime/recorder.py does the same in
 * Python.
 */
#include "native.h"

#include <stdlib.h>
#include <string.h>

enum {
    RECORDS = 4096,   /* of the last operations */
    OPERATIONS = 32,  /* kinds of operations that can be told apart */
    BUCKETS = 28,     /* of durations: the first is below 2^FIRST_BITS ns, each further one twice as long, the last open */
    FIRST_BITS = 10,
    OPERATION_AT = 4, /* in the prefix of headers */
};
enum record_outcome { RUNNING, RETURNED, FAILED };

struct record {
    uint64_t sequence, peers;
    int64_t begun_ns, ended_ns, sent, received;
    uint32_t view;
    uint16_t phases;
    uint8_t operation, outcome;
};

struct totals {
    int64_t count, failures, ns, sent, received;
    int64_t buckets[BUCKETS];
};

struct recorder {
    PyObject_HEAD
    int32_t size;
    struct traffic *traffic; /* by rank */
    struct record *records;  /* by sequence modulo RECORDS */
    uint64_t last;           /* the sequence of the last record */
    struct totals totals[OPERATIONS];
    struct progress progress; /* of the operation that runs, or that a shortcut has begun */
    uint64_t early_sequence;  /* that a shortcut has begun, and when */
    int64_t early_ns;
};

static int recorder_fill(PyObject *self, PyObject *args)
{
    struct recorder *recorder = (struct recorder *)self;
    if (!PyArg_ParseTuple(args, "i", &recorder->size))
        return -1;
    if (recorder->size < 1) {
        PyErr_SetString(PyExc_ValueError, "a group has at least one rank");
        return -1;
    }
    recorder->traffic = calloc((size_t)recorder->size, sizeof *recorder->traffic);
    recorder->records = calloc(RECORDS, sizeof *recorder->records); /* the kernel provides the pages that are used */
    if (recorder->traffic == NULL || recorder->records == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void recorder_release(PyObject *self)
{
    struct recorder *recorder = (struct recorder *)self;
    free(recorder->traffic);
    free(recorder->records);
}

struct traffic *recorder_traffic(PyObject *self, int32_t rank)
{
    struct recorder *recorder = (struct recorder *)self;
    return rank >= 0 && rank < recorder->size ? &recorder->traffic[rank] : NULL;
}

struct progress *recorder_progress(PyObject *self) { return &((struct recorder *)self)->progress; }

static struct record *begin(struct recorder *recorder, uint64_t sequence, uint8_t operation, int64_t begun_ns)
{
    struct record *record = &recorder->records[sequence % RECORDS];
    *record = (struct record){.sequence = sequence, .begun_ns = begun_ns, .operation = operation, .outcome = RUNNING};
    recorder->last = sequence;
    return record;
}

static int bucket_of(int64_t ns)
{
    int bits = ns > 0 ? 64 - __builtin_clzll((unsigned long long)ns) : 0;
    int bucket = bits > FIRST_BITS ? bits - FIRST_BITS : 0;
    return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

/* Copies what the operation in progress has done so far. */
static void read_progress(const struct recorder *recorder, struct record *record)
{
    const struct progress *progress = &recorder->progress;
    record->sent = atomic_load_explicit(&progress->sent, memory_order_relaxed);
    record->received = atomic_load_explicit(&progress->received, memory_order_relaxed);
    record->peers = atomic_load_explicit(&progress->peers, memory_order_relaxed);
    record->phases = (uint16_t)smaller(atomic_load_explicit(&progress->phases, memory_order_relaxed), UINT16_MAX);
}

static void clear_progress(struct recorder *recorder)
{
    struct progress *progress = &recorder->progress;
    atomic_store_explicit(&progress->sent, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->received, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->peers, 0, memory_order_relaxed);
    atomic_store_explicit(&progress->phases, 0, memory_order_relaxed);
}

static void end(struct recorder *recorder, struct record *record, uint32_t view, bool has_failed)
{
    record->ended_ns = monotonic_ns();
    record->view = view;
    record->outcome = has_failed ? FAILED : RETURNED;
    read_progress(recorder, record);
    clear_progress(recorder);
    int64_t ns = record->ended_ns - record->begun_ns;
    struct totals *totals = &recorder->totals[record->operation % OPERATIONS];
    totals->count++;
    totals->failures += has_failed;
    totals->ns += ns;
    totals->sent += record->sent;
    totals->received += record->received;
    totals->buckets[bucket_of(ns)]++;
}

/* Records an operation that a shortcut has begun and ended. */
void recorder_note(PyObject *self, const uint8_t *prefix, uint64_t sequence, int64_t begun_ns)
{
    struct recorder *recorder = (struct recorder *)self;
    uint32_t view;
    memcpy(&view, prefix + VIEW_AT, sizeof view); /* little-endian, as the machines are that this runs on */
    end(recorder, begin(recorder, sequence, prefix[OPERATION_AT], begun_ns), view, false);
}

/* Remembers when a shortcut began an operation that takes the long way from here. */
void recorder_early(PyObject *self, uint64_t sequence, int64_t begun_ns)
{
    struct recorder *recorder = (struct recorder *)self;
    recorder->early_sequence = sequence;
    recorder->early_ns = begun_ns;
}

/* begin(sequence, operation) */
static PyObject *method_begin(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct recorder *recorder = (struct recorder *)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "begin takes a sequence and an operation");
    uint64_t sequence = PyLong_AsUnsignedLongLong(args[0]);
    long operation = PyLong_AsLong(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (operation < 0 || operation >= OPERATIONS)
        return PyErr_Format(PyExc_ValueError, "there is no operation %ld", operation);
    bool is_early = recorder->early_ns && recorder->early_sequence == sequence;
    begin(recorder, sequence, (uint8_t)operation, is_early ? recorder->early_ns : monotonic_ns());
    recorder->early_ns = 0;
    Py_RETURN_NONE;
}

/* end(view, has_failed): of the operation that was begun last */
static PyObject *method_end(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    struct recorder *recorder = (struct recorder *)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "end takes a view and whether the operation has failed");
    unsigned long view = PyLong_AsUnsignedLong(args[0]);
    int has_failed = PyObject_IsTrue(args[1]);
    if (PyErr_Occurred())
        return NULL;
    struct record *record = &recorder->records[recorder->last % RECORDS];
    if (record->outcome == RUNNING && record->sequence != 0)
        end(recorder, record, (uint32_t)view, has_failed);
    Py_RETURN_NONE;
}

/* records(after) -> [(sequence, operation, outcome, begun ns, ended ns, sent, received, peers, phases, view)] */
static PyObject *method_records(PyObject *self, PyObject *arg)
{
    struct recorder *recorder = (struct recorder *)self;
    uint64_t after = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred())
        return NULL;
    PyObject *list = PyList_New(0);
    uint64_t first = recorder->last >= RECORDS ? recorder->last - RECORDS + 1 : 1;
    for (uint64_t sequence = after >= first ? after + 1 : first; list != NULL && sequence <= recorder->last; sequence++) {
        struct record record = recorder->records[sequence % RECORDS];
        if (record.sequence != sequence)
            continue;
        if (record.outcome == RUNNING)
            read_progress(recorder, &record);
        PyObject *item = Py_BuildValue("(KiiLLLLKiI)", (unsigned long long)record.sequence, (int)record.operation,
                                       (int)record.outcome, (long long)record.begun_ns, (long long)record.ended_ns,
                                       (long long)record.sent, (long long)record.received,
                                       (unsigned long long)record.peers, (int)record.phases, (unsigned int)record.view);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* totals() -> [(operation, count, failures, ns, sent, received, (count by bucket, ...))] */
static PyObject *method_totals(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct recorder *recorder = (struct recorder *)self;
    PyObject *list = PyList_New(0);
    for (int operation = 0; list != NULL && operation < OPERATIONS; operation++) {
        const struct totals *totals = &recorder->totals[operation];
        if (totals->count == 0)
            continue;
        PyObject *buckets = PyTuple_New(BUCKETS);
        for (int index = 0; buckets != NULL && index < BUCKETS; index++) {
            PyObject *number = PyLong_FromLongLong(totals->buckets[index]);
            if (number == NULL || PyTuple_SetItem(buckets, index, number) < 0)
                Py_CLEAR(buckets);
        }
        PyObject *item = buckets == NULL ? NULL
                                         : Py_BuildValue("(iLLLLLO)", operation, (long long)totals->count,
                                                         (long long)totals->failures, (long long)totals->ns,
                                                         (long long)totals->sent, (long long)totals->received, buckets);
        Py_XDECREF(buckets);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* traffic() -> [(bytes sent, sends, bytes received, receives)], by rank */
static PyObject *method_traffic(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct recorder *recorder = (struct recorder *)self;
    PyObject *list = PyList_New(0);
    for (int32_t rank = 0; list != NULL && rank < recorder->size; rank++) {
        struct traffic *traffic = &recorder->traffic[rank];
        PyObject *item = Py_BuildValue("(LLLL)", (long long)atomic_load_explicit(&traffic->sent_bytes, memory_order_relaxed),
                                       (long long)atomic_load_explicit(&traffic->sends, memory_order_relaxed),
                                       (long long)atomic_load_explicit(&traffic->received_bytes, memory_order_relaxed),
                                       (long long)atomic_load_explicit(&traffic->receives, memory_order_relaxed));
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* busy(since ns) -> (ns after that in which an operation ran, when the first of them began or 0) */
static PyObject *method_busy(PyObject *self, PyObject *arg)
{
    struct recorder *recorder = (struct recorder *)self;
    long long since = PyLong_AsLongLong(arg);
    if (since == -1 && PyErr_Occurred())
        return NULL;
    int64_t busy = 0, first = 0, now = monotonic_ns();
    for (uint64_t sequence = recorder->last, left = RECORDS; sequence > 0 && left > 0; sequence--, left--) {
        const struct record *record = &recorder->records[sequence % RECORDS];
        int64_t ended_ns = record->outcome == RUNNING ? now : record->ended_ns;
        if (record->sequence != sequence || ended_ns <= since)
            break;
        first = record->begun_ns < since ? since : record->begun_ns;
        busy += ended_ns - first;
    }
    return Py_BuildValue("(LL)", (long long)busy, (long long)first);
}

/* running() -> when the operation in progress began, or 0 */
static PyObject *method_running(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct recorder *recorder = (struct recorder *)self;
    const struct record *record = &recorder->records[recorder->last % RECORDS];
    return PyLong_FromLongLong(record->outcome == RUNNING ? record->begun_ns : 0);
}

static PyMethodDef recorder_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))method_begin, METH_FASTCALL, "begin(sequence, operation)"},
    {"end", (PyCFunction)(void (*)(void))method_end, METH_FASTCALL, "end(view, has_failed), of the operation begun last."},
    {"records", method_records, METH_O, "Return the last operations, those after a sequence."},
    {"totals", method_totals, METH_NOARGS, "Return the totals by operation."},
    {"traffic", method_traffic, METH_NOARGS, "Return what was moved, by rank."},
    {"busy", method_busy, METH_O, "Return for how long operations ran after a moment, and when the first of them began."},
    {"running", method_running, METH_NOARGS, "Return when the operation in progress began, or 0."},
    {NULL, NULL, 0, NULL},
};

struct kind recorder_kind = {
    .name = "covey._native.Recorder",
    .size = sizeof(struct recorder),
    .fill = recorder_fill,
    .release = recorder_release,
    .methods = recorder_methods,
};
