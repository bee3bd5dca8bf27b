/* What the compiled parts share. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef TELEGRAD_TORCH
#error "TELEGRAD_TORCH is to be the version of the torch whose headers are used, as text."
#endif

/* Whether the torch that runs is the one whose headers were used: the fields of its objects lie
 * elsewhere in another. 0 with an ImportError set. */
static int
built_for_this_torch(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *version = torch ? PyObject_GetAttrString(torch, "__version__") : NULL;
    PyObject *text = version ? PyObject_Str(version) : NULL;
    int same = text != NULL && PyUnicode_CompareWithASCIIString(text, TELEGRAD_TORCH) == 0;
    if (text != NULL && !same)
        PyErr_Format(PyExc_ImportError,
                     "It was compiled for torch " TELEGRAD_TORCH
                     " and not for torch %U, which runs: install telegrad again.",
                     text);
    Py_XDECREF(torch);
    Py_XDECREF(version);
    Py_XDECREF(text);
    return same;
}
