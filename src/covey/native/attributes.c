/* The table of names of attributes.h. */
#include "attributes.h"

PyObject *attribute_names[ATTRIBUTES];

static const struct {
    enum owner owner;
    const char *name;
} table[ATTRIBUTES] = {
    [ARRAY_DTYPE] = {ARRAY, "dtype"},
    [DTYPE_ITEMSIZE] = {DTYPE, "itemsize"},
    [OPERATION_CALL] = {OPERATION, "call"},
    [OPERATION_SEQUENCE] = {OPERATION, "sequence"},
    [OPERATION_RETURNED] = {OPERATION, "returned"},
    [CALL_LOG_ENTERED] = {CALL_LOG, "entered"},
    [OPERATIONS_IS_EXECUTING] = {OPERATIONS, "is_executing"},
    [COMMIT_PHASE] = {COMMIT, "phase"},
    [COMMIT_RETURNED] = {COMMIT, "returned"},
    [COMMIT_PENDING] = {COMMIT, "pending"},
    [CIPHER_SET_KEY] = {CIPHER, "set_key"},
    [CIPHER_SEAL] = {CIPHER, "seal"},
    [CIPHER_OPEN] = {CIPHER, "open"},
};

bool attributes_load(void)
{
    for (int which = 0; which < ATTRIBUTES; which++) {
        if (attribute_names[which] == NULL)
            attribute_names[which] = PyUnicode_InternFromString(table[which].name);
        if (attribute_names[which] == NULL)
            return false;
    }
    return true;
}

bool has_attributes(PyObject *object, enum owner owner)
{
    for (int which = 0; which < ATTRIBUTES; which++) {
        if (table[which].owner != owner)
            continue;
        PyObject *value = get_attribute(object, which);
        if (value == NULL) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "%R has no attribute %R, which covey._native uses: rebuild the extension, and keep "
                         "native/attributes.c and the class alike", (PyObject *)Py_TYPE(object), attribute_names[which]);
            return false;
        }
        Py_DECREF(value);
    }
    return true;
}
