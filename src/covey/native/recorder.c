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
    BUCKETS = 56,     /* of durations: the first is below 2^FIRST_BITS ns, then two for each octave, the last open */
    FIRST_BITS = 10,
    OPERATION_AT = 4, /* in the prefix of headers */
};
enum record_outcome { RUNNING, RETURNED, FAILED };

/* covey/runtime/recorder.py reads these two as bytes. */
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
    if (bits <= FIRST_BITS)
        return 0;
    int bucket = 1 + 2 * (bits - FIRST_BITS - 1) + (int)(ns >> (bits - 2) & 1); /* halves of an octave */
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

/* snapshot() -> (the last sequence, then as bytes: traffic by rank, totals by operation, records by sequence % RECORDS) */
static PyObject *method_snapshot(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct recorder *recorder = (struct recorder *)self;
    struct record *last = &recorder->records[recorder->last % RECORDS];
    if (last->outcome == RUNNING)
        read_progress(recorder, last);
    return Py_BuildValue("(Ky#y#y#)", (unsigned long long)recorder->last, (const char *)recorder->traffic,
                         (Py_ssize_t)(recorder->size * sizeof *recorder->traffic), (const char *)recorder->totals,
                         (Py_ssize_t)sizeof recorder->totals, (const char *)recorder->records,
                         (Py_ssize_t)(RECORDS * sizeof *recorder->records));
}

static bool is_running(const struct recorder *recorder)
{
    const struct record *last = &recorder->records[recorder->last % RECORDS];
    return recorder->last != 0 && last->outcome == RUNNING;
}

/* The time in operations, that of the one in progress included. */
static int64_t spent_ns(const struct recorder *recorder)
{
    int64_t ns = 0;
    for (int operation = 0; operation < OPERATIONS; operation++)
        ns += recorder->totals[operation].ns;
    if (is_running(recorder))
        ns += monotonic_ns() - recorder->records[recorder->last % RECORDS].begun_ns;
    return ns;
}

/* progress() -> (the last sequence, its operation, when it began, when it ended or 0) */
static PyObject *method_progress(PyObject *self, PyObject *unused)
{
    (void)unused;
    const struct recorder *recorder = (const struct recorder *)self;
    const struct record *last = &recorder->records[recorder->last % RECORDS];
    return Py_BuildValue("(KiLL)", (unsigned long long)recorder->last, (int)last->operation, (long long)last->begun_ns,
                         (long long)last->ended_ns);
}

/* spent() -> ns in operations, until now */
static PyObject *method_spent(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLongLong(spent_ns((const struct recorder *)self));
}

/* traffic() -> as bytes: traffic by rank */
static PyObject *method_traffic(PyObject *self, PyObject *unused)
{
    (void)unused;
    const struct recorder *recorder = (const struct recorder *)self;
    return PyBytes_FromStringAndSize((const char *)recorder->traffic,
                                     (Py_ssize_t)(recorder->size * sizeof *recorder->traffic));
}

static PyMethodDef recorder_methods[] = {
    {"progress", method_progress, METH_NOARGS, "Return how far the operations are; see recorder.py."},
    {"spent", method_spent, METH_NOARGS, "Return the time in operations until now, in ns."},
    {"traffic", method_traffic, METH_NOARGS, "Return the traffic by rank; see recorder.py."},
    {"begin", (PyCFunction)(void (*)(void))method_begin, METH_FASTCALL, "begin(sequence, operation)"},
    {"end", (PyCFunction)(void (*)(void))method_end, METH_FASTCALL, "end(view, has_failed), of the operation begun last."},
    {"snapshot", method_snapshot, METH_NOARGS, "Return the last sequence, traffic, totals and records; see recorder.py."},
    {NULL, NULL, 0, NULL},
};

struct kind recorder_kind = {
    .name = "covey._native.Recorder",
    .size = sizeof(struct recorder),
    .fill = recorder_fill,
    .release = recorder_release,
    .methods = recorder_methods,
};
