/* Short cuts for the messages that nearly all traffic consists of, in the form of all others.
 *
 * Half of the instructions that the interpreter ran for a small message were those of its codec and
 * of its frame: a few bytes moved by hundreds of steps. Here they are moved by C.
 *
 *   pack, unpack    a call of a function with a few tensors, a tensor, None, and a parcel with a
 *                   few tensors: the bytes that `encode` and `tensors` would write
 *   frame           a frame all of whose buffers are inline: the bytes of `frames.whole`
 *   depart          such a frame, numbered, kept and ready to be written, as `Sending.send` does it
 *   arrive          such a frame, if the window of a link begins with one, as `Receiving.receive`
 *                   does it
 *
 * What is not of such a form, or looks wrong in any way, is left to the Python code: `unpack` then
 * gives NOT_QUICK, and all others but `frame` give None, with nothing done. So this file need not
 * be built: small messages only take longer then.
 *
 * What must never happen: that a byte is read outside of the message or of a tensor's storage. All
 * numbers that a message holds are compared with what is left of it before they are used. And what
 * is called here may run any code, which may change every list that others know of: what is walked
 * through is a tuple, or a list that nobody else has.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "Numbers on the wire are little-endian, and are moved here as they lie."
#endif

enum { FEW = 4, SHORT = 255, SMALL = 1 << 13, STRIDED = 0x80, REQUIRES_GRAD = 1 };
enum { TAG_NONE = 0, TAG_TUPLE = 13, TAG_DICT = 17, TAG_TENSOR = 29, TAG_NAMED = 30, TAG_PARCEL = 39 };
enum { HEADER = 52, ROW = 16, FIRST_KIND = 1, HOUSEKEEPING = 5, LAST_KIND = 6 };
#define INLINE UINT64_MAX

/* Of other modules, found when this one is imported. */
static PyObject *tensor_type, *parcel_type, *packed_type, *frame_type, *strided, *by_tensor, *by_header;
static PyObject *name_of, *object_named, *in_dual_level, *is_zero_tensor, *from_numpy, *array_type_of;
static PyObject *not_quick, *zero;

#define NAMES(X) \
    X(layout) X(is_cpu) X(dtype) X(shape) X(stride) X(is_neg) X(storage_offset) X(itemsize) \
    X(untyped_storage) X(nbytes) X(data_ptr) X(requires_grad) X(requires_grad_) X(detach) X(numpy) \
    X(data) X(cast) X(castable) X(extent) X(header) X(array_type) X(is_floating_point) X(tensors) \
    X(dims) X(items) X(depth) X(__self__) X(B) X(acquire) X(release) X(append) X(popleft)
#define DECLARE(name) static PyObject *str_##name;
NAMES(DECLARE)

/* Whether what was got or answered is true; -1 with an error set. Takes the reference. */
static int
is_true(PyObject *answer)
{
    if (answer == NULL)
        return -1;
    int truth = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return truth;
}

static int
flag(PyObject *object, PyObject *name)
{
    return is_true(PyObject_GetAttr(object, name));
}

/* Numbers are taken from attributes and from methods; -1 with an error set. */
static Py_ssize_t
as_size(PyObject *number)
{
    if (number == NULL)
        return -1;
    Py_ssize_t size = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    return size;
}

static Py_ssize_t
number(PyObject *object, PyObject *name)
{
    return as_size(PyObject_GetAttr(object, name));
}

static Py_ssize_t
asked(PyObject *object, PyObject *method)
{
    return as_size(PyObject_CallMethodNoArgs(object, method));
}

static uintptr_t
address_of(PyObject *object)
{
    PyObject *found = PyObject_CallMethodNoArgs(object, str_data_ptr);
    if (found == NULL)
        return 0;
    uintptr_t address = (uintptr_t)PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? 0 : address;
}

/* A named tuple, without the Python function that it has for being made. Takes the references. */
static PyObject *
named_tuple(PyObject *type, Py_ssize_t count, PyObject **fields)
{
    PyTypeObject *made = (PyTypeObject *)type;
    PyObject *tuple = NULL;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (fields[i] == NULL)
            goto done;
    tuple = made->tp_alloc(made, count);
    if (tuple != NULL)
        for (; at < count; at++)
            PyTuple_SET_ITEM(tuple, at, fields[at]);
done:
    for (; at < count; at++)
        Py_XDECREF(fields[at]);
    return tuple;
}

/* ---- Packing ---- */

/* What is told of one tensor. All but `storage` and `requires_grad` are owned. */
typedef struct {
    PyObject *header;
    PyObject *buffer;
    uintptr_t storage;
    char requires_grad;
} Sent;

/* The layout of a tensor if one like it was seen before: borrowed, NULL without an error if not. */
static PyObject *
known_layout(PyObject *tensor)
{
    PyObject *dtype = PyObject_GetAttr(tensor, str_dtype);
    PyObject *shape = dtype ? PyObject_GetAttr(tensor, str_shape) : NULL;
    PyObject *stride = shape ? PyObject_CallMethodNoArgs(tensor, str_stride) : NULL;
    PyObject *key = stride ? PyTuple_Pack(3, dtype, shape, stride) : NULL;
    PyObject *layout = key ? PyDict_GetItemWithError(by_tensor, key) : NULL;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    Py_XDECREF(key);
    return layout;
}

/* The memory of a tensor of some size, as the program sees it, so that it is sent without a copy. */
static PyObject *
view_of(PyObject *tensor, int requires_grad)
{
    PyObject *plain = requires_grad ? PyObject_CallMethodNoArgs(tensor, str_detach) : Py_NewRef(tensor);
    PyObject *array = plain ? PyObject_CallMethodNoArgs(plain, str_numpy) : NULL;
    PyObject *data = array ? PyObject_GetAttr(array, str_data) : NULL;
    PyObject *view = data ? PyObject_CallMethodOneArg(data, str_cast, str_B) : NULL;
    Py_XDECREF(plain);
    Py_XDECREF(array);
    Py_XDECREF(data);
    return view;
}

static PyObject *
copy_of(uintptr_t address, Py_ssize_t nbytes)
{
    PyObject *copy = PyBytes_FromStringAndSize((const char *)address, nbytes);
    PyObject *view = copy ? PyMemoryView_FromObject(copy) : NULL;
    Py_XDECREF(copy);
    return view;
}

/* 1 if the tensor is of the usual kind, 0 if not, -1 with an error set. */
static int
describe(PyObject *tensor, Sent *sent)
{
    int truth;
    if ((PyObject *)Py_TYPE(tensor) != tensor_type)
        return 0;
    PyObject *form = PyObject_GetAttr(tensor, str_layout);
    if (form == NULL)
        return -1;
    Py_DECREF(form);
    if (form != strided)
        return 0;
    if ((truth = flag(tensor, str_is_cpu)) <= 0)
        return truth;
    PyObject *layout = known_layout(tensor);
    if (layout == NULL)
        return PyErr_Occurred() ? -1 : 0;
    /* The table of layouts may be emptied meanwhile. */
    Py_INCREF(layout);
    int result = -1;
    PyObject *storage = NULL;
    if ((truth = flag(layout, str_castable)) <= 0) {
        result = truth;
        goto done;
    }
    if ((truth = is_true(PyObject_CallMethodNoArgs(tensor, str_is_neg))) != 0 ||
        (truth = is_true(PyObject_CallOneArg(is_zero_tensor, tensor))) != 0) {
        result = truth < 0 ? -1 : 0;
        goto done;
    }
    Py_ssize_t nbytes = number(layout, str_nbytes), end = number(layout, str_extent);
    Py_ssize_t first = asked(tensor, str_storage_offset);
    if (PyErr_Occurred())
        goto done;
    if (first) {
        Py_ssize_t item = number(tensor, str_itemsize);
        if (item < 0)
            goto done;
        end += first * item;
    }
    if ((storage = PyObject_CallMethodNoArgs(tensor, str_untyped_storage)) == NULL)
        goto done;
    Py_ssize_t held = asked(storage, str_nbytes);
    if (held == -1 && PyErr_Occurred())
        goto done;
    uintptr_t address = address_of(tensor);
    sent->storage = address ? address_of(storage) : 0;
    if (PyErr_Occurred())
        goto done;
    if (end > held || !address) {
        result = 0;
        goto done;
    }
    if ((truth = flag(tensor, str_requires_grad)) < 0)
        goto done;
    sent->requires_grad = (char)truth;
    sent->buffer = nbytes > SMALL ? view_of(tensor, truth) : copy_of(address, nbytes);
    sent->header = sent->buffer ? PyObject_GetAttr(layout, str_header) : NULL;
    if (sent->header != NULL)
        result = PyBytes_CheckExact(sent->header);
done:
    Py_DECREF(layout);
    Py_XDECREF(storage);
    return result;
}

static int
lie_apart(const Sent *sent, Py_ssize_t count)
{
    for (Py_ssize_t i = 1; i < count; i++)
        for (Py_ssize_t j = 0; j < i; j++)
            if (sent[i].storage == sent[j].storage)
                return 0;
    return 1;
}

/* Whether it is a function as `torch.add`, and not one as `[].append`, which is of a value. */
static int
has_a_name(PyObject *target)
{
    if (PyFunction_Check(target))
        return 1;
    if (!PyCFunction_CheckExact(target))
        return 0;
    PyObject *owner = PyObject_GetAttr(target, str___self__);
    if (owner == NULL)
        return -1;
    int named = owner == Py_None || PyModule_Check(owner) || PyType_Check(owner);
    Py_DECREF(owner);
    return named;
}

/* A text of less than SHORT characters of ASCII. */
static int
is_short(PyObject *text)
{
    return PyUnicode_CheckExact(text) && PyUnicode_IS_COMPACT_ASCII(text) &&
           PyUnicode_GET_LENGTH(text) < SHORT;
}

static char *
put_text(char *at, PyObject *text)
{
    Py_ssize_t size = PyUnicode_GET_LENGTH(text);
    *at++ = (char)size;
    memcpy(at, PyUnicode_1BYTE_DATA(text), (size_t)size);
    return at + size;
}

/* What stands behind the table: the tree of a call, or of a tensor, or a parcel. */
static char *
put_tree(char *at, PyObject *name, PyObject *data, Py_ssize_t count)
{
    if (name == NULL) {
        *at++ = TAG_TENSOR;
        *at++ = 0;
    }
    else if (data == NULL) {
        *at++ = TAG_TUPLE;
        *at++ = 3;
        *at++ = TAG_NAMED;
        at = put_text(at, name);
        *at++ = TAG_TUPLE;
        *at++ = (char)count;
        for (Py_ssize_t i = 0; i < count; i++) {
            *at++ = TAG_TENSOR;
            *at++ = (char)i;
        }
        *at++ = TAG_DICT;
        *at++ = 0;
    }
    else {
        *at++ = TAG_PARCEL;
        at = put_text(at, name);
        memcpy(at, PyBytes_AS_STRING(data), (size_t)PyBytes_GET_SIZE(data));
        at += PyBytes_GET_SIZE(data);
    }
    return at;
}

static PyObject *
written(const Sent *sent, Py_ssize_t count, PyObject *name, PyObject *data)
{
    Py_ssize_t size = 2 + 3 + 2 + 2 * count + 2;
    for (Py_ssize_t i = 0; i < count; i++)
        size += 1 + PyBytes_GET_SIZE(sent[i].header);
    if (name != NULL)
        size += 1 + PyUnicode_GET_LENGTH(name);
    if (data != NULL)
        size += PyBytes_GET_SIZE(data);
    PyObject *meta = PyBytes_FromStringAndSize(NULL, size);
    if (meta == NULL)
        return NULL;
    char *start = PyBytes_AS_STRING(meta), *at = start;
    *at++ = (char)count;
    *at++ = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t length = PyBytes_GET_SIZE(sent[i].header);
        *at++ = sent[i].requires_grad ? REQUIRES_GRAD : 0;
        memcpy(at, PyBytes_AS_STRING(sent[i].header), (size_t)length);
        at += length;
    }
    at = put_tree(at, name, data, count);
    _PyBytes_Resize(&meta, at - start);
    return meta;
}

/* `tensors` is a tuple. `name` and `data` are those of `put_tree`. */
static PyObject *
packed(PyObject *tensors, PyObject *name, PyObject *data)
{
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
    Sent sent[FEW] = {{0}};
    PyObject *result = NULL;
    int usual = count ? is_true(PyObject_CallNoArgs(in_dual_level)) : 0;
    if (usual < 0)
        return NULL;
    usual = !usual;
    for (Py_ssize_t i = 0; usual > 0 && i < count; i++)
        usual = describe(PyTuple_GET_ITEM(tensors, i), &sent[i]);
    if (usual < 0 && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        /* It looks like others and has no memory: a nested one, or one inside of a transform. */
        PyErr_Clear();
        usual = 0;
    }
    if (usual == 0 || (usual > 0 && !lie_apart(sent, count)))
        result = Py_NewRef(Py_None);
    else if (usual > 0) {
        PyObject *buffers = PyList_New(count);
        for (Py_ssize_t i = 0; buffers != NULL && i < count; i++)
            PyList_SET_ITEM(buffers, i, Py_NewRef(sent[i].buffer));
        PyObject *fields[4] = {
            written(sent, count, name, data), PySequence_List(tensors), buffers, Py_NewRef(zero)};
        result = named_tuple(packed_type, 4, fields);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_XDECREF(sent[i].header);
        Py_XDECREF(sent[i].buffer);
    }
    return result;
}

static PyObject *
pack_call(PyObject *call, PyObject *trust)
{
    PyObject *target = PyTuple_GET_ITEM(call, 0), *tensors = PyTuple_GET_ITEM(call, 1);
    PyObject *kwargs = PyTuple_GET_ITEM(call, 2);
    if (!PyTuple_CheckExact(tensors) || PyTuple_GET_SIZE(tensors) > FEW ||
        !PyDict_CheckExact(kwargs) || PyDict_GET_SIZE(kwargs))
        Py_RETURN_NONE;
    int named = has_a_name(target);
    if (named <= 0)
        return named < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *name = PyObject_CallFunctionObjArgs(name_of, target, trust, NULL);
    if (name == NULL)
        return NULL;
    PyObject *result = is_short(name) ? packed(tensors, name, NULL) : Py_NewRef(Py_None);
    Py_DECREF(name);
    return result;
}

static PyObject *
pack_parcel(PyObject *parcel)
{
    PyObject *topic = PyTuple_GET_ITEM(parcel, 0), *data = PyTuple_GET_ITEM(parcel, 1);
    PyObject *tensors = PyTuple_GET_ITEM(parcel, 2);
    if (!is_short(topic) || !PyBytes_CheckExact(data) || PyBytes_GET_SIZE(data) > SMALL)
        Py_RETURN_NONE;
    if ((tensors = PySequence_Tuple(tensors)) == NULL)
        return NULL;
    PyObject *result =
        PyTuple_GET_SIZE(tensors) <= FEW ? packed(tensors, topic, data) : Py_NewRef(Py_None);
    Py_DECREF(tensors);
    return result;
}

static PyObject *
native_pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "pack takes an object and a trust");
        return NULL;
    }
    PyObject *obj = args[0];
    if (PyTuple_CheckExact(obj) && PyTuple_GET_SIZE(obj) == 3)
        return pack_call(obj, args[1]);
    if ((PyObject *)Py_TYPE(obj) == parcel_type)
        return pack_parcel(obj);
    if ((PyObject *)Py_TYPE(obj) == tensor_type) {
        PyObject *alone = PyTuple_Pack(1, obj);
        PyObject *result = alone ? packed(alone, NULL, NULL) : NULL;
        Py_XDECREF(alone);
        return result;
    }
    if (obj == Py_None) {
        const char none[3] = {0, 0, TAG_NONE};
        PyObject *fields[4] = {
            PyBytes_FromStringAndSize(none, 3), PyList_New(0), PyList_New(0), Py_NewRef(zero)};
        return named_tuple(packed_type, 4, fields);
    }
    Py_RETURN_NONE;
}

/* ---- Unpacking ---- */

/* What a message says of one tensor; owned. */
typedef struct {
    PyObject *layout;
    int requires_grad;
} Announced;

/* Whether a limit allows for so many: 1, 0, or -1 with an error set. */
static int
within(PyObject *limits, PyObject *name, Py_ssize_t needed)
{
    PyObject *limit = PyObject_GetAttr(limits, name), *number = PyLong_FromSsize_t(needed);
    int truth = limit && number ? PyObject_RichCompareBool(limit, number, Py_GE) : -1;
    Py_XDECREF(limit);
    Py_XDECREF(number);
    return truth;
}

/* Read the record at `*at` and compare it with its buffer: 1, 0 if it is not usual, -1 for an
 * error. */
static int
read_record(const unsigned char *data, Py_ssize_t size, Py_ssize_t *at, PyObject *limits,
            PyObject *buffer, Announced *announced)
{
    Py_ssize_t start = *at + 1;
    if (start + 2 > size)
        return 0;
    unsigned char flags = data[*at], dims = data[start + 1];
    Py_ssize_t end = start + 2 + 8 * dims;
    if (flags > REQUIRES_GRAD || dims >= STRIDED || end > size)
        return 0;
    int truth = within(limits, str_dims, dims);
    if (truth <= 0)
        return truth;
    PyObject *header = PyBytes_FromStringAndSize((const char *)data + start, end - start);
    if (header == NULL)
        return -1;
    PyObject *layout = PyDict_GetItemWithError(by_header, header);
    Py_DECREF(header);
    if (layout == NULL)
        return PyErr_Occurred() ? -1 : 0;
    announced->layout = Py_NewRef(layout);
    announced->requires_grad = flags;
    if ((truth = flag(layout, str_castable)) <= 0)
        return truth;
    Py_ssize_t nbytes = number(layout, str_nbytes), length = PyObject_Size(buffer);
    if (PyErr_Occurred())
        return -1;
    if (nbytes != length)
        return 0;
    if (flags) {
        PyObject *dtype = PyObject_GetAttr(layout, str_dtype);
        truth = dtype ? flag(dtype, str_is_floating_point) : -1;
        Py_XDECREF(dtype);
        if (truth <= 0)
            return truth;
    }
    *at = end;
    return 1;
}

static PyObject *
made_tensor(const Announced *announced, PyObject *buffer)
{
    PyObject *shape = PyObject_GetAttr(announced->layout, str_shape);
    PyObject *type = shape ? PyObject_GetAttr(announced->layout, str_array_type) : NULL;
    PyObject *array = type ? PyObject_CallFunctionObjArgs(array_type_of, shape, type, buffer, NULL) : NULL;
    PyObject *tensor = array ? PyObject_CallOneArg(from_numpy, array) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(type);
    Py_XDECREF(array);
    if (tensor != NULL && announced->requires_grad) {
        PyObject *same = PyObject_CallMethodNoArgs(tensor, str_requires_grad_);
        Py_DECREF(tensor);
        tensor = same;
    }
    return tensor;
}

/* Where the tree's text lies, and what the tree is: its first tag, or -1. */
static int
read_tree(const unsigned char *data, Py_ssize_t size, Py_ssize_t at, Py_ssize_t count,
          Py_ssize_t *text, Py_ssize_t *end)
{
    const unsigned char *tree = data + at;
    Py_ssize_t left = size - at;
    if (left == 2 && tree[0] == TAG_TENSOR && tree[1] == 0 && count == 1)
        return TAG_TENSOR;
    if (left >= 2 && tree[0] == TAG_PARCEL && tree[1] < SHORT && tree[1] <= left - 2) {
        *text = at + 2;
        *end = *text + tree[1];
    }
    else if (left >= 4 && tree[0] == TAG_TUPLE && tree[1] == 3 && tree[2] == TAG_NAMED &&
             tree[3] < SHORT && left == 4 + tree[3] + 2 + 2 * count + 2) {
        *text = at + 4;
        *end = *text + tree[3];
        const unsigned char *rest = data + *end;
        if (rest[0] != TAG_TUPLE || rest[1] != count)
            return -1;
        for (Py_ssize_t i = 0; i < count; i++)
            if (rest[2 + 2 * i] != TAG_TENSOR || rest[3 + 2 * i] != i)
                return -1;
        if (rest[2 + 2 * count] != TAG_DICT || rest[3 + 2 * count])
            return -1;
    }
    else
        return -1;
    for (Py_ssize_t i = *text; i < *end; i++)
        if (data[i] >= 0x80)
            return -1;
    return tree[0];
}

/* What is made of a whole message; takes the reference to `target`. */
static PyObject *
unpacked(int form, PyObject *target, PyObject *tensors, PyObject *data, Py_ssize_t end)
{
    if (form == TAG_TENSOR)
        return PySequence_GetItem(tensors, 0);
    if (form == TAG_PARCEL) {
        PyObject *fields[3] = {
            target,
            PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + end, PyBytes_GET_SIZE(data) - end),
            Py_NewRef(tensors)};
        return named_tuple(parcel_type, 3, fields);
    }
    PyObject *arguments = PySequence_Tuple(tensors), *kwargs = PyDict_New(), *call = NULL;
    if (arguments != NULL && kwargs != NULL)
        call = PyTuple_Pack(3, target, arguments, kwargs);
    Py_DECREF(target);
    Py_XDECREF(arguments);
    Py_XDECREF(kwargs);
    return call;
}

static PyObject *
native_unpack(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "unpack takes bytes, buffers, a trust, limits, a function");
        return NULL;
    }
    PyObject *message = args[0], *trust = args[2], *limits = args[3], *arrive = args[4];
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(message);
    Py_ssize_t size = PyBytes_GET_SIZE(message), at = 2, text = 0, end = 0;
    Announced announced[FEW] = {{0}};
    PyObject *buffers = PySequence_Tuple(args[1]);
    if (buffers == NULL)
        return NULL;
    PyObject *result = not_quick, *tensors = NULL, *target = NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(buffers);
    int going = size >= 3 && count <= FEW && data[0] == count && data[1] == 0;
    int form = -1;
    if (going && size == 3) {
        /* All that is so short is None. */
        going = count == 0 && data[2] == TAG_NONE;
        form = TAG_NONE;
    }
    else if (going) {
        going = within(limits, str_tensors, count);
        for (Py_ssize_t i = 0; going > 0 && i < count; i++) {
            PyObject *buffer = PyTuple_GET_ITEM(buffers, i);
            going = read_record(data, size, &at, limits, buffer, &announced[i]);
        }
        if (going > 0) {
            form = read_tree(data, size, at, count, &text, &end);
            going = form >= 0;
        }
        if (going > 0 && form == TAG_TUPLE) {
            going = within(limits, str_items, 3 + count);
            if (going > 0)
                going = within(limits, str_depth, 2);
        }
    }
    if (going <= 0) {
        if (going < 0)
            result = NULL;
        goto done;
    }
    result = NULL;
    if (form == TAG_TUPLE || form == TAG_PARCEL) {
        target = PyUnicode_DecodeASCII((const char *)data + text, end - text, NULL);
        if (form == TAG_TUPLE && target != NULL)
            Py_SETREF(target, PyObject_CallFunctionObjArgs(object_named, target, trust, NULL));
        if (target == NULL)
            goto done;
    }
    if ((tensors = PyList_New(0)) == NULL)
        goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = made_tensor(&announced[i], PyTuple_GET_ITEM(buffers, i));
        if (tensor == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
            /* The long way says what is wrong with it. */
            PyErr_Clear();
            result = not_quick;
            goto done;
        }
        int failed = tensor == NULL || PyList_Append(tensors, tensor) < 0;
        Py_XDECREF(tensor);
        if (failed)
            goto done;
    }
    if (arrive != Py_None) {
        Py_SETREF(tensors, PyObject_CallOneArg(arrive, tensors));
        if (tensors == NULL)
            goto done;
    }
    if (form == TAG_NONE)
        result = Py_None;
    else {
        PyObject *made = unpacked(form, target, tensors, message, end);
        target = NULL;
        result = made;
        goto owned;
    }
done:
    Py_XINCREF(result);
owned:
    for (int i = 0; i < FEW; i++)
        Py_XDECREF(announced[i].layout);
    Py_XDECREF(target);
    Py_XDECREF(tensors);
    Py_DECREF(buffers);
    return result;
}

/* ---- Frames ---- */

static void
put_u32(char *at, Py_ssize_t value)
{
    uint32_t number = (uint32_t)value;
    memcpy(at, &number, 4);
}

static void
put_u64(char *at, uint64_t value)
{
    memcpy(at, &value, 8);
}

static uint32_t
get_u32(const char *at)
{
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

static uint64_t
get_u64(const char *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

/* The header, and a row for each view but the first two, which are note and meta. */
static char *
put_head(char *at, int kind, uint64_t call_id, uint64_t seq, uint64_t ack, const Py_buffer *views,
         Py_ssize_t count, Py_ssize_t total)
{
    memset(at, 0, 4);
    at[0] = (char)kind;
    put_u32(at + 4, views[0].len);
    put_u32(at + 8, count);
    put_u32(at + 12, 0);
    put_u32(at + 16, views[1].len);
    put_u64(at + 20, (uint64_t)total);
    put_u64(at + 28, seq);
    put_u64(at + 36, ack);
    put_u64(at + 44, call_id);
    at += HEADER;
    for (Py_ssize_t i = 0; i < count; i++, at += ROW) {
        put_u64(at, (uint64_t)views[2 + i].len);
        put_u64(at + 8, INLINE);
    }
    return at;
}

/* The bytes of a frame. NULL without an error if it is as long as `most` or longer. */
static PyObject *
made_frame(PyObject *const *message, uint64_t seq, uint64_t ack, Py_ssize_t most)
{
    long kind = PyLong_AsLong(message[0]);
    uint64_t call_id = PyLong_AsUnsignedLongLong(message[1]);
    PyObject *buffers = PyErr_Occurred() ? NULL : PySequence_Tuple(message[4]), *frame = NULL;
    if (buffers == NULL)
        return NULL;
    /* Note and meta come first, and then the buffers. */
    Py_ssize_t count = PyTuple_GET_SIZE(buffers), total = ROW * count, seen = 0;
    Py_buffer few[2 + FEW], *views = count <= FEW ? few : PyMem_New(Py_buffer, 2 + count);
    if (views == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; seen < 2 + count; seen++) {
        PyObject *part = seen < 2 ? message[2 + seen] : PyTuple_GET_ITEM(buffers, seen - 2);
        if (PyObject_GetBuffer(part, &views[seen], PyBUF_SIMPLE))
            goto done;
        total += views[seen].len;
    }
    if (total >= most)
        goto done;
    if (kind < 0 || kind > UINT8_MAX || views[0].len > UINT32_MAX || views[1].len > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a frame has more to say than fits its header");
        goto done;
    }
    frame = PyBytes_FromStringAndSize(NULL, HEADER + total);
    if (frame == NULL)
        goto done;
    char *at = PyBytes_AS_STRING(frame);
    at = put_head(at, (int)kind, call_id, seq, ack, views, count, total);
    for (Py_ssize_t i = 0; i < seen; i++) {
        memcpy(at, views[i].buf, (size_t)views[i].len);
        at += views[i].len;
    }
done:
    while (seen > 0)
        PyBuffer_Release(&views[--seen]);
    if (views != few)
        PyMem_Free(views);
    Py_DECREF(buffers);
    return frame;
}

static PyObject *
native_frame(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 7) {
        PyErr_SetString(PyExc_TypeError,
                        "frame takes kind, call id, note, meta, buffers, number, acknowledgement");
        return NULL;
    }
    uint64_t seq = PyLong_AsUnsignedLongLong(args[5]), ack = PyLong_AsUnsignedLongLong(args[6]);
    return PyErr_Occurred() ? NULL : made_frame(args, seq, ack, PY_SSIZE_T_MAX);
}

/* The buffers of a frame, each in memory of its own; NULL without an error if one is elsewhere or
 * they do not fill the frame. */
static PyObject *
own_buffers(const char *rows, Py_ssize_t count, const char *at, const char *end)
{
    for (Py_ssize_t i = 0, left = end - at; i <= count; i++) {
        if (i == count) {
            if (left)
                return NULL;
            break;
        }
        uint64_t size = get_u64(rows + ROW * i);
        if (get_u64(rows + ROW * i + 8) != INLINE || size > (uint64_t)left)
            return NULL;
        left -= (Py_ssize_t)size;
    }
    PyObject *buffers = PyList_New(count);
    for (Py_ssize_t i = 0; buffers != NULL && i < count; i++) {
        Py_ssize_t size = (Py_ssize_t)get_u64(rows + ROW * i);
        PyObject *buffer = PyByteArray_FromStringAndSize(at, size);
        if (buffer == NULL) {
            Py_DECREF(buffers);
            return NULL;
        }
        PyList_SET_ITEM(buffers, i, buffer);
        at += size;
    }
    return buffers;
}

/* What the header of a frame says. */
typedef struct {
    int kind;
    uint64_t note, count, freed, meta, total, seq, ack, call_id;
} Head;

static Head
read_head(const char *at)
{
    return (Head){(unsigned char)at[0], get_u32(at + 4),  get_u32(at + 8),
                  get_u32(at + 12),     get_u32(at + 16), get_u64(at + 20),
                  get_u64(at + 28),     get_u64(at + 36), get_u64(at + 44)};
}

/* The frame that has this head and begins here; NULL without an error if not all is inline. */
static PyObject *
read_frame(const Head *head, const char *start)
{
    const char *rows = start + HEADER, *at = rows + ROW * head->count;
    const char *inlined = at + head->note + head->meta;
    PyObject *buffers = own_buffers(rows, (Py_ssize_t)head->count, inlined, rows + head->total);
    if (buffers == NULL)
        return NULL;
    PyObject *fields[5] = {PyLong_FromLong(head->kind), PyLong_FromUnsignedLongLong(head->call_id),
                           PyBytes_FromStringAndSize(at, (Py_ssize_t)head->note),
                           PyBytes_FromStringAndSize(at + head->note, (Py_ssize_t)head->meta),
                           buffers};
    return named_tuple(frame_type, 5, fields);
}

/* ---- Links ---- */

/* Where the fields of a connection and of its session lie, which are slots of their classes. */
#define CONNECTION_FIELDS(X) \
    X(closed) X(broken) X(freed) X(session) X(sent_bytes) X(_lock) X(_queue) X(_writing) X(_ticket) \
    X(_window) X(_start) X(_end) X(_large) X(_unsuspicious)
#define SESSION_FIELDS(X) \
    X(_sent) X(_kept) X(_last_kept) X(_kept_total) X(_dropped_total) X(_seen) X(_seen_bytes) \
    X(_reported) X(_reported_bytes)
#define PLACE(name) static Py_ssize_t place_##name;
CONNECTION_FIELDS(PLACE)
SESSION_FIELDS(PLACE)
#define FIELD(object, name) (*(PyObject **)((char *)(object) + place_##name))

static PyObject *connection_type, *session_type;

/* The session of a link all of whose fields are there; NULL without an error if that is not so. */
static PyObject *
session_of(PyObject *link)
{
    if (!PyObject_TypeCheck(link, (PyTypeObject *)connection_type)) {
        PyErr_SetString(PyExc_TypeError, "that is not a link");
        return NULL;
    }
#define IS_THERE(name) && FIELD(object, name) != NULL
    PyObject *object = link;
    if (!(1 CONNECTION_FIELDS(IS_THERE)))
        return NULL;
    object = FIELD(link, session);
    if (!PyObject_TypeCheck(object, (PyTypeObject *)session_type) || !(1 SESSION_FIELDS(IS_THERE)))
        return NULL;
    return object;
}

#define NUMBER(object, name) PyLong_AsUnsignedLongLong(FIELD(object, name))

/* Only for numbers and truth: nothing runs when one goes. Takes the reference. */
static void
put(PyObject **field, PyObject *value)
{
    PyObject *old = *field;
    *field = value;
    Py_DECREF(old);
}

/* Whether who sends now becomes the writer, of what it sends alone. With the lock held. */
static int
is_free(PyObject *link)
{
    return FIELD(link, closed) == Py_False && FIELD(link, broken) == Py_False &&
           FIELD(link, _writing) == Py_False && PyObject_Size(FIELD(link, _queue)) == 0 &&
           PyObject_Size(FIELD(link, freed)) == 0;
}

/* Number a frame and keep it; what is to be written, or NULL, without an error if it is too long.
 * With the lock held. All that may fail comes first: a number that is given and not kept ends the
 * session. */
static PyObject *
stamped(PyObject *link, PyObject *session, PyObject *const *message, Py_ssize_t most)
{
    uint64_t seq = NUMBER(session, _sent) + 1, kept = NUMBER(session, _kept_total);
    uint64_t ticket = NUMBER(link, _ticket) + 1, sent = NUMBER(link, sent_bytes);
    /* The bytes are read before the number, as in `Session.stamp`. */
    PyObject *seen_bytes = Py_NewRef(FIELD(session, _seen_bytes));
    PyObject *seen = Py_NewRef(FIELD(session, _seen));
    uint64_t ack = PyLong_AsUnsignedLongLong(seen);
    PyObject *entry = NULL, *turn = NULL;
    PyObject *whole = PyErr_Occurred() ? NULL : made_frame(message, seq, ack, most);
    if (whole == NULL)
        goto done;
    uint64_t size = (uint64_t)PyBytes_GET_SIZE(whole);
    entry = Py_BuildValue("(KOK)", seq, whole, size - HEADER);
    turn = Py_BuildValue("([O]KK)", whole, size, ticket);
    PyObject *totals[2] = {PyLong_FromUnsignedLongLong(kept + size - HEADER),
                           PyLong_FromUnsignedLongLong(sent + size)};
    PyObject *added = NULL;
    if (entry != NULL && turn != NULL && totals[0] != NULL && totals[1] != NULL)
        added = PyObject_CallMethodOneArg(FIELD(session, _kept), str_append, entry);
    if (added == NULL) {
        Py_XDECREF(totals[0]);
        Py_XDECREF(totals[1]);
        Py_CLEAR(turn);
        goto done;
    }
    Py_DECREF(added);
    put(&FIELD(session, _sent), Py_NewRef(PyTuple_GET_ITEM(entry, 0)));
    put(&FIELD(session, _last_kept), Py_NewRef(PyTuple_GET_ITEM(entry, 0)));
    put(&FIELD(session, _kept_total), totals[0]);
    put(&FIELD(session, _reported_bytes), Py_NewRef(seen_bytes));
    put(&FIELD(session, _reported), Py_NewRef(seen));
    put(&FIELD(link, _ticket), Py_NewRef(PyTuple_GET_ITEM(turn, 2)));
    put(&FIELD(link, sent_bytes), totals[1]);
    put(&FIELD(link, _writing), Py_NewRef(Py_True));
done:
    Py_XDECREF(entry);
    Py_XDECREF(whole);
    Py_DECREF(seen);
    Py_DECREF(seen_bytes);
    return turn;
}

static PyObject *
native_depart(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 7) {
        PyErr_SetString(PyExc_TypeError,
                        "depart takes a link, kind, call id, note, meta, buffers, a limit");
        return NULL;
    }
    PyObject *link = args[0], *session = session_of(link), *turn = NULL;
    Py_ssize_t most = PyLong_AsSsize_t(args[6]), count = PyObject_Size(args[5]);
    if (PyErr_Occurred())
        return NULL;
    if (session == NULL || count > FEW)
        Py_RETURN_NONE;
    /* Who would have to wait for the lock goes the long way. */
    PyObject *lock = Py_NewRef(FIELD(link, _lock));
    int locked = is_true(PyObject_CallMethodOneArg(lock, str_acquire, Py_False));
    if (locked > 0) {
        if (is_free(link) && !PyErr_Occurred())
            turn = stamped(link, session, args + 1, most);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Py_XDECREF(PyObject_CallMethodNoArgs(lock, str_release));
        PyErr_Restore(type, value, trace);
    }
    Py_DECREF(lock);
    if (turn == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return turn;
}

/* Forget what the peer has, as `Session.admit`. -1 with an error set. */
static int
drop_kept(PyObject *session, uint64_t ack)
{
    PyObject *kept = FIELD(session, _kept);
    uint64_t dropped = 0;
    while (PyObject_Size(kept) > 0) {
        PyObject *first = PySequence_GetItem(kept, 0);
        if (first == NULL)
            return -1;
        assert(PyTuple_CheckExact(first) && PyTuple_GET_SIZE(first) == 3);
        uint64_t number = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(first, 0));
        dropped += number <= ack ? PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(first, 2)) : 0;
        PyObject *gone = number <= ack ? PyObject_CallMethodNoArgs(kept, str_popleft) : NULL;
        Py_DECREF(first);
        if (gone == NULL)
            break;
        Py_DECREF(gone);
    }
    if (PyErr_Occurred())
        return -1;
    if (dropped) {
        PyObject *total = PyLong_FromUnsignedLongLong(NUMBER(session, _dropped_total) + dropped);
        if (total == NULL)
            return -1;
        put(&FIELD(session, _dropped_total), total);
    }
    return 0;
}

/* Whether a frame with this head is the next one, for somebody, and can be taken from the bytes that
 * are here; and whether nothing has to be acknowledged when it has been taken. */
static int
is_usual(PyObject *link, PyObject *session, const Head *head, Py_ssize_t have, uint64_t frames,
         uint64_t bytes)
{
    uint64_t total = head->total, seq = head->seq;
    if (head->kind < FIRST_KIND || head->kind > LAST_KIND || head->kind == HOUSEKEEPING)
        return 0;
    if (head->freed || total > NUMBER(link, _unsuspicious) || total > (uint64_t)(have - HEADER) ||
        ROW * head->count + head->note + head->meta > total)
        return 0;
    if (seq != NUMBER(session, _seen) + 1 || head->ack > NUMBER(session, _sent))
        return 0;
    return seq - NUMBER(session, _reported) < frames &&
           NUMBER(session, _seen_bytes) + total - NUMBER(session, _reported_bytes) < bytes;
}

/* Take a frame from the window; NULL without an error if it is not a usual one. */
static PyObject *
taken(PyObject *link, PyObject *session, const Py_buffer *window, uint64_t frames, uint64_t bytes)
{
    Py_ssize_t start = PyLong_AsSsize_t(FIELD(link, _start)), end = PyLong_AsSsize_t(FIELD(link, _end));
    if (start < 0 || end > window->len || end - start < HEADER)
        return NULL;
    const char *at = (const char *)window->buf + start;
    Head head = read_head(at);
    if (!is_usual(link, session, &head, end - start, frames, bytes) || PyErr_Occurred())
        return NULL;
    PyObject *frame = read_frame(&head, at);
    if (frame == NULL)
        return NULL;
    PyObject *seen = PyLong_FromUnsignedLongLong(head.seq);
    PyObject *counted = PyLong_FromUnsignedLongLong(NUMBER(session, _seen_bytes) + head.total);
    PyObject *next = PyLong_FromSsize_t(start + HEADER + (Py_ssize_t)head.total);
    if (!seen || !counted || !next || drop_kept(session, head.ack) < 0) {
        Py_XDECREF(seen);
        Py_XDECREF(counted);
        Py_XDECREF(next);
        Py_CLEAR(frame);
        return NULL;
    }
    put(&FIELD(session, _seen), seen);
    put(&FIELD(session, _seen_bytes), counted);
    put(&FIELD(link, _start), next);
    return frame;
}

static PyObject *
native_arrive(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "arrive takes a link, and how much may be owed to its peer");
        return NULL;
    }
    PyObject *link = args[0], *session = session_of(link), *frame = NULL;
    uint64_t frames = PyLong_AsUnsignedLongLong(args[1]), bytes = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_buffer window;
    if (session == NULL || FIELD(link, _large) != Py_None)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(FIELD(link, _window), &window, PyBUF_SIMPLE))
        return NULL;
    frame = taken(link, session, &window, frames, bytes);
    PyBuffer_Release(&window);
    if (frame == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return frame;
}

/* ---- The module ---- */

/* Where a slot of a class lies in its objects; 0 with an error set. */
static int
find_slot(PyObject *type, const char *name, Py_ssize_t *place)
{
    PyObject *slot = PyObject_GetAttrString(type, name);
    int found = slot != NULL && Py_IS_TYPE(slot, &PyMemberDescr_Type);
    if (found)
        *place = ((PyMemberDescrObject *)slot)->d_member->offset;
    else if (slot != NULL)
        PyErr_Format(PyExc_AttributeError, "%s is not a slot", name);
    Py_XDECREF(slot);
    return found;
}

/* Found in other modules once, and kept for as long as the process lives. */
static int
find(const char *module, const char *name, PyObject **place)
{
    PyObject *imported = PyImport_ImportModule(module);
    *place = imported ? PyObject_GetAttrString(imported, name) : NULL;
    Py_XDECREF(imported);
    return *place != NULL;
}

static int
native_exec(PyObject *module)
{
#define INTERN(name) \
    if ((str_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return -1;
    NAMES(INTERN)
    zero = PyLong_FromLong(0);
    int found = zero != NULL && find("torch", "Tensor", &tensor_type) &&
                find("torch", "strided", &strided) && find("torch", "from_numpy", &from_numpy) &&
                find("numpy", "ndarray", &array_type_of) &&
                find("telegrad.wire.layouts", "by_tensor", &by_tensor) &&
                find("telegrad.wire.layouts", "by_header", &by_header) &&
                find("telegrad.wire.names", "name_of", &name_of) &&
                find("telegrad.wire.names", "object_named", &object_named) &&
                find("telegrad.wire.torch_private", "in_dual_level", &in_dual_level) &&
                find("telegrad.wire.torch_private", "is_zero_tensor", &is_zero_tensor) &&
                find("telegrad.wire.frames", "Frame", &frame_type) &&
                find("telegrad.wire.packed", "Packed", &packed_type) &&
                find("telegrad.wire.parcel", "Parcel", &parcel_type) &&
                find("telegrad.wire.packed", "NOT_QUICK", &not_quick) &&
                find("telegrad.wire.connection", "Connection", &connection_type) &&
                find("telegrad.wire.session", "Session", &session_type);
#define FIND_IN_CONNECTION(name) && find_slot(connection_type, #name, &place_##name)
#define FIND_IN_SESSION(name) && find_slot(session_type, #name, &place_##name)
    found = found CONNECTION_FIELDS(FIND_IN_CONNECTION) SESSION_FIELDS(FIND_IN_SESSION);
    if (!found && PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_SetString(PyExc_ImportError, "it was compiled for another version of telegrad");
    return found ? 0 : -1;
}

static PyMethodDef methods[] = {
    {"pack", (PyCFunction)(void (*)(void))native_pack, METH_FASTCALL,
     "pack(obj, trust): the message, or None if it is not of a quick form"},
    {"unpack", (PyCFunction)(void (*)(void))native_unpack, METH_FASTCALL,
     "unpack(meta, buffers, trust, limits, arrive): what it holds, or NOT_QUICK"},
    {"frame", (PyCFunction)(void (*)(void))native_frame, METH_FASTCALL,
     "frame(kind, call_id, note, meta, buffers, seq, ack): the bytes of a frame"},
    {"depart", (PyCFunction)(void (*)(void))native_depart, METH_FASTCALL,
     "depart(link, kind, call_id, note, meta, buffers, most): what is to be written, or None"},
    {"arrive", (PyCFunction)(void (*)(void))native_arrive, METH_FASTCALL,
     "arrive(link, frames, bytes): the next frame, or None"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, native_exec}, {0, NULL}};

static struct PyModuleDef native = {
    PyModuleDef_HEAD_INIT, "telegrad.wire._native", "Short cuts of the codec, of frames and of links.", 0,
    methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&native);
}
