/* What the compiled modules share: none of them works with another torch than it was compiled for.
 *
 * They read torch's objects as torch's headers describe them, and these differ from one version to
 * the next. Many differences the linker would not find: a field would be read where another one is.
 * So this is asked first of all, and who is told no goes the long way, in Python.
 */

#ifndef TELEGRAD_NATIVE_H
#define TELEGRAD_NATIVE_H

#include <Python.h>

#ifndef TELEGRAD_TORCH
#error "Compile with -DTELEGRAD_TORCH=..., the text of torch.__version__."
#endif

/* 1, or 0 with ImportError set. */
static int
built_for_this_torch(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *version = torch ? PyObject_GetAttrString(torch, "__version__") : NULL;
    Py_XDECREF(torch);
    if (version == NULL)
        return 0;
    int same = PyUnicode_Check(version) && !PyUnicode_CompareWithASCIIString(version, TELEGRAD_TORCH);
    if (!same)
        PyErr_Format(PyExc_ImportError,
                     "it was compiled for torch %s and this is torch %S; install telegrad again",
                     TELEGRAD_TORCH, version);
    Py_DECREF(version);
    return same;
}

#endif
