/* Reductions. For most dtypes these are numpy's own inner loops, so the bits are those of the Python executor in every
 * case, and numpy chooses the instructions. Only float16 and bfloat16 have loops of their own, at memory speed; they
 * combine in float32 and round once, to the nearest even value, as numpy and ml_dtypes do. Minima and maxima are selected,
 * not rounded: the bits of a nan stay as they are.
 */
#include "native.h"

#include "halves.h"

#include <stdlib.h>
#include <string.h>

/* float16 and bfloat16 */

#define TARGET
#define NAMED(name) name##_plain
#define WIDEN_FLOAT16 widen_float16
#define NARROW_FLOAT16 narrow_float16
#include "half_loops.h"
#undef TARGET
#undef NAMED
#undef WIDEN_FLOAT16
#undef NARROW_FLOAT16

#if HAS_X86
#define WIDEN_FLOAT16 widen_float16_f16c
#define NARROW_FLOAT16 narrow_float16_f16c
#define TARGET AVX2
#define NAMED(name) name##_avx2
#include "half_loops.h"
#undef TARGET
#undef NAMED
#undef WIDEN_FLOAT16
#undef NARROW_FLOAT16

#define WIDEN_FLOAT16 widen_float16_avx512
#define NARROW_FLOAT16 narrow_float16_avx512
#define TARGET AVX512
#define NAMED(name) name##_avx512
#include "half_loops.h"
#undef TARGET
#undef NAMED
#endif

typedef void half_loops(bool is_bfloat16, enum half_op op, const uint16_t *left, const uint16_t *right, uint16_t *out,
                        int64_t count, float divisor, bool keeps_left);

static half_loops *chosen_loops(void)
{
#if HAS_X86
    enum instructions here = instructions_here();
    if (here != PLAIN)
        return here == WITH_AVX512 ? loops_avx512 : loops_avx2;
#endif
    return loops_plain;
}

/* All reductions */

void combine(const struct reduction *reduction, const uint8_t *left, const uint8_t *right, uint8_t *out, int64_t count,
             bool divides, int64_t contributors)
{
    if (reduction->is_half) {
        static _Atomic(half_loops *) loops;
        half_loops *chosen = atomic_load_explicit(&loops, memory_order_relaxed);
        if (chosen == NULL) {
            chosen = chosen_loops();
            atomic_store_explicit(&loops, chosen, memory_order_relaxed);
        }
        enum half_op op = reduction->half_op == HALF_MEAN && !divides ? HALF_SUM : reduction->half_op;
        bool selects = op == HALF_MIN || op == HALF_MAX;
        /* The loops keep the right one of two nans, and otherwise it is all the same to them which operand is which. */
        bool swaps = !selects && reduction->keeps_left;
        chosen(reduction->is_bfloat16, op, (const uint16_t *)(swaps ? right : left), (const uint16_t *)(swaps ? left : right),
               (uint16_t *)out, count, (float)contributors, reduction->keeps_left);
        return;
    }
    intptr_t step = (intptr_t)reduction->itemsize, dimensions = (intptr_t)count;
    if (count == 1) { /* with one element as input and output numpy would reduce, which rounds and selects differently */
        char result[MOST_ITEM_BYTES];
        char *args[3] = {(char *)left, (char *)right, result};
        reduction->combine(args, &dimensions, (intptr_t[3]){step, step, step}, reduction->combine_data);
        memcpy(out, result, (size_t)step);
    } else {
        char *args[3] = {(char *)left, (char *)right, (char *)out};
        reduction->combine(args, &dimensions, (intptr_t[3]){step, step, step}, reduction->combine_data);
    }
    if (divides && reduction->divide != NULL) {
        char *args[3] = {(char *)out, (char *)reduction->divisor, (char *)out};
        reduction->divide(args, &dimensions, (intptr_t[3]){step, 0, step}, reduction->divide_data);
    }
}

/* Python */

/* The start of numpy's PyUFuncObject, which is part of numpy's binary interface. A later numpy may change it, so Python asks
 * `is_ufunc_as_expected` about some ufuncs before it uses the extension. */
struct numpy_ufunc {
    PyObject_HEAD
    int nin, nout, nargs, identity;
    numpy_loop **functions;
    void *const *data;
    int ntypes, reserved;
    const char *name, *types;
};

/* Finds the loop of a ufunc for two operands and a result of numpy type number `type`. */
static bool find_loop(PyObject *object, int type, numpy_loop **loop, void **data)
{
    const struct numpy_ufunc *ufunc = (const struct numpy_ufunc *)object;
    if (ufunc->nin != 2 || ufunc->nout != 1 || ufunc->nargs != 3)
        return false;
    for (int index = 0; index < ufunc->ntypes; index++) {
        const char *types = ufunc->types + 3 * index;
        if (types[0] == type && types[1] == type && types[2] == type && ufunc->functions[index] != NULL) {
            *loop = ufunc->functions[index];
            *data = ufunc->data == NULL ? NULL : ufunc->data[index];
            return true;
        }
    }
    return false;
}

/* is_ufunc_as_expected(ufunc, nin, nout, name, type numbers of all loops as bytes): whether its memory has these values
 * where this file looks for them. Pointers are followed only if all numbers around them are right. */
PyObject *is_ufunc_as_expected(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object;
    int nin, nout;
    const char *name, *types;
    Py_ssize_t name_bytes, types_bytes;
    if (!PyArg_ParseTuple(args, "Oiis#y#", &object, &nin, &nout, &name, &name_bytes, &types, &types_bytes))
        return NULL;
    PyObject *size = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__basicsize__");
    Py_ssize_t basic_bytes = size == NULL ? -1 : PyLong_AsSsize_t(size);
    Py_XDECREF(size);
    if (PyErr_Occurred())
        return NULL;
    const struct numpy_ufunc *ufunc = (const struct numpy_ufunc *)object;
    bool is_right = basic_bytes >= (Py_ssize_t)sizeof *ufunc && nin + nout > 0 && ufunc->nin == nin && ufunc->nout == nout &&
                    ufunc->nargs == nin + nout && ufunc->ntypes == types_bytes / (nin + nout) &&
                    ufunc->functions != NULL && ufunc->name != NULL && ufunc->types != NULL &&
                    strncmp(ufunc->name, name, (size_t)name_bytes + 1) == 0 &&
                    memcmp(ufunc->types, types, (size_t)types_bytes) == 0;
    return PyBool_FromLong(is_right);
}

/* Reduction(itemsize, type number, combine, divide or None, divisor) of numpy's loops;
 * Reduction(is_bfloat16, op, keeps_left) of our own, where the last says which operand the reference keeps of two nans, or
 * of two zeros with different signs if it selects. */
static int reduction_fill(PyObject *self, PyObject *args)
{
    struct reduction *reduction = (struct reduction *)self;
    if (PyTuple_Size(args) == 3) {
        int is_bfloat16, op, keeps_left;
        if (!PyArg_ParseTuple(args, "pip", &is_bfloat16, &op, &keeps_left))
            return -1;
        if (op < 0 || op >= HALF_OPS) {
            PyErr_SetString(PyExc_ValueError, "no such operation");
            return -1;
        }
        reduction->itemsize = 2;
        reduction->is_half = true;
        reduction->is_bfloat16 = is_bfloat16;
        reduction->half_op = (enum half_op)op;
        reduction->keeps_left = keeps_left;
        return 0;
    }
    long long itemsize;
    int type;
    PyObject *combine, *divide;
    Py_buffer divisor;
    if (!PyArg_ParseTuple(args, "LiOOy*", &itemsize, &type, &combine, &divide, &divisor))
        return -1;
    bool is_right = itemsize > 0 && itemsize <= MOST_ITEM_BYTES && divisor.len == itemsize;
    if (is_right)
        memcpy(reduction->divisor, divisor.buf, (size_t)itemsize);
    PyBuffer_Release(&divisor);
    reduction->itemsize = itemsize;
    if (!is_right || !find_loop(combine, type, &reduction->combine, &reduction->combine_data) ||
        (divide != Py_None && !find_loop(divide, type, &reduction->divide, &reduction->divide_data))) {
        PyErr_SetString(PyExc_ValueError, "numpy has no loop for these types");
        return -1;
    }
    return 0;
}

static PyObject *reduction_combine(PyObject *self, PyObject *args)
{
    const struct reduction *reduction = (const struct reduction *)self;
    Py_buffer left, right, out;
    int divides;
    long long contributors;
    if (!PyArg_ParseTuple(args, "y*y*w*pL", &left, &right, &out, &divides, &contributors))
        return NULL;
    bool is_right = left.len == out.len && right.len == out.len && out.len % reduction->itemsize == 0;
    if (is_right && out.len)
        combine(reduction, left.buf, right.buf, out.buf, out.len / reduction->itemsize, divides, contributors);
    PyBuffer_Release(&left);
    PyBuffer_Release(&right);
    PyBuffer_Release(&out);
    if (!is_right)
        return PyErr_Format(PyExc_ValueError, "the three buffers have different lengths");
    Py_RETURN_NONE;
}

static PyMethodDef reduction_methods[] = {
    {"combine", reduction_combine, METH_VARARGS, "combine(left, right, out, divides, contributors)"},
    {NULL, NULL, 0, NULL},
};

struct kind reduction_kind = {
    .name = "covey._native.Reduction",
    .size = sizeof(struct reduction),
    .fill = reduction_fill,
    .methods = reduction_methods,
};
