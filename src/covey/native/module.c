/* covey._native: the compiled executor of plans, and the loops of the codecs. This file makes the module and its types. */
#include "attributes.h"

static struct kind *const kinds[] = {
    &ring_kind, &stream_kind, &sealed_kind, &striped_kind, &plan_kind, &reduction_kind, &undo_kind, &recorder_kind, &runner_kind,
    &shortcut_kind, &message_end_kind,
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static const struct kind *kind_of(PyTypeObject *type)
{
    for (size_t index = 0; index < KINDS; index++)
        if (kinds[index]->type == (PyObject *)type)
            return kinds[index];
    return NULL;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *unused)
{
    (void)unused;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = alloc(type, 0);
    if (self != NULL && kind_of(type)->fill(self, args) < 0)
        Py_CLEAR(self);
    return self;
}

static void destroy(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    if (kind_of(type)->release != NULL)
        kind_of(type)->release(self);
    free_memory(self);
    Py_DECREF(type);
}

static bool add_type(PyObject *module, struct kind *kind)
{
    PyType_Slot slots[5] = {{Py_tp_new, (void *)make}, {Py_tp_dealloc, (void *)destroy}};
    int count = 2;
    if (kind->methods != NULL)
        slots[count++] = (PyType_Slot){Py_tp_methods, kind->methods};
    if (kind->members != NULL)
        slots[count++] = (PyType_Slot){Py_tp_members, kind->members};
    PyType_Spec spec = {.name = kind->name, .basicsize = (int)kind->size, .flags = Py_TPFLAGS_DEFAULT, .slots = slots};
    kind->type = PyType_FromSpec(&spec);
    return kind->type != NULL && PyModule_AddType(module, (PyTypeObject *)kind->type) == 0;
}

static PyObject *load_crypto(PyObject *module, PyObject *args)
{
    (void)module;
    const char *library;
    char trouble[512] = "";
    if (!PyArg_ParseTuple(args, "s", &library))
        return NULL;
    if (crypto_load(library, trouble, sizeof trouble))
        Py_RETURN_NONE;
    return PyErr_Format(PyExc_OSError, "%s", trouble);
}

static PyObject *cipher_seconds(PyObject *module, PyObject *arg)
{
    (void)module;
    long long nbytes = PyLong_AsLongLong(arg);
    if (nbytes < 1 || nbytes > 1 << 24 || !crypto_is_loaded())
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "1 to 16 MiB, once libcrypto is loaded");
    return PyFloat_FromDouble((double)crypto_time(nbytes) / 1e9);
}

static PyMethodDef module_methods[] = {
    {"cipher_seconds", cipher_seconds, METH_O, "Return how long libcrypto takes to encrypt so many bytes."},
    {"is_ufunc_as_expected", is_ufunc_as_expected, METH_VARARGS, "Tell whether a ufunc's memory is as expected."},
    {"load_crypto", load_crypto, METH_VARARGS, "Find libcrypto through a library that was linked with it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "covey._native",
    .m_doc = "The compiled executor of plans, and the loops of the codecs.",
    .m_size = -1,
    .m_methods = module_methods,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    bool is_made = module != NULL && attributes_load() && PyModule_AddFunctions(module, codec_methods) == 0;
    for (size_t index = 0; is_made && index < KINDS; index++)
        is_made = add_type(module, kinds[index]);
    if (!is_made)
        Py_CLEAR(module);
    return module;
}
