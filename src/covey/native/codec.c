/* The loops of the codecs as Python calls them: arguments are checked, the interpreter's lock is released. */
#include "native.h"

#include "codec.h"

#include <string.h>

enum access { READS, WRITES };

/* Takes the memory of an array whose elements have one of the letters in `formats` as their format, and `itemsize` bytes;
 * false, with a Python error, if it is another array, is not contiguous and aligned, or must not be written. */
static bool take(PyObject *object, const char *name, const char *formats, Py_ssize_t itemsize, enum access access,
                 Py_buffer *view)
{
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (access == WRITES ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) < 0) {
        if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "%s must be contiguous%s", name, access == WRITES ? " and writable" : "");
        }
        return false;
    }
    const char *format = view->format == NULL ? "B" : view->format;
    bool is_known = format[0] != '\0' && format[1] == '\0' && strchr(formats, format[0]) != NULL;
    if (is_known && view->itemsize == itemsize && (uintptr_t)view->buf % (uintptr_t)itemsize == 0)
        return true;
    PyErr_Format(PyExc_ValueError, "%s has elements of format '%s'; it must be an aligned array of '%c'", name, format,
                 formats[0]);
    return false;
}

static bool take_floats(PyObject *object, const char *name, enum access access, Py_buffer *view)
{
    return take(object, name, "f", sizeof(float), access, view);
}

static bool take_bytes(PyObject *object, enum access access, Py_buffer *view)
{
    return take(object, "wire", "B", 1, access, view);
}

/* False, with a Python error, if two arrays, of which one is written, have memory in common. */
static bool are_apart(const Py_buffer *one, const Py_buffer *other)
{
    uintptr_t first = (uintptr_t)one->buf, second = (uintptr_t)other->buf;
    if (one->len == 0 || other->len == 0 || first + (uintptr_t)one->len <= second || second + (uintptr_t)other->len <= first)
        return true;
    PyErr_SetString(PyExc_ValueError, "the arrays overlap");
    return false;
}

static bool has_length(const Py_buffer *view, const char *name, int64_t nbytes)
{
    if (view->len == nbytes)
        return true;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes instead of %lld", name, view->len, (long long)nbytes);
    return false;
}

static bool set_block(struct quantiser *quantiser, long long block)
{
    quantiser->block = block;
    if (block > 0 && block <= LARGEST_QUANTISED_BLOCK && block % 8 == 0)
        return true;
    PyErr_SetString(PyExc_ValueError, "a block has a multiple of 8 elements, up to 65536");
    return false;
}

/* Encoding */

struct encoding {
    Py_buffer x, wire, residual;
    bool has_residual;
};

static void release_encoding(struct encoding *encoding)
{
    PyBuffer_Release(&encoding->x); /* nothing happens to what was not taken */
    PyBuffer_Release(&encoding->wire);
    PyBuffer_Release(&encoding->residual);
}

/* Takes the arrays of an encoder. The residual may be None, or `x` itself. */
static bool take_encoding(PyObject *x, PyObject *wire, PyObject *residual, struct encoding *encoding)
{
    encoding->has_residual = residual != Py_None;
    if (!take_floats(x, "x", READS, &encoding->x) || !take_bytes(wire, WRITES, &encoding->wire) ||
        !are_apart(&encoding->x, &encoding->wire))
        return false;
    if (!encoding->has_residual)
        return true;
    return take_floats(residual, "residual", WRITES, &encoding->residual) &&
           has_length(&encoding->residual, "residual", encoding->x.len) &&
           are_apart(&encoding->residual, &encoding->wire) &&
           (encoding->residual.buf == encoding->x.buf || are_apart(&encoding->residual, &encoding->x));
}

/* Reads the key and the first index of random rounding; false, with a Python error, if they are out of range. */
static bool read_dither(PyObject *key, unsigned long long first, struct dither *dither)
{
    unsigned long value = PyLong_AsUnsignedLong(key);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError))
        return false;
    if (PyErr_Occurred() || value > UINT32_MAX) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ValueError, "a key has 32 bits");
        return false;
    }
    *dither = (struct dither){.key = (uint32_t)value, .first = (uint32_t)first};
    return true;
}

static PyObject *encode_blocks(PyObject *args, struct quantiser quantiser)
{
    PyObject *x, *wire, *residual, *key;
    long long block;
    unsigned long long first;
    struct encoding encoding = {0};
    struct dither dither = {0};
    if (!PyArg_ParseTuple(args, "OOLOOK", &x, &wire, &block, &residual, &key, &first) || !set_block(&quantiser, block) ||
        (key != Py_None && !read_dither(key, first, &dither)))
        return NULL;
    bool is_right = take_encoding(x, wire, residual, &encoding);
    int64_t count = encoding.x.len / (int64_t)sizeof(float);
    is_right = is_right && has_length(&encoding.wire, "wire", quantised_bytes(&quantiser, count));
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        quantise(&quantiser, encoding.x.buf, count, encoding.wire.buf, encoding.has_residual ? encoding.residual.buf : NULL,
                 key == Py_None ? NULL : &dither);
        Py_END_ALLOW_THREADS
    }
    release_encoding(&encoding);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

static PyObject *encode_cast(PyObject *args, bool is_bfloat16)
{
    PyObject *x, *wire, *residual;
    struct encoding encoding = {0};
    if (!PyArg_ParseTuple(args, "OOO", &x, &wire, &residual))
        return NULL;
    bool is_right = take_encoding(x, wire, residual, &encoding) && has_length(&encoding.wire, "wire", encoding.x.len / 2);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        encode_halves(is_bfloat16, encoding.x.buf, encoding.x.len / (int64_t)sizeof(float), encoding.wire.buf,
                      encoding.has_residual ? encoding.residual.buf : NULL);
        Py_END_ALLOW_THREADS
    }
    release_encoding(&encoding);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

/* Decoding */

static bool take_decoding(PyObject *wire, PyObject *out, Py_buffer *wire_view, Py_buffer *out_view)
{
    return take_bytes(wire, READS, wire_view) && take_floats(out, "out", WRITES, out_view) && are_apart(wire_view, out_view);
}

static PyObject *decode_blocks(PyObject *args, struct quantiser quantiser)
{
    PyObject *wire, *out;
    long long block;
    int adds;
    Py_buffer wire_view = {0}, out_view = {0};
    if (!PyArg_ParseTuple(args, "OOLp", &wire, &out, &block, &adds) || !set_block(&quantiser, block))
        return NULL;
    bool is_right = take_decoding(wire, out, &wire_view, &out_view);
    int64_t count = out_view.len / (int64_t)sizeof(float);
    is_right = is_right && has_length(&wire_view, "wire", quantised_bytes(&quantiser, count));
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        dequantise(&quantiser, wire_view.buf, out_view.buf, count, adds);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&wire_view);
    PyBuffer_Release(&out_view);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

static PyObject *decode_cast(PyObject *args, bool is_bfloat16)
{
    PyObject *wire, *out;
    int adds;
    Py_buffer wire_view = {0}, out_view = {0};
    if (!PyArg_ParseTuple(args, "OOp", &wire, &out, &adds))
        return NULL;
    bool is_right = take_decoding(wire, out, &wire_view, &out_view) && has_length(&wire_view, "wire", out_view.len / 2);
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        decode_halves(is_bfloat16, wire_view.buf, out_view.buf, out_view.len / (int64_t)sizeof(float), adds);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&wire_view);
    PyBuffer_Release(&out_view);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

/* The functions of the module */

static PyObject *int8_encode(PyObject *module, PyObject *args)
{
    (void)module;
    return encode_blocks(args, INT8);
}

static PyObject *int4_encode(PyObject *module, PyObject *args)
{
    (void)module;
    return encode_blocks(args, INT4);
}

static PyObject *int8_decode(PyObject *module, PyObject *args)
{
    (void)module;
    return decode_blocks(args, INT8);
}

static PyObject *int4_decode(PyObject *module, PyObject *args)
{
    (void)module;
    return decode_blocks(args, INT4);
}

static PyObject *fp16_encode(PyObject *module, PyObject *args)
{
    (void)module;
    return encode_cast(args, false);
}

static PyObject *bf16_encode(PyObject *module, PyObject *args)
{
    (void)module;
    return encode_cast(args, true);
}

static PyObject *fp16_decode(PyObject *module, PyObject *args)
{
    (void)module;
    return decode_cast(args, false);
}

static PyObject *bf16_decode(PyObject *module, PyObject *args)
{
    (void)module;
    return decode_cast(args, true);
}

static PyObject *topk(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *x, *indices;
    long long kept;
    Py_buffer x_view = {0}, indices_view = {0};
    if (!PyArg_ParseTuple(args, "OLO", &x, &kept, &indices))
        return NULL;
    bool is_right = take_floats(x, "x", READS, &x_view) &&
                    take(indices, "indices", "lq", sizeof(int64_t), WRITES, &indices_view) &&
                    are_apart(&x_view, &indices_view);
    int64_t count = x_view.len / (int64_t)sizeof(float);
    if (is_right && (kept < 0 || kept > count || count > UINT32_MAX)) {
        PyErr_Format(PyExc_ValueError, "%lld of %lld elements cannot be selected", kept, (long long)count);
        is_right = false;
    }
    is_right = is_right && has_length(&indices_view, "indices", kept * (int64_t)sizeof(int64_t));
    if (is_right) {
        Py_BEGIN_ALLOW_THREADS
        is_right = select_greatest(x_view.buf, (uint32_t)count, (uint32_t)kept, indices_view.buf);
        Py_END_ALLOW_THREADS
        if (!is_right)
            PyErr_SetString(PyExc_ValueError, "another thread changed the array while elements were selected");
    }
    PyBuffer_Release(&x_view);
    PyBuffer_Release(&indices_view);
    return is_right ? Py_NewRef(Py_None) : NULL;
}

PyMethodDef codec_methods[] = {
    {"int8_encode", int8_encode, METH_VARARGS, "int8_encode(x, wire, block, residual or None, key or None, first index)"},
    {"int8_decode", int8_decode, METH_VARARGS, "int8_decode(wire, out, block, adds)"},
    {"int4_encode", int4_encode, METH_VARARGS, "int4_encode(x, wire, block, residual or None, key or None, first index)"},
    {"int4_decode", int4_decode, METH_VARARGS, "int4_decode(wire, out, block, adds)"},
    {"fp16_encode", fp16_encode, METH_VARARGS, "fp16_encode(x, wire, residual or None)"},
    {"fp16_decode", fp16_decode, METH_VARARGS, "fp16_decode(wire, out, adds)"},
    {"bf16_encode", bf16_encode, METH_VARARGS, "bf16_encode(x, wire, residual or None)"},
    {"bf16_decode", bf16_decode, METH_VARARGS, "bf16_decode(wire, out, adds)"},
    {"topk", topk, METH_VARARGS, "topk(x, k, indices): the indices, ascending, of the k elements of greatest magnitude"},
    {NULL, NULL, 0, NULL},
};
