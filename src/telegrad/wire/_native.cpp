/* Short cuts for the messages that nearly all traffic consists of, in the form of all others.
 *
 * Half of the instructions that the interpreter ran for a small message were those of its codec and
 * of its frame: a few bytes moved by hundreds of steps. Here they are moved by C++. What a tensor is
 * stands in torch's own objects, so nothing is asked by way of Python's attributes.
 *
 *   pack, unpack    a call of a function with a few tensors, a tensor, None, and a parcel with a
 *                   few tensors: the bytes that `encode` and `tensors` would write
 *   depart          a frame whose buffers are inline or in shared memory, numbered, kept and written,
 *                   as `Sending.send` does it
 *   arrive          such a frame, read if none is here yet, as `Receiving.receive` does it
 *
 * What is not of such a form, or looks wrong in any way, is left to the Python code: `unpack` then
 * gives NOT_QUICK, and all others give None, with nothing done that Python would not
 * have done and go on from. So this file need not be built: small messages only take longer then.
 *
 * Bytes are written and read here only for a stream that is a `PlainStream` in all that it does. The
 * calls of the system are those that it makes, with the interpreter let go where it lets go of it:
 * then all that others may change is looked at again. No signal is handled here: the handler runs
 * when Python goes on, as after every other step.
 *
 * What must never happen: that a byte is read outside of the message or of a tensor's storage. All
 * numbers that a message holds are compared with what is left of it before they are used. And what
 * is called here may run any code, which may change every list and every tensor that others know
 * of: what is walked through is a tuple, or a list that nobody else has, and what was found out
 * about a tensor is used, or written down, before anything is called. No exception of torch's leaves
 * this file: where one may be thrown it is caught, and Python is told or the long way taken.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <sys/socket.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <string_view>
#include <utility>

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/Storage.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../native.h"

#if PY_BIG_ENDIAN
#error "Numbers on the wire are little-endian, and are moved here as they lie."
#endif

enum { FEW = 4, SHORT = 255, SMALL = 1 << 13, REQUIRES_GRAD = 1 };
enum { TAG_NONE = 0, TAG_TUPLE = 13, TAG_DICT = 17, TAG_TENSOR = 29, TAG_NAMED = 30, TAG_PARCEL = 39 };
enum { HEADER = 52, ROW = 16, SLOT = 8, MOST_FREED = 512, FIRST_KIND = 1, HOUSEKEEPING = 5, LAST_KIND = 6 };
/* Numpy, by which the long way goes, ended here once. */
enum { MOST_DIMS = 32 };
#define INLINE UINT64_MAX
/* Places below this one are offsets in shared memory. */
#define SPLIT (UINT64_C(1) << 62)

/* Of other modules, found when this one is imported. */
static PyObject *tensor_type, *parcel_type, *packed_type, *frame_type, *forward_ad;
static PyObject *name_of, *object_named, *known_names, *trust_in_code, *not_quick, *zero, *never;
static PyObject *stream_type, *try_send, *recv_into, *try_recv_into;
/* Made here. */
static PyObject *memory_type;

#define NAMES(X) \
    X(_current_level) X(tensors) X(dims) X(items) X(depth) \
    X(__self__) X(B) X(acquire) X(release) X(append) X(popleft) X(meta) X(__spec__) X(_initializing) \
    X(try_send) X(recv_into) X(try_recv_into) X(fileno) X(wait) X(sleep_for) X(crowd) X(awaited) X(loss) \
    X(_socket) X(_lookout) X(_shared) X(_release) X(appendleft)
#define DECLARE(name) static PyObject *str_##name;
NAMES(DECLARE)

/* A reference that is given back at the end of its block. */
class Ref {
  public:
    Ref() = default;
    explicit Ref(PyObject *owned) : object_(owned) {}
    Ref(Ref &&other) noexcept : object_(other.release()) {}
    Ref(const Ref &) = delete;
    Ref &operator=(const Ref &) = delete;
    Ref &
    operator=(Ref &&other) noexcept
    {
        PyObject *old = std::exchange(object_, other.release());
        Py_XDECREF(old);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    static Ref to(PyObject *borrowed) { return Ref(Py_XNewRef(borrowed)); }
    PyObject *get() const { return object_; }
    PyObject *release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject *object_ = nullptr;
};

/* Bytes of others, which stay where they are until the end of the block. */
class View {
  public:
    View() = default;
    View(const View &) = delete;
    View &operator=(const View &) = delete;
    ~View()
    {
        if (held_)
            PyBuffer_Release(&buffer_);
    }

    /* False with an error set. */
    bool
    hold(PyObject *object, int flags)
    {
        held_ = PyObject_GetBuffer(object, &buffer_, flags) == 0;
        return held_;
    }
    char *start() const { return static_cast<char *>(buffer_.buf); }
    Py_ssize_t size() const { return buffer_.len; }

  private:
    Py_buffer buffer_;
    bool held_ = false;
};

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

/* A named tuple, without the Python function that it has for being made. Takes the references. */
static PyObject *
named_tuple(PyObject *type, Py_ssize_t count, PyObject **fields)
{
    PyTypeObject *made = (PyTypeObject *)type;
    PyObject *tuple = NULL;
    Py_ssize_t at = 0;
    int whole = 1;
    for (Py_ssize_t i = 0; i < count; i++)
        whole = whole && fields[i] != NULL;
    if (whole)
        tuple = made->tp_alloc(made, count);
    if (tuple != NULL)
        for (; at < count; at++)
            PyTuple_SET_ITEM(tuple, at, fields[at]);
    for (; at < count; at++)
        Py_XDECREF(fields[at]);
    return tuple;
}

/* ---- Tensors ---- */

/* The number on the wire of the dtypes whose tensors may be whole records (`layouts.CASTABLE`), and
 * the way back; -1 and Undefined for all others. */
static int code_of[static_cast<int>(at::ScalarType::NumOptions)];
static at::ScalarType type_of[256];

/* Of dense tensors on the CPU, with autograd and, if made in inference mode, without. What is
 * anything else besides has more of them: a transform's, a lazy negative, a zero without memory, a
 * sparse, nested or functional one. */
static c10::DispatchKeySet plain_keys, inference_keys;
static constexpr c10::DispatchKeySet dense_key(c10::DispatchKey::CPU);

/* What is told of one tensor. */
struct Sent {
    Ref buffer;
    const void *storage;
    char requires_grad;
    Py_ssize_t length;
    char header[2 + 8 * MOST_DIMS];
};

/* The memory of a tensor of some size, as the program sees it, so that it is sent without a copy. The
 * storage is kept and may not be resized, as where numpy looks at a tensor. What moves a storage all
 * the same (`share_memory_`) must not be called before the tensor has left; see `Borrowed`. */
struct Memory {
    PyObject_HEAD
    c10::Storage storage;
    char *start;
    Py_ssize_t size;
};

static int
memory_shown(PyObject *memory, Py_buffer *view, int flags)
{
    Memory *shown = (Memory *)memory;
    return PyBuffer_FillInfo(view, memory, shown->start, shown->size, 0, flags);
}

static void
memory_freed(PyObject *memory)
{
    PyTypeObject *type = Py_TYPE(memory);
    ((Memory *)memory)->storage.~Storage();
    type->tp_free(memory);
    Py_DECREF(type);
}

static PyType_Slot memory_slots[] = {
    {Py_tp_dealloc, (void *)memory_freed}, {Py_bf_getbuffer, (void *)memory_shown}, {0, NULL}};

static PyType_Spec memory_spec = {
    "telegrad.wire._native.Memory", sizeof(Memory), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, memory_slots};

static Ref
view_of(const c10::Storage &storage, char *start, Py_ssize_t nbytes)
{
    Ref memory(((PyTypeObject *)memory_type)->tp_alloc((PyTypeObject *)memory_type, 0));
    if (!memory)
        return Ref();
    Memory *made = (Memory *)memory.get();
    new (&made->storage) c10::Storage(storage);
    made->storage.unsafeGetStorageImpl()->set_resizable(false);
    made->start = start;
    made->size = nbytes;
    return Ref(PyMemoryView_FromObject(memory.get()));
}

static Ref
copy_of(const char *address, Py_ssize_t nbytes)
{
    Ref copy(PyBytes_FromStringAndSize(address, nbytes));
    return Ref(copy ? PyMemoryView_FromObject(copy.get()) : NULL);
}

/* The bytes of its elements, if the tensor is contiguous as `layouts` has it (dimensions of one
 * element as well) and not empty, and its storage holds it; else -1. Writes its layout to `sent`.
 * May throw. */
static int64_t
laid_out(const c10::TensorImpl &tensor, Sent *sent)
{
    int code = code_of[static_cast<int>(c10::typeMetaToScalarType(tensor.dtype()))];
    c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
    if (code < 0 || sizes.size() > MOST_DIMS || !tensor.has_storage())
        return -1;
    int64_t count = 1, nbytes, end, item = static_cast<int64_t>(tensor.itemsize());
    for (size_t i = sizes.size(); i-- > 0;)
        if (sizes[i] <= 0 || strides[i] != count || __builtin_mul_overflow(count, sizes[i], &count))
            return -1;
    if (__builtin_mul_overflow(count, item, &nbytes) ||
        __builtin_mul_overflow(tensor.storage_offset(), item, &end) ||
        __builtin_add_overflow(end, nbytes, &end) ||
        end > static_cast<int64_t>(tensor.storage().nbytes()))
        return -1;
    sent->header[0] = static_cast<char>(code);
    sent->header[1] = static_cast<char>(sizes.size());
    memcpy(sent->header + 2, sizes.data(), 8 * sizes.size());
    sent->length = static_cast<Py_ssize_t>(2 + 8 * sizes.size());
    return nbytes;
}

/* 1 if the tensor is of the usual kind, 0 if not, -1 with an error set. */
static int
describe(PyObject *tensor, Sent *sent)
{
    if ((PyObject *)Py_TYPE(tensor) != tensor_type)
        return 0;
    int64_t nbytes;
    try {
        const c10::TensorImpl &found = *THPVariable_Unpack(tensor).unsafeGetTensorImpl();
        c10::DispatchKeySet keys = found.key_set();
        if (keys != plain_keys && keys != inference_keys)
            return 0;
        if ((nbytes = laid_out(found, sent)) < 0)
            return 0;
        /* As `data_ptr` does it: a copy that was put off is made, what must not be seen throws. */
        char *start = static_cast<char *>(found.storage().mutable_data());
        if (start == NULL)
            return 0;
        sent->storage = start;
        sent->requires_grad = found.requires_grad();
        start += found.storage_offset() * static_cast<int64_t>(found.itemsize());
        sent->buffer = nbytes <= SMALL ? copy_of(start, nbytes) : view_of(found.storage(), start, nbytes);
    }
    catch (const std::exception &) {
        /* It looks like others and has no memory. */
        return 0;
    }
    return sent->buffer ? 1 : -1;
}

/* Whether tensors may have tangents, as `torch_private.in_dual_level`; -1 with an error set. */
static int
in_dual_level(void)
{
    Ref level(PyObject_GetAttr(forward_ad, str__current_level));
    return level ? PyObject_RichCompareBool(level.get(), zero, Py_GE) : -1;
}

/* Keeps the memory of a tensor that was made over a buffer. Any thread may let go of it, and some
 * do when Python has ended: then it ends with the process. */
static void
let_go(void *kept)
{
    if (!Py_IsInitialized())
        return;
    PyGILState_STATE state = PyGILState_Ensure();
    PyBuffer_Release(static_cast<Py_buffer *>(kept));
    PyGILState_Release(state);
    delete static_cast<Py_buffer *>(kept);
}

/* What a message says of one tensor. */
struct Announced {
    at::ScalarType type;
    int requires_grad;
    int64_t nbytes;
    size_t dims;
    int64_t sizes[MOST_DIMS];
};

/* The memory of a buffer, if it can be written to and is of this size. May throw. */
static c10::DataPtr
memory_of(PyObject *buffer, int64_t nbytes)
{
    auto view = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(buffer, view.get(), PyBUF_WRITABLE))
        return {};
    void *start = view->buf;
    Py_ssize_t size = view->len;
    c10::DataPtr memory(start, view.release(), let_go, c10::Device(c10::kCPU));
    return size == nbytes ? std::move(memory) : c10::DataPtr();
}

/* A tensor over the buffer, as `torch.from_numpy` makes it; NULL, perhaps without an error, if the
 * long way has to say what is wrong with it. */
static PyObject *
made_tensor(const Announced &announced, PyObject *buffer)
{
    try {
        c10::DataPtr memory = memory_of(buffer, announced.nbytes);
        if (!memory.get())
            return NULL;
        c10::Storage storage(c10::Storage::use_byte_size_t(), announced.nbytes, std::move(memory),
                             /*allocator=*/nullptr, /*resizable=*/false);
        at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
            std::move(storage), dense_key, c10::scalarTypeToTypeMeta(announced.type));
        tensor.unsafeGetTensorImpl()->set_sizes_contiguous({announced.sizes, announced.dims});
        if (announced.requires_grad) {
            /* As `requires_grad_` asks: not inside of a transform. */
            if (const auto &transforms = at::functorch::functorchTLSAccessor())
                transforms->checkSupportsInplaceRequiresGrad();
            tensor.set_requires_grad(true);
        }
        return THPVariable_Wrap(std::move(tensor));
    }
    catch (const std::exception &) {
        return NULL;
    }
}

/* ---- Packing ---- */

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
    Ref owner(PyObject_GetAttr(target, str___self__));
    if (!owner)
        return -1;
    return owner.get() == Py_None || PyModule_Check(owner.get()) || PyType_Check(owner.get());
}

/* Its name, as `names.name_of` tells it. */
static Ref
named(PyObject *target, PyObject *trust)
{
    if (trust == trust_in_code) {
        Ref reference(PyWeakref_NewRef(target, NULL));
        PyObject *name = reference ? PyDict_GetItemWithError(known_names, reference.get()) : NULL;
        if (name != NULL)
            return Ref::to(name);
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError))
            return Ref();
        PyErr_Clear();
    }
    return Ref(PyObject_CallFunctionObjArgs(name_of, target, trust, NULL));
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
        size += 1 + sent[i].length;
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
        *at++ = sent[i].requires_grad ? REQUIRES_GRAD : 0;
        memcpy(at, sent[i].header, (size_t)sent[i].length);
        at += sent[i].length;
    }
    at = put_tree(at, name, data, count);
    _PyBytes_Resize(&meta, at - start);
    return meta;
}

/* `tensors` is a tuple of at most FEW. `name` and `data` are those of `put_tree`. */
static PyObject *
packed(PyObject *tensors, PyObject *name, PyObject *data)
{
    Py_ssize_t count = PyTuple_GET_SIZE(tensors);
    Sent sent[FEW];
    int usual = count ? in_dual_level() : 0;
    if (usual < 0)
        return NULL;
    usual = !usual;
    for (Py_ssize_t i = 0; usual > 0 && i < count; i++)
        usual = describe(PyTuple_GET_ITEM(tensors, i), &sent[i]);
    if (usual < 0) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            return NULL;
        PyErr_Clear();
        usual = 0;
    }
    if (!usual || !lie_apart(sent, count))
        Py_RETURN_NONE;
    Ref buffers(PyList_New(count));
    for (Py_ssize_t i = 0; buffers && i < count; i++)
        PyList_SET_ITEM(buffers.get(), i, sent[i].buffer.release());
    PyObject *fields[4] = {
        written(sent, count, name, data), PySequence_List(tensors), buffers.release(), Py_NewRef(zero)};
    return named_tuple(packed_type, 4, fields);
}

static PyObject *
pack_call(PyObject *call, PyObject *trust)
{
    PyObject *target = PyTuple_GET_ITEM(call, 0), *tensors = PyTuple_GET_ITEM(call, 1);
    PyObject *kwargs = PyTuple_GET_ITEM(call, 2);
    if (!PyTuple_CheckExact(tensors) || PyTuple_GET_SIZE(tensors) > FEW ||
        !PyDict_CheckExact(kwargs) || PyDict_GET_SIZE(kwargs))
        Py_RETURN_NONE;
    int has_one = has_a_name(target);
    if (has_one <= 0)
        return has_one < 0 ? NULL : Py_NewRef(Py_None);
    Ref name = named(target, trust);
    if (!name)
        return NULL;
    return is_short(name.get()) ? packed(tensors, name.get(), NULL) : Py_NewRef(Py_None);
}

static PyObject *
pack_parcel(PyObject *parcel)
{
    PyObject *topic = PyTuple_GET_ITEM(parcel, 0), *data = PyTuple_GET_ITEM(parcel, 1);
    if (!is_short(topic) || !PyBytes_CheckExact(data) || PyBytes_GET_SIZE(data) > SMALL)
        Py_RETURN_NONE;
    Ref tensors(PySequence_Tuple(PyTuple_GET_ITEM(parcel, 2)));
    if (!tensors)
        return NULL;
    return PyTuple_GET_SIZE(tensors.get()) <= FEW ? packed(tensors.get(), topic, data)
                                                  : Py_NewRef(Py_None);
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
        Ref alone(PyTuple_Pack(1, obj));
        return alone ? packed(alone.get(), NULL, NULL) : NULL;
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

/* Whether a limit allows for so many: 1, 0, or -1 with an error set. */
static int
within(PyObject *limits, PyObject *name, Py_ssize_t needed)
{
    Ref limit(PyObject_GetAttr(limits, name)), number(PyLong_FromSsize_t(needed));
    return limit && number ? PyObject_RichCompareBool(limit.get(), number.get(), Py_GE) : -1;
}

/* Read the record at `*at` and compare it with its buffer: 1, 0 if it is not usual, -1 for an
 * error. */
static int
read_record(const unsigned char *data, Py_ssize_t size, Py_ssize_t *at, PyObject *limits,
            PyObject *buffer, Announced *announced)
{
    Py_ssize_t start = *at + 3;
    if (start > size)
        return 0;
    unsigned char flags = data[*at], code = data[*at + 1], dims = data[*at + 2];
    Py_ssize_t end = start + 8 * dims;
    /* Those with strides have a higher bit there. */
    if (flags > REQUIRES_GRAD || dims > MOST_DIMS || end > size)
        return 0;
    int truth = within(limits, str_dims, dims);
    if (truth <= 0)
        return truth;
    at::ScalarType type = announced->type = type_of[code];
    if (type == at::ScalarType::Undefined || (flags && !c10::isFloatingType(type)))
        return 0;
    announced->requires_grad = flags;
    announced->dims = dims;
    memcpy(announced->sizes, data + start, 8 * (size_t)dims);
    int64_t nbytes = (int64_t)c10::elementSize(type);
    for (int i = 0; i < dims; i++)
        if (announced->sizes[i] <= 0 || __builtin_mul_overflow(nbytes, announced->sizes[i], &nbytes))
            return 0;
    announced->nbytes = nbytes;
    Py_ssize_t length = PyObject_Size(buffer);
    if (length < 0)
        return -1;
    *at = end;
    return nbytes == length;
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

/* What an attribute is, if there is one; else empty without an error, unless it is one that no
 * attribute should cause. */
static Ref
attribute(PyObject *object, PyObject *name)
{
    Ref found(name ? PyObject_GetAttr(object, name) : NULL);
    if (!found && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    return found;
}

/* A module that was imported to its end; else empty, as by `attribute`. */
static Ref
module_named(const char *text, Py_ssize_t size)
{
    Ref name(PyUnicode_DecodeASCII(text, size, NULL));
    Ref module(name ? PyImport_GetModule(name.get()) : NULL);
    if (!module || module.get() == Py_None)
        return Ref();
    Ref spec = attribute(module.get(), str___spec__);
    Ref begun = spec ? attribute(spec.get(), str__initializing) : Ref();
    if (PyErr_Occurred() || (begun && begun.get() != Py_False))
        return Ref();
    return module;
}

/* What a name stands for, as `names.object_named` finds it: by its module's attributes, each time
 * anew. What is not found so is looked for by that, or refused. */
static Ref
object_of(const char *text, Py_ssize_t size, PyObject *trust)
{
    const char *end = text + size;
    const char *colon = static_cast<const char *>(memchr(text, ':', (size_t)size));
    /* `torch.ops` is no module that could be imported. */
    if (trust == trust_in_code && colon && std::string_view(text, colon) != "torch.ops") {
        Ref found = module_named(text, colon - text);
        for (const char *at = colon + 1, *dot; found && at <= end; at = dot + 1) {
            dot = std::find(at, end, '.');
            Ref name(PyUnicode_DecodeASCII(at, dot - at, NULL));
            found = attribute(found.get(), name.get());
        }
        if (found || PyErr_Occurred())
            return found;
    }
    Ref name(PyUnicode_DecodeASCII(text, size, NULL));
    return Ref(name ? PyObject_CallFunctionObjArgs(object_named, name.get(), trust, NULL) : NULL);
}

/* What is made of a whole message; `target` is its function, or its topic. */
static PyObject *
unpacked(int form, Ref target, PyObject *tensors, PyObject *data, Py_ssize_t end)
{
    if (form == TAG_NONE)
        Py_RETURN_NONE;
    if (form == TAG_TENSOR)
        return PySequence_GetItem(tensors, 0);
    if (form == TAG_PARCEL) {
        PyObject *fields[3] = {
            target.release(),
            PyBytes_FromStringAndSize(PyBytes_AS_STRING(data) + end, PyBytes_GET_SIZE(data) - end),
            Py_NewRef(tensors)};
        return named_tuple(parcel_type, 3, fields);
    }
    Ref arguments(PySequence_Tuple(tensors)), kwargs(PyDict_New());
    if (!arguments || !kwargs)
        return NULL;
    return PyTuple_Pack(3, target.get(), arguments.get(), kwargs.get());
}

/* What a message is and where its text lies, with all of its records read: the first tag of its
 * tree, -1 if it is not of a quick form, -2 with an error set. */
static int
read_message(PyObject *message, PyObject *buffers, PyObject *limits, Announced *announced,
             Py_ssize_t *text, Py_ssize_t *end)
{
    const unsigned char *data = (const unsigned char *)PyBytes_AS_STRING(message);
    Py_ssize_t size = PyBytes_GET_SIZE(message), at = 2, count = PyTuple_GET_SIZE(buffers);
    if (size < 3 || count > FEW || data[0] != count || data[1])
        return -1;
    int going = within(limits, str_meta, size);
    if (going <= 0)
        return going - 1;
    /* All that is so short is None. */
    if (size == 3)
        return count == 0 && data[2] == TAG_NONE ? TAG_NONE : -1;
    going = within(limits, str_tensors, count);
    for (Py_ssize_t i = 0; going > 0 && i < count; i++)
        going = read_record(data, size, &at, limits, PyTuple_GET_ITEM(buffers, i), &announced[i]);
    if (going <= 0)
        return going - 1;
    int form = read_tree(data, size, at, count, text, end);
    if (form == TAG_TUPLE) {
        going = within(limits, str_items, 3 + count);
        if (going > 0)
            going = within(limits, str_depth, 2);
        if (going <= 0)
            return going - 1;
    }
    return form;
}

static PyObject *
native_unpack(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5) {
        PyErr_SetString(PyExc_TypeError, "unpack takes bytes, buffers, a trust, limits, a function");
        return NULL;
    }
    /* What is made in that mode is not what arrives otherwise. */
    if (!PyBytes_CheckExact(args[0]) || c10::InferenceMode::is_enabled())
        return Py_NewRef(not_quick);
    PyObject *message = args[0], *trust = args[2], *limits = args[3], *arrive = args[4];
    Ref buffers(PySequence_Tuple(args[1]));
    if (!buffers)
        return NULL;
    Py_ssize_t text = 0, end = 0;
    Announced announced[FEW];
    int form = read_message(message, buffers.get(), limits, announced, &text, &end);
    if (form < 0)
        return form == -1 ? Py_NewRef(not_quick) : NULL;
    Ref target;
    if (form == TAG_TUPLE || form == TAG_PARCEL) {
        const char *start = PyBytes_AS_STRING(message) + text;
        target = form == TAG_TUPLE ? object_of(start, end - text, trust)
                                   : Ref(PyUnicode_DecodeASCII(start, end - text, NULL));
        if (!target)
            return NULL;
    }
    Ref tensors(PyList_New(0));
    if (!tensors)
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(buffers.get()); i++) {
        Ref tensor(made_tensor(announced[i], PyTuple_GET_ITEM(buffers.get(), i)));
        if (!tensor && (!PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_Exception))) {
            /* The long way says what is wrong with it. */
            PyErr_Clear();
            return Py_NewRef(not_quick);
        }
        if (!tensor || PyList_Append(tensors.get(), tensor.get()) < 0)
            return NULL;
    }
    if (arrive != Py_None) {
        tensors = Ref(PyObject_CallOneArg(arrive, tensors.get()));
        if (!tensors)
            return NULL;
    }
    return unpacked(form, std::move(target), tensors.get(), message, end);
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

/* Slots of shared memory that a frame gives back. They are taken from where they wait, and put there
 * again if it does not leave. */
class Freed {
  public:
    Freed() = default;
    Freed(const Freed &) = delete;
    Freed &operator=(const Freed &) = delete;
    ~Freed()
    {
        if (left_ || !count_)
            return;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        while (count_) {
            Ref offset(PyLong_FromUnsignedLongLong(offsets_[--count_]));
            Ref done(offset ? PyObject_CallMethodOneArg(waiting_.get(), str_appendleft, offset.get()) : NULL);
        }
        PyErr_Restore(type, value, trace);
    }

    /* As many as there is room for in a frame. False with an error set. */
    bool
    take(PyObject *waiting, Py_ssize_t room)
    {
        waiting_ = Ref::to(waiting);
        Py_ssize_t most = std::min<Py_ssize_t>(MOST_FREED, room / SLOT);
        while (count_ < most && PyObject_Size(waiting) > 0) {
            Ref offset(PyObject_CallMethodNoArgs(waiting, str_popleft));
            if (!offset)
                return false;
            offsets_[count_] = PyLong_AsUnsignedLongLong(offset.get());
            if (PyErr_Occurred())
                return false;
            count_++;
        }
        return !PyErr_Occurred();
    }
    /* The frame leaves. */
    void leave() { left_ = true; }
    Py_ssize_t count() const { return count_; }
    uint64_t operator[](Py_ssize_t i) const { return offsets_[i]; }

  private:
    Ref waiting_;
    Py_ssize_t count_ = 0;
    bool left_ = false;
    uint64_t offsets_[MOST_FREED];
};

/* What is to be sent, and where its buffers go: the rows of the table, or NULL if all are inline. */
struct Message {
    PyObject *const *parts; /* kind, call id, note, meta, the buffers that are inline */
    PyObject *rows;
};

/* The bytes of a frame, which gives back what waits for that. NULL without an error if it is as long as
 * `most` or longer. */
static PyObject *
made_frame(const Message &message, PyObject *waiting, Freed &freed, uint64_t seq, uint64_t ack,
           Py_ssize_t most)
{
    PyObject *const *parts = message.parts;
    long kind = PyLong_AsLong(parts[0]);
    uint64_t call_id = PyLong_AsUnsignedLongLong(parts[1]);
    Ref buffers(PyErr_Occurred() ? NULL : PySequence_Tuple(parts[4]));
    Ref rows(buffers && message.rows ? PySequence_Tuple(message.rows) : NULL);
    if (!buffers || (message.rows && !rows))
        return NULL;
    /* Note and meta come first, and then the buffers. */
    Py_ssize_t count = PyTuple_GET_SIZE(buffers.get());
    Py_ssize_t listed = rows ? PyTuple_GET_SIZE(rows.get()) / 2 : count;
    Py_ssize_t total = ROW * listed;
    View few[2 + FEW], *views = few;
    std::unique_ptr<View[]> many;
    if (count > FEW) {
        many.reset(new (std::nothrow) View[2 + (size_t)count]);
        if (!(views = many.get()))
            return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < 2 + count; i++) {
        PyObject *part = i < 2 ? parts[2 + i] : PyTuple_GET_ITEM(buffers.get(), i - 2);
        if (!views[i].hold(part, PyBUF_SIMPLE))
            return NULL;
        total += views[i].size();
    }
    if (total >= most || !freed.take(waiting, most - 1 - total))
        return NULL;
    total += SLOT * freed.count();
    if (kind < 0 || kind > UINT8_MAX || views[0].size() > UINT32_MAX || views[1].size() > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a frame has more to say than fits its header");
        return NULL;
    }
    Ref frame(PyBytes_FromStringAndSize(NULL, HEADER + total));
    if (!frame)
        return NULL;
    char *at = PyBytes_AS_STRING(frame.get());
    memset(at, 0, 4);
    at[0] = (char)kind;
    put_u32(at + 4, views[0].size());
    put_u32(at + 8, listed);
    put_u32(at + 12, freed.count());
    put_u32(at + 16, views[1].size());
    put_u64(at + 20, (uint64_t)total);
    put_u64(at + 28, seq);
    put_u64(at + 36, ack);
    put_u64(at + 44, call_id);
    at += HEADER;
    for (Py_ssize_t i = 0; i < listed; i++, at += ROW) {
        uint64_t size, place = INLINE;
        if (!rows)
            size = (uint64_t)views[2 + i].size();
        else {
            size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(rows.get(), 2 * i));
            place = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(rows.get(), 2 * i + 1));
        }
        put_u64(at, size);
        put_u64(at + 8, place);
    }
    for (Py_ssize_t i = 0; i < freed.count(); i++, at += SLOT)
        put_u64(at, freed[i]);
    for (Py_ssize_t i = 0; i < 2 + count; i++) {
        memcpy(at, views[i].start(), (size_t)views[i].size());
        at += views[i].size();
    }
    return PyErr_Occurred() ? NULL : frame.release();
}

/* What the header of a frame says. */
struct Head {
    int kind;
    uint64_t note, count, freed, meta, total, seq, ack, call_id;
};

static Head
read_head(const char *at)
{
    return {(unsigned char)at[0], get_u32(at + 4),  get_u32(at + 8),
            get_u32(at + 12),     get_u32(at + 16), get_u64(at + 20),
            get_u64(at + 28),     get_u64(at + 36), get_u64(at + 44)};
}

/* ---- Links ---- */

/* Where the fields of a connection and of its session lie, which are slots of their classes. */
#define CONNECTION_FIELDS(X) \
    X(closed) X(broken) X(freed) X(_freed_since) X(session) X(stream) X(sent_bytes) X(received_bytes) \
    X(_view) X(_lock) X(_queue) X(_writing) X(_awaiting) X(_overdue) X(_ticket) X(_tickets_written) \
    X(_window) X(_start) X(_end) X(_large) X(_unsuspicious) X(_patience)
#define SESSION_FIELDS(X) \
    X(_sent) X(_kept) X(_last_kept) X(_kept_total) X(_dropped_total) X(_seen) X(_seen_bytes) \
    X(_reported) X(_reported_bytes)
#define PLACE(name) static Py_ssize_t place_##name;
CONNECTION_FIELDS(PLACE)
SESSION_FIELDS(PLACE)
#define FIELD(object, name) (*(PyObject **)((char *)(object) + place_##name))

static PyObject *connection_type, *session_type;

/* The session of a link all of whose fields are there; empty without an error if that is not so. */
static Ref
session_of(PyObject *link)
{
    if (!PyObject_TypeCheck(link, (PyTypeObject *)connection_type)) {
        PyErr_SetString(PyExc_TypeError, "that is not a link");
        return Ref();
    }
#define IS_THERE(name) && FIELD(object, name) != NULL
    PyObject *object = link;
    if (!(1 CONNECTION_FIELDS(IS_THERE)))
        return Ref();
    object = FIELD(link, session);
    if (!PyObject_TypeCheck(object, (PyTypeObject *)session_type) || !(1 SESSION_FIELDS(IS_THERE)))
        return Ref();
    return Ref::to(object);
}

#define NUMBER(object, name) PyLong_AsUnsignedLongLong(FIELD(object, name))

/* Only for numbers and truth: nothing runs when one goes. Takes the reference. */
static void
put(PyObject **field, PyObject *value)
{
    PyObject *old = *field;
    *field = value;
    Py_XDECREF(old);
}

/* Whether who sends now becomes the writer, of what it sends alone. With the lock held. */
static int
is_free(PyObject *link)
{
    return FIELD(link, closed) == Py_False && FIELD(link, broken) == Py_False &&
           FIELD(link, _writing) == Py_False && PyObject_Size(FIELD(link, _queue)) == 0;
}

/* Number a frame and keep it; what is to be written, or NULL, without an error if it is too long.
 * With the lock held. All that may fail comes first: a number that is given and not kept ends the
 * session. */
static PyObject *
stamped(PyObject *link, PyObject *session, const Message &message, Py_ssize_t most)
{
    uint64_t seq = NUMBER(session, _sent) + 1, kept = NUMBER(session, _kept_total);
    uint64_t ticket = NUMBER(link, _ticket) + 1, sent = NUMBER(link, sent_bytes);
    /* The bytes are read before the number, as in `Session.stamp`. */
    Ref seen_bytes = Ref::to(FIELD(session, _seen_bytes));
    Ref seen = Ref::to(FIELD(session, _seen));
    uint64_t ack = PyLong_AsUnsignedLongLong(seen.get());
    Freed freed;
    Ref whole(PyErr_Occurred() ? NULL
                               : made_frame(message, FIELD(link, freed), freed, seq, ack, most));
    if (!whole)
        return NULL;
    uint64_t size = (uint64_t)PyBytes_GET_SIZE(whole.get());
    Ref entry(Py_BuildValue("(KOK)", seq, whole.get(), size - HEADER));
    Ref turn(Py_BuildValue("([O]KK)", whole.get(), size, ticket));
    Ref kept_total(PyLong_FromUnsignedLongLong(kept + size - HEADER));
    Ref sent_total(PyLong_FromUnsignedLongLong(sent + size));
    if (!entry || !turn || !kept_total || !sent_total)
        return NULL;
    Ref added(PyObject_CallMethodOneArg(FIELD(session, _kept), str_append, entry.get()));
    if (!added)
        return NULL;
    freed.leave();
    if (freed.count() && PyObject_Size(FIELD(link, freed)) == 0)
        put(&FIELD(link, _freed_since), Py_NewRef(never));
    put(&FIELD(session, _sent), Py_NewRef(PyTuple_GET_ITEM(entry.get(), 0)));
    put(&FIELD(session, _last_kept), Py_NewRef(PyTuple_GET_ITEM(entry.get(), 0)));
    put(&FIELD(session, _kept_total), kept_total.release());
    put(&FIELD(session, _reported_bytes), seen_bytes.release());
    put(&FIELD(session, _reported), seen.release());
    put(&FIELD(link, _ticket), Py_NewRef(PyTuple_GET_ITEM(turn.get(), 2)));
    put(&FIELD(link, sent_bytes), sent_total.release());
    put(&FIELD(link, _writing), Py_NewRef(Py_True));
    return turn.release();
}

/* The lock of a link, if nobody has it: who would have to wait for it goes the long way. */
class Lock {
  public:
    explicit Lock(PyObject *link) : lock_(Ref::to(FIELD(link, _lock)))
    {
        held_ = is_true(PyObject_CallMethodOneArg(lock_.get(), str_acquire, Py_False)) > 0;
    }
    Lock(const Lock &) = delete;
    Lock &operator=(const Lock &) = delete;
    ~Lock()
    {
        if (!held_)
            return;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Ref released(PyObject_CallMethodNoArgs(lock_.get(), str_release));
        PyErr_Restore(type, value, trace);
    }
    explicit operator bool() const { return held_; }

  private:
    Ref lock_;
    bool held_;
};

/* Whether an object does that as its class was written to. A test, or a fault that is tried, may
 * have put something else there: in the class or in the object. */
static int
does_as_written(PyObject *object, PyObject *name, PyObject *function)
{
    Ref method = attribute(object, name);
    return method && PyMethod_Check(method.get()) && PyMethod_GET_FUNCTION(method.get()) == function;
}

/* The descriptor of a plain stream; -1, perhaps with an error set. Whoever has the stream has it
 * open. */
static int
descriptor_of(PyObject *stream)
{
    Ref socket(PyObject_GetAttr(stream, str__socket));
    Ref number(socket ? PyObject_CallMethodNoArgs(socket.get(), str_fileno) : NULL);
    return number ? (int)PyLong_AsLong(number.get()) : -1;
}

/* Whether threads wait for what comes by a stream, beside the one that reads; -1 with an error set. */
static int
has_crowd(PyObject *stream)
{
    return is_true(PyObject_GetAttr(stream, str_crowd));
}

/* Why a stream has ended, as it says it itself. Python finds that it has when it goes on. */
static void
note_loss(PyObject *stream, int number)
{
    errno = number;
    PyErr_SetFromErrno(PyExc_OSError);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Ref owned[3] = {Ref(type), Ref(value), Ref(trace)};
    if (value != NULL)
        PyObject_SetAttr(stream, str_loss, value);
}

static constexpr Py_ssize_t ENDED = -1, LEFT_TO_PYTHON = -2, NOTHING_CAME = -3;

/* As `PlainStream.try_send`: how much of these bytes was written, or one of the above. With an
 * error set only if it is LEFT_TO_PYTHON. */
static Py_ssize_t
written_now(PyObject *stream, PyObject *bytes)
{
    if ((PyObject *)Py_TYPE(stream) != stream_type ||
        !does_as_written(stream, str_try_send, try_send))
        return LEFT_TO_PYTHON;
    int descriptor = descriptor_of(stream);
    if (descriptor < 0)
        return LEFT_TO_PYTHON;
    int crowd = has_crowd(stream);
    if (crowd < 0)
        return LEFT_TO_PYTHON;
    const char *start = PyBytes_AS_STRING(bytes);
    size_t size = (size_t)PyBytes_GET_SIZE(bytes);
    constexpr int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    ssize_t sent;
    int number;
    if (crowd && size < SMALL) {
        /* Others wait for the interpreter, and having it back from them would take longer. */
        sent = send(descriptor, start, size, flags);
        number = errno;
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        sent = send(descriptor, start, size, flags);
        number = errno;
        Py_END_ALLOW_THREADS
    }
    if (sent >= 0)
        return sent;
    if (number == EAGAIN || number == EWOULDBLOCK || number == EINTR)
        return 0;
    note_loss(stream, number);
    return PyErr_Occurred() ? LEFT_TO_PYTHON : ENDED;
}

/* Put the writer's role back after all was written, if nobody has anything for it or waits for it;
 * else false. As at the end of `Outbox._write_queue`. */
static bool
put_back(PyObject *link, PyObject *ticket)
{
    if (!session_of(link))
        return false;
    Lock lock(link);
    if (!lock || PyObject_Size(FIELD(link, _queue)) != 0 || NUMBER(link, _awaiting) != 0 ||
        PyErr_Occurred())
        return false;
    put(&FIELD(link, _tickets_written), Py_NewRef(ticket));
    put(&FIELD(link, _overdue), Py_NewRef(Py_False));
    put(&FIELD(link, _writing), Py_NewRef(Py_False));
    return true;
}

static PyObject *
native_depart(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 8) {
        PyErr_SetString(PyExc_TypeError,
                        "depart takes a link, kind, call id, note, meta, buffers, rows, a limit");
        return NULL;
    }
    PyObject *link = args[0];
    Ref session = session_of(link);
    Py_ssize_t most = PyLong_AsSsize_t(args[7]), count = PyObject_Size(args[5]);
    Message message = {args + 1, args[6] == Py_None ? NULL : args[6]};
    if (PyErr_Occurred())
        return NULL;
    if (!session || count > FEW)
        Py_RETURN_NONE;
    Ref turn, left(PyTuple_New(2));
    if (!left)
        return NULL;
    if (Lock lock(link); lock && is_free(link) && !PyErr_Occurred())
        turn = Ref(stamped(link, session.get(), message, most));
    if (!turn)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    /* From here nothing is raised: who has become the writer has to know it. */
    PyObject *whole = PyList_GET_ITEM(PyTuple_GET_ITEM(turn.get(), 0), 0);
    Ref stream = Ref::to(FIELD(link, stream));
    Py_ssize_t sent = written_now(stream.get(), whole);
    if (sent == PyBytes_GET_SIZE(whole) && put_back(link, PyTuple_GET_ITEM(turn.get(), 2)))
        Py_RETURN_TRUE;
    PyErr_Clear();
    Ref done = sent == LEFT_TO_PYTHON ? Ref::to(Py_None) : Ref(PyLong_FromSsize_t(sent));
    if (!done) {
        /* Small ones are always there. */
        PyErr_Clear();
        done = Ref(PyLong_FromLong(ENDED));
    }
    PyTuple_SET_ITEM(left.get(), 0, turn.release());
    PyTuple_SET_ITEM(left.get(), 1, done.release());
    return left.release();
}

/* Forget what the peer has, as `Session.admit`. -1 with an error set. */
static int
drop_kept(PyObject *session, uint64_t ack)
{
    Ref kept = Ref::to(FIELD(session, _kept));
    uint64_t dropped = 0;
    while (PyObject_Size(kept.get()) > 0) {
        Ref first(PySequence_GetItem(kept.get(), 0));
        if (!first)
            return -1;
        assert(PyTuple_CheckExact(first.get()) && PyTuple_GET_SIZE(first.get()) == 3);
        if (PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(first.get(), 0)) > ack)
            break;
        dropped += PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(first.get(), 2));
        Ref gone(PyObject_CallMethodNoArgs(kept.get(), str_popleft));
        if (!gone)
            break;
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

/* Whether all buffers of a frame are inline, and fill it, or in shared memory. */
static bool
are_here(PyObject *link, const Head *head, const char *start)
{
    const char *row = start + HEADER;
    uint64_t left = head->total - ROW * head->count - SLOT * head->freed - head->note - head->meta;
    for (uint64_t i = 0; i < head->count; i++, row += ROW) {
        uint64_t size = get_u64(row), place = get_u64(row + 8);
        if (place < SPLIT && FIELD(link, _view) != Py_None)
            continue;
        if (place != INLINE || size > left)
            return false;
        left -= size;
    }
    return left == 0;
}

/* The buffers that begin here, or lie in shared memory. */
static PyObject *
read_buffers(PyObject *link, const char *rows, Py_ssize_t count, const char *at)
{
    Ref buffers(PyList_New(count));
    for (Py_ssize_t i = 0; buffers && i < count; i++) {
        uint64_t size = get_u64(rows + ROW * i), place = get_u64(rows + ROW * i + 8);
        PyObject *buffer;
        if (place == INLINE) {
            buffer = PyByteArray_FromStringAndSize(at, (Py_ssize_t)size);
            at += size;
        }
        else {
            Ref offset(PyLong_FromUnsignedLongLong(place)), length(PyLong_FromUnsignedLongLong(size));
            PyObject *called[3] = {link, offset.get(), length.get()};
            buffer = offset && length ? PyObject_VectorcallMethod(str__shared, called, 3, NULL) : NULL;
        }
        if (buffer == NULL)
            return NULL;
        PyList_SET_ITEM(buffers.get(), i, buffer);
    }
    return buffers.release();
}

/* The frame that has this head and begins here, if all its buffers `are_here`. */
static PyObject *
read_frame(PyObject *link, const Head *head, const char *start)
{
    const char *rows = start + HEADER, *at = rows + ROW * head->count + SLOT * head->freed;
    const char *inlined = at + head->note + head->meta;
    PyObject *buffers = read_buffers(link, rows, (Py_ssize_t)head->count, inlined);
    if (buffers == NULL)
        return NULL;
    PyObject *fields[5] = {PyLong_FromLong(head->kind), PyLong_FromUnsignedLongLong(head->call_id),
                           PyBytes_FromStringAndSize(at, (Py_ssize_t)head->note),
                           PyBytes_FromStringAndSize(at + head->note, (Py_ssize_t)head->meta),
                           buffers};
    return named_tuple(frame_type, 5, fields);
}

/* Take back the slots that a frame with this head and this beginning gives back. False with an error
 * set. */
static bool
took_back(PyObject *link, const Head *head, const char *start)
{
    Ref offsets(PyTuple_New((Py_ssize_t)head->freed));
    const char *at = start + HEADER + ROW * head->count;
    for (Py_ssize_t i = 0; offsets && i < (Py_ssize_t)head->freed; i++, at += SLOT) {
        PyObject *offset = PyLong_FromUnsignedLongLong(get_u64(at));
        if (offset == NULL)
            return false;
        PyTuple_SET_ITEM(offsets.get(), i, offset);
    }
    Ref done(offsets ? PyObject_CallMethodOneArg(link, str__release, offsets.get()) : NULL);
    return static_cast<bool>(done);
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
    if (total > NUMBER(link, _unsuspicious) || total > (uint64_t)(have - HEADER) ||
        ROW * head->count + SLOT * head->freed + head->note + head->meta > total)
        return 0;
    if (seq != NUMBER(session, _seen) + 1 || head->ack > NUMBER(session, _sent))
        return 0;
    return seq - NUMBER(session, _reported) < frames &&
           NUMBER(session, _seen_bytes) + total - NUMBER(session, _reported_bytes) < bytes;
}

/* Take a frame from the window; NULL without an error if it is not a usual one. */
static PyObject *
taken(PyObject *link, PyObject *session, const View &window, uint64_t frames, uint64_t bytes)
{
    Py_ssize_t start = PyLong_AsSsize_t(FIELD(link, _start)), end = PyLong_AsSsize_t(FIELD(link, _end));
    if (start < 0 || end > window.size() || end - start < HEADER)
        return NULL;
    const char *at = window.start() + start;
    Head head = read_head(at);
    if (!is_usual(link, session, &head, end - start, frames, bytes) || PyErr_Occurred() ||
        !are_here(link, &head, at))
        return NULL;
    Ref seen(PyLong_FromUnsignedLongLong(head.seq));
    Ref counted(PyLong_FromUnsignedLongLong(NUMBER(session, _seen_bytes) + head.total));
    Ref next(PyLong_FromSsize_t(start + HEADER + (Py_ssize_t)head.total));
    if (!seen || !counted || !next || drop_kept(session, head.ack) < 0)
        return NULL;
    put(&FIELD(session, _seen), seen.release());
    put(&FIELD(session, _seen_bytes), counted.release());
    put(&FIELD(link, _start), next.release());
    /* Memory is shared once: whatever happens from here, this frame does not come again. */
    Ref frame(read_frame(link, &head, at));
    if (!frame || (head.freed && !took_back(link, &head, at)))
        return NULL;
    return frame.release();
}

/* The bytes of a stream are in the window, so many: the link knows that before anything else
 * happens. False, with an error set, if there is no memory for it. */
static bool
note_bytes(PyObject *link, Py_ssize_t count)
{
    Ref end(PyLong_FromSsize_t(count));
    Ref total(PyLong_FromUnsignedLongLong(NUMBER(link, received_bytes) + (uint64_t)count));
    if (end)
        put(&FIELD(link, _end), end.release());
    if (total)
        put(&FIELD(link, received_bytes), total.release());
    return !PyErr_Occurred();
}

/* Bytes that were seen, or that may be there: how many were read, NOTHING_CAME, or LEFT_TO_PYTHON,
 * which finds an end once more, and begins anew what a signal has interrupted. */
static Py_ssize_t
taken_up(PyObject *stream, int flags, const View &window)
{
    int descriptor = descriptor_of(stream), number;
    if (descriptor < 0)
        return LEFT_TO_PYTHON;
    ssize_t count;
    Py_BEGIN_ALLOW_THREADS
    count = recv(descriptor, window.start(), (size_t)window.size(), flags);
    number = errno;
    Py_END_ALLOW_THREADS
    if (count > 0)
        return count;
    if (count < 0 && (number == EAGAIN || number == EWOULDBLOCK))
        return NOTHING_CAME;
    if (count < 0 && number != EINTR)
        note_loss(stream, number);
    return LEFT_TO_PYTHON;
}

/* As `PlainStream.recv_into`; who has to sleep does so in Python. As `taken_up`. */
static Py_ssize_t
awaited_bytes(PyObject *stream, PyObject *target, const View &window)
{
    int crowd = has_crowd(stream), seen = 0;
    if (crowd == 0) {
        Ref awaited(PyObject_GetAttr(stream, str_awaited));
        Ref lookout(awaited ? PyObject_GetAttr(stream, str__lookout) : NULL);
        if (!lookout)
            return LEFT_TO_PYTHON;
        seen = is_true(PyObject_CallMethodOneArg(lookout.get(), str_wait, awaited.get()));
    }
    if (crowd < 0 || seen < 0)
        return LEFT_TO_PYTHON;
    if (seen)
        return taken_up(stream, 0, window);
    Ref count(PyObject_CallMethodOneArg(stream, str_sleep_for, target));
    Py_ssize_t came = count ? PyLong_AsSsize_t(count.get()) : 0;
    if (PyErr_Occurred() || came == 0)
        return LEFT_TO_PYTHON;
    return came < 0 ? NOTHING_CAME : came;
}

/* Fill the empty window from a plain stream: as `taken_up`, and perhaps with an error set if
 * LEFT_TO_PYTHON. */
static Py_ssize_t
read_now(PyObject *link, const View &window)
{
    Ref stream = Ref::to(FIELD(link, stream)), target = Ref::to(FIELD(link, _window));
    int waits = PyObject_IsTrue(FIELD(link, _patience));
    if (waits < 0 || (PyObject *)Py_TYPE(stream.get()) != stream_type ||
        !does_as_written(stream.get(), waits ? str_recv_into : str_try_recv_into,
                         waits ? recv_into : try_recv_into))
        return LEFT_TO_PYTHON;
    /* Before the read: others look at the window meanwhile. */
    put(&FIELD(link, _start), Py_NewRef(zero));
    put(&FIELD(link, _end), Py_NewRef(zero));
    Py_ssize_t count = waits ? awaited_bytes(stream.get(), target.get(), window)
                             : taken_up(stream.get(), MSG_DONTWAIT | MSG_NOSIGNAL, window);
    return count > 0 && !note_bytes(link, count) ? LEFT_TO_PYTHON : count;
}

static PyObject *
native_arrive(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "arrive takes a link, and how much may be owed to its peer");
        return NULL;
    }
    PyObject *link = args[0];
    Ref session = session_of(link);
    uint64_t frames = PyLong_AsUnsignedLongLong(args[1]), bytes = PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    View window;
    if (!session || FIELD(link, _large) != Py_None)
        Py_RETURN_NONE;
    if (!window.hold(FIELD(link, _window), PyBUF_WRITABLE))
        return NULL;
    if (PyLong_AsSsize_t(FIELD(link, _start)) == PyLong_AsSsize_t(FIELD(link, _end))) {
        if (FIELD(link, broken) != Py_False || FIELD(link, closed) != Py_False)
            Py_RETURN_NONE;
        Py_ssize_t came = read_now(link, window);
        if (came == NOTHING_CAME)
            Py_RETURN_FALSE;
        if (came == LEFT_TO_PYTHON)
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        session = session_of(link);
        if (!session || FIELD(link, _large) != Py_None)
            Py_RETURN_NONE;
    }
    PyObject *frame = taken(link, session.get(), window, frames, bytes);
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
find_in(const char *module, const char *type, const char *name, PyObject **place)
{
    PyObject *found;
    Ref owned(find(module, type, &found) ? found : NULL);
    *place = owned ? PyObject_GetAttrString(owned.get(), name) : NULL;
    return *place != NULL;
}

/* The dtypes that may be whole records, by their numbers; 0 with an error set. */
static int
find_types(void)
{
    PyObject *codes = NULL, *castable = NULL;
    int found = find("telegrad.wire.layouts", "DTYPE_CODES", &codes) &&
                find("telegrad.wire.layouts", "CASTABLE", &castable);
    Ref owned[2] = {Ref(codes), Ref(castable)};
    Ref types(found ? PySequence_Tuple(castable) : NULL);
    if (!types)
        return 0;
    std::fill(std::begin(code_of), std::end(code_of), -1);
    std::fill(std::begin(type_of), std::end(type_of), at::ScalarType::Undefined);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types.get()); i++) {
        PyObject *type = PyTuple_GET_ITEM(types.get(), i);
        Ref code(PyObject_GetItem(codes, type));
        long number = code ? PyLong_AsLong(code.get()) : -1;
        if (number < 0 || number > UINT8_MAX || !THPDtype_Check(type)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_AttributeError, "no dtype of the wire");
            return 0;
        }
        at::ScalarType scalar = ((THPDtype *)type)->scalar_type;
        code_of[static_cast<int>(scalar)] = (int)number;
        type_of[number] = scalar;
    }
    return 1;
}

static int
native_exec(PyObject *module)
{
    if (!built_for_this_torch())
        return -1;
    /* As `TensorImpl` puts them together. */
    constexpr auto cpu = c10::BackendComponent::CPUBit;
    inference_keys = dense_key | c10::getAutocastRelatedKeySetFromBackend(cpu);
    plain_keys = inference_keys | c10::getAutogradRelatedKeySetFromBackend(cpu);
#define INTERN(name) \
    if ((str_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return -1;
    NAMES(INTERN)
    zero = PyLong_FromLong(0);
    never = PyFloat_FromDouble(Py_HUGE_VAL);
    memory_type = PyType_FromSpec(&memory_spec);
    int found = zero != NULL && never != NULL && memory_type != NULL &&
                find("torch", "Tensor", &tensor_type) && find_types() &&
                find("torch.autograd", "forward_ad", &forward_ad) &&
                find("telegrad.wire.names", "name_of", &name_of) &&
                find("telegrad.wire.names", "object_named", &object_named) &&
                find("telegrad.wire.names", "known_names", &known_names) &&
                find_in("telegrad.wire.trust", "Trust", "CODE", &trust_in_code) &&
                find("telegrad.wire.stream", "PlainStream", &stream_type) &&
                find_in("telegrad.wire.stream", "PlainStream", "try_send", &try_send) &&
                find_in("telegrad.wire.stream", "PlainStream", "recv_into", &recv_into) &&
                find_in("telegrad.wire.stream", "PlainStream", "try_recv_into", &try_recv_into) &&
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
    {"depart", (PyCFunction)(void (*)(void))native_depart, METH_FASTCALL,
     "depart(link, kind, call_id, note, meta, buffers, rows, most): True, what is left to do, or None"},
    {"arrive", (PyCFunction)(void (*)(void))native_arrive, METH_FASTCALL,
     "arrive(link, frames, bytes): the next frame, False if none came, or None"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)native_exec}, {0, NULL}};

static struct PyModuleDef native = {
    PyModuleDef_HEAD_INIT, "telegrad.wire._native", "Short cuts of the codec, of frames and of links.", 0,
    methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&native);
}
