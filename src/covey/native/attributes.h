/* The attributes of Python objects that C reads, sets or calls: all of them, by the class that has them.
 *
 * C finds an attribute by its name, and to set one that Python has renamed would make a new one that no code reads. So an
 * object is checked when C takes it (`has_attributes`), and each name is made once, when the module is loaded.
 */
#ifndef COVEY_ATTRIBUTES_H
#define COVEY_ATTRIBUTES_H

#include "native.h"

enum owner {
    ARRAY,      /* numpy.ndarray */
    DTYPE,      /* numpy.dtype */
    OPERATION,  /* covey/runtime/collectives/operation.py: CurrentOperation */
    CALL_LOG,   /* covey/runtime/collectives/call_log.py: CallLog */
    OPERATIONS, /* covey/runtime/collectives/atomic.py: AtomicOperations */
    COMMIT,     /* covey/proto/commit.py: Commit */
    CIPHER,     /* covey/net/lanes/native.py: LongCipher */
};

enum attribute {
    ARRAY_DTYPE,
    DTYPE_ITEMSIZE,
    OPERATION_CALL,
    OPERATION_SEQUENCE,
    OPERATION_RETURNED,
    CALL_LOG_ENTERED,
    OPERATIONS_IS_EXECUTING,
    COMMIT_PHASE,
    COMMIT_RETURNED,
    COMMIT_PENDING,
    CIPHER_SET_KEY,
    CIPHER_SEAL,
    CIPHER_OPEN,
    ATTRIBUTES,
};

/* The names, which the module keeps. */
extern PyObject *attribute_names[ATTRIBUTES];

/* Makes the names; false with a Python error if it cannot. */
bool attributes_load(void);

/* Whether an object has all attributes that C expects of its class; false with a TypeError that names the first it lacks. */
bool has_attributes(PyObject *object, enum owner owner);

static inline PyObject *get_attribute(PyObject *object, enum attribute which)
{
    return PyObject_GetAttr(object, attribute_names[which]);
}

static inline bool set_attribute(PyObject *object, enum attribute which, PyObject *value)
{
    return PyObject_SetAttr(object, attribute_names[which], value) == 0;
}

#endif
