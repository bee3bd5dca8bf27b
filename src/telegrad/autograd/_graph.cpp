/* The parts of a pass that look at every tensor and every node, in C++.
 *
 *   send, receive   the nodes where the graph is cut, as `nodes.Send` and `nodes.Recv`
 *   fits            whether gradients are those of the tensors that a send node stands for
 *   walk            what sources reach, as `plan.form_groups` finds it
 *   run             one call of the engine, from sources all of which are resolved
 *   settle          what a pass found for leaves, if nothing but the gradients has to be looked at
 *   write, read     the message with the gradient of one tensor, as `messages` has it
 *
 * Each does what the Python beside it does, which is used where this file was not built. What is
 * rare is left to that: hooks on leaves, gradients that are shared, graphs that are retained. The
 * engine is torch's own, and so are the rules for its nodes: see `local` for those we rely on.
 *
 * What must never happen: that the engine runs with the interpreter lock held (a node of Python
 * would wait for it for ever), or that a Python object is touched without it.
 */

#define PY_SSIZE_T_CLEAN
#include "../native.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <c10/core/AutogradState.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using namespace torch::autograd;
using NodePtr = c10::intrusive_ptr<Node>;

/* Of Python, found by `found_in_python`. */
PyObject *take, *fire, *refuse, *anchor, *put_away, *bring_back, *size_type;

std::string send_name = "SendBackward", recv_name = "RecvBackward";

/* Thrown where Python has set an error; the engine carries it to whoever called it. */
[[noreturn]] void
raise_python_error()
{
    python_error error;
    error.persist();
    throw std::move(error);
}

PyObject *
owned(PyObject *object)
{
    if (object == nullptr)
        throw python_error();
    return object;
}

/* Compiled autograd looks at all nodes before it runs any. It never sees one of ours in a pass. */
void
refuse_to_be_compiled(const char *what, uint64_t peer)
{
    pybind11::gil_scoped_acquire with_interpreter;
    Py_XDECREF(PyObject_CallFunction(refuse, "sK", what, peer));
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "A node of telegrad's cannot be compiled.");
    raise_python_error();
}

/* ---- Nodes ---- */

struct Send : Node {
    uint64_t message = 0;
    uint64_t peer = 0;
    std::vector<std::pair<std::vector<int64_t>, at::ScalarType>> shapes;

    std::string name() const override { return send_name; }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override
    {
        refuse_to_be_compiled("tensors sent to worker", peer);
    }

    variable_list apply(variable_list &&) override
    {
        pybind11::gil_scoped_acquire with_interpreter;
        THPObjectPtr taken(PyObject_CallFunction(take, "KK", message, peer));
        THPObjectPtr gradients(taken ? PySequence_Tuple(taken.get()) : nullptr);
        if (!gradients)
            raise_python_error();
        variable_list flowing;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(gradients.get()); i++) {
            PyObject *each = PyTuple_GET_ITEM(gradients.get(), i);
            flowing.push_back(each == Py_None ? Variable() : THPVariable_Unpack(each));
        }
        return flowing;
    }
};

struct Recv : Node {
    uint64_t message = 0;
    uint64_t peer = 0;
    uint64_t index = 0;

    std::string name() const override { return recv_name; }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override
    {
        refuse_to_be_compiled("a tensor that came from worker", peer);
    }

    variable_list apply(variable_list &&gradients) override
    {
        pybind11::gil_scoped_acquire with_interpreter;
        THPObjectPtr gradient(THPVariable_Wrap(gradients.at(0)));
        THPObjectPtr done(
            gradient ? PyObject_CallFunction(fire, "KKKO", message, index, peer, gradient.get())
                     : nullptr);
        if (!done)
            raise_python_error();
        return {Variable()};
    }
};

template <typename Kind>
Kind &
as(PyObject *self)
{
    return static_cast<Kind &>(*reinterpret_cast<THPCppFunction *>(self)->cdata);
}

template <typename Kind, uint64_t Kind::*field>
PyObject *
number_of(PyObject *self, void *)
{
    return PyLong_FromUnsignedLongLong(as<Kind>(self).*field);
}

PyObject *
shapes_of(PyObject *self, void *)
{
    HANDLE_TH_ERRORS
    auto &shapes = as<Send>(self).shapes;
    THPObjectPtr all(owned(PyList_New(0)));
    for (auto &[sizes, type] : shapes) {
        THPObjectPtr numbers(owned(PyTuple_New((Py_ssize_t)sizes.size())));
        for (size_t i = 0; i < sizes.size(); i++)
            PyTuple_SET_ITEM(numbers.get(), i, owned(PyLong_FromLongLong(sizes[i])));
        THPObjectPtr size(owned(PyObject_CallOneArg(size_type, numbers.get())));
        THPObjectPtr pair(owned(PyTuple_Pack(2, size.get(), (PyObject *)torch::getTHPDtype(type))));
        if (PyList_Append(all.get(), pair.get()) < 0)
            return nullptr;
    }
    return all.release();
    END_HANDLE_TH_ERRORS
}

PyTypeObject SendType, RecvType;

PyGetSetDef send_properties[] = {
    THP_FUNCTION_DEFAULT_PROPERTIES,
    {"message", number_of<Send, &Send::message>, nullptr, nullptr, nullptr},
    {"peer", number_of<Send, &Send::peer>, nullptr, nullptr, nullptr},
    {"shapes", shapes_of, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyGetSetDef recv_properties[] = {
    THP_FUNCTION_DEFAULT_PROPERTIES,
    {"message", number_of<Recv, &Recv::message>, nullptr, nullptr, nullptr},
    {"peer", number_of<Recv, &Recv::peer>, nullptr, nullptr, nullptr},
    {"index", number_of<Recv, &Recv::index>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

/* The nodes of one message are equal. They are different keys all the same. */
PyObject *
compare_recvs(PyObject *one, PyObject *other, int operation)
{
    if ((operation != Py_EQ && operation != Py_NE) || !Py_IS_TYPE(other, &RecvType))
        Py_RETURN_NOTIMPLEMENTED;
    bool equal = as<Recv>(one).message == as<Recv>(other).message;
    return PyBool_FromLong(equal == (operation == Py_EQ));
}

/* The node behind an object of Python. */
const NodePtr &
node_of(PyObject *object)
{
    if (THPFunction_Check(object))
        return reinterpret_cast<THPFunction *>(object)->cdata;
    TORCH_CHECK_TYPE(THPCppFunction_Check(object), "that is not a node of a graph");
    return reinterpret_cast<THPCppFunction *>(object)->cdata;
}

PyObject *
wrapped(const NodePtr &node)
{
    return owned(functionToPyObject(node));
}

uint64_t
as_number(PyObject *object)
{
    uint64_t number = PyLong_AsUnsignedLongLong(object);
    if (number == (uint64_t)-1 && PyErr_Occurred())
        throw python_error();
    return number;
}

const Variable &
as_tensor(PyObject *object)
{
    TORCH_CHECK_TYPE(THPVariable_Check(object), "that is not a tensor");
    return THPVariable_Unpack(object);
}

void
count_arguments(Py_ssize_t given, Py_ssize_t wanted, const char *signature)
{
    TORCH_CHECK_TYPE(given == wanted, "it takes ", signature);
}

/* ---- Crossing ---- */

PyObject *
send(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 3, "next_message, peer, tensors");
    THPObjectPtr tensors(owned(PySequence_Tuple(args[2])));
    c10::intrusive_ptr<Send> node;
    THPObjectPtr indices;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors.get()); i++) {
        const Variable &tensor = as_tensor(PyTuple_GET_ITEM(tensors.get(), i));
        if (!tensor.requires_grad())
            continue;
        if (!node) {
            node = c10::make_intrusive<Send>();
            indices = owned(PyList_New(0));
        }
        node->add_next_edge(impl::gradient_edge(tensor));
        node->shapes.emplace_back(tensor.sizes().vec(), tensor.scalar_type());
        THPObjectPtr index(owned(PyLong_FromSsize_t(i)));
        if (PyList_Append(indices.get(), index.get()) < 0)
            return nullptr;
    }
    if (!node)
        Py_RETURN_NONE;
    THPObjectPtr message(owned(PyObject_CallNoArgs(args[0])));
    node->message = as_number(message.get());
    node->peer = as_number(args[1]);
    /* One gradient that nobody gives: the engine wants to know what kind it would be. */
    node->add_input_metadata(THPVariable_Unpack(anchor));
    THPObjectPtr object(wrapped(node));
    return PyTuple_Pack(3, message.get(), object.get(), indices.get());
    END_HANDLE_TH_ERRORS
}

PyObject *
receive(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 4, "message, peer, indices, tensors");
    THPObjectPtr indices(owned(PySequence_Tuple(args[2])));
    THPObjectPtr nodes(owned(PyList_New(0)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(indices.get()); i++) {
        THPObjectPtr object(owned(PyObject_GetItem(args[3], PyTuple_GET_ITEM(indices.get(), i))));
        const Variable &tensor = as_tensor(object.get());
        TORCH_CHECK(tensor.is_leaf(), "A message names one of its tensors twice.");
        TORCH_CHECK(isDifferentiableType(tensor.scalar_type()), "A message says that a tensor of type ",
                    tensor.scalar_type(), " needs gradient.");
        tensor.set_requires_grad(false);
        auto node = c10::make_intrusive<Recv>();
        node->message = as_number(args[0]);
        node->peer = as_number(args[1]);
        node->index = (uint64_t)i;
        node->add_next_edge(impl::gradient_edge(THPVariable_Unpack(anchor)));
        uint32_t place = node->add_input_metadata(tensor);
        impl::set_gradient_edge(tensor, {node, place});
        THPObjectPtr made(wrapped(node));
        if (PyList_Append(nodes.get(), made.get()) < 0)
            return nullptr;
    }
    return nodes.release();
    END_HANDLE_TH_ERRORS
}

bool
is_plain(const at::Tensor &tensor)
{
    return tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

PyObject *
fits(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 2, "node, gradients");
    TORCH_CHECK_TYPE(Py_IS_TYPE(args[0], &SendType), "that is not the node of a send");
    auto &shapes = as<Send>(args[0]).shapes;
    THPObjectPtr gradients(owned(PySequence_Tuple(args[1])));
    if (PyTuple_GET_SIZE(gradients.get()) != (Py_ssize_t)shapes.size())
        Py_RETURN_FALSE;
    for (size_t i = 0; i < shapes.size(); i++) {
        PyObject *object = PyTuple_GET_ITEM(gradients.get(), i);
        if (!THPVariable_Check(object))
            Py_RETURN_FALSE;
        const Variable &gradient = THPVariable_Unpack(object);
        if (!is_plain(gradient) || gradient.scalar_type() != shapes[i].second ||
            gradient.sizes() != at::IntArrayRef(shapes[i].first))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
    END_HANDLE_TH_ERRORS
}

/* ---- The walk ---- */

/* Where a source enters the graph: edges as Python has them, or what the node of a send leads to. */
edge_list
entries(PyObject *start)
{
    if (Py_IS_TYPE(start, &SendType))
        return node_of(start)->next_edges();
    THPObjectPtr pairs(owned(PySequence_Tuple(start)));
    edge_list edges;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs.get()); i++) {
        PyObject *pair = PyTuple_GET_ITEM(pairs.get(), i);
        TORCH_CHECK_TYPE(PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) >= 2, "an edge is a pair");
        PyObject *node = PyTuple_GET_ITEM(pair, 0);
        if (node == Py_None)
            edges.emplace_back();
        else
            edges.emplace_back(node_of(node), (uint32_t)as_number(PyTuple_GET_ITEM(pair, 1)));
    }
    return edges;
}

bool
is_leaf(const Node &node)
{
    return typeid(node) == typeid(AccumulateGrad);
}

PyObject *
walk(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 1, "starts");
    THPObjectPtr starts(owned(PySequence_Tuple(args[0])));
    THPObjectPtr found(owned(PyList_New(0))), met(owned(PyList_New(0)));
    ska::flat_hash_map<Node *, Py_ssize_t> owner;
    std::vector<const edge_list *> stack;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(starts.get()); k++) {
        THPObjectPtr leaves(owned(PyDict_New())), recvs(owned(PyList_New(0)));
        const edge_list first = entries(PyTuple_GET_ITEM(starts.get(), k));
        stack.push_back(&first);
        while (!stack.empty()) {
            const edge_list &edges = *stack.back();
            stack.pop_back();
            for (const Edge &edge : edges) {
                Node *node = edge.function.get();
                if (node == nullptr)
                    continue;
                auto [known, is_new] = owner.emplace(node, k);
                if (!is_new) {
                    if (known->second != k) {
                        /* Of the others it is enough to know that they were met. */
                        THPObjectPtr leaf(is_leaf(*node) ? wrapped(edge.function)
                                                         : Py_NewRef(Py_None));
                        THPObjectPtr entry(
                            owned(Py_BuildValue("nnO", k, known->second, leaf.get())));
                        if (PyList_Append(met.get(), entry.get()) < 0)
                            return nullptr;
                    }
                }
                else if (is_leaf(*node)) {
                    THPObjectPtr object(wrapped(edge.function));
                    if (PyDict_SetItem(leaves.get(), object.get(), Py_None) < 0)
                        return nullptr;
                }
                else if (typeid(*node) == typeid(Recv)) {
                    THPObjectPtr object(wrapped(edge.function));
                    if (PyList_Append(recvs.get(), object.get()) < 0)
                        return nullptr;
                }
                else
                    stack.push_back(&node->next_edges());
            }
        }
        THPObjectPtr pair(owned(PyTuple_Pack(2, leaves.get(), recvs.get())));
        if (PyList_Append(found.get(), pair.get()) < 0)
            return nullptr;
    }
    return Py_BuildValue("OOn", found.get(), met.get(), (Py_ssize_t)owner.size());
    END_HANDLE_TH_ERRORS
}

/* ---- The engine ---- */

/* As `torch_private.eager_engine`. */
class EagerEngine {
  public:
    EagerEngine() : threads_(c10::AutogradState::get_tls_state().get_multithreading_enabled())
    {
        THPObjectPtr away(owned(PyObject_CallNoArgs(put_away)));
        is_away_ = away.get() == Py_True;
        c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    }
    EagerEngine(const EagerEngine &) = delete;
    EagerEngine &operator=(const EagerEngine &) = delete;
    ~EagerEngine()
    {
        c10::AutogradState::get_tls_state().set_multithreading_enabled(threads_);
        if (!is_away_)
            return;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Py_XDECREF(PyObject_CallNoArgs(bring_back));
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }

  private:
    bool threads_, is_away_ = false;
};

variable_list
run_engine(const edge_list &roots, const variable_list &gradients, bool retain, bool create,
           const edge_list &ends)
{
    EagerEngine eager;
    /* With the lock: in a process that was forked the first who asks for it makes it anew. */
    Engine &engine = Engine::get_default_engine();
    pybind11::gil_scoped_release without_interpreter;
    return engine.execute(roots, gradients, retain, create, false, ends);
}

/* Add the edges into these nodes: the keys of a dictionary, or the items of a list. Whether none of
 * them is a leaf with hooks; what Python has removed counts. */
bool
add_ends(PyObject *nodes, edge_list &ends)
{
    THPObjectPtr all(owned(PySequence_Tuple(nodes)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all.get()); i++) {
        const NodePtr &node = node_of(PyTuple_GET_ITEM(all.get(), i));
        if (is_leaf(*node) && !node->tensor_pre_hooks().empty())
            return false;
        ends.emplace_back(node, 0);
    }
    return true;
}

/* The tensors between two places, as a list; None for those that are not there. */
PyObject *
listed(variable_list &tensors, size_t begin, size_t end)
{
    THPObjectPtr list(owned(PyList_New((Py_ssize_t)(end - begin))));
    for (size_t i = begin; i < end; i++) {
        PyObject *each = tensors.empty() ? Py_NewRef(Py_None)
                                         : owned(THPVariable_Wrap(std::move(tensors[i])));
        PyList_SET_ITEM(list.get(), (Py_ssize_t)(i - begin), each);
    }
    return list.release();
}

PyObject *
run(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 5, "weighted, leaves, recvs, retain_graph, create_graph");
    bool retain = args[3] == Py_True, create = args[4] == Py_True;
    edge_list roots, ends;
    if (!add_ends(args[1], ends))
        Py_RETURN_NONE;
    size_t leaves = ends.size();
    add_ends(args[2], ends);
    THPObjectPtr weighted(owned(PySequence_Tuple(args[0]))), sums(owned(PyList_New(0)));
    variable_list flowing;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(weighted.get()); k++) {
        PyObject *pair = PyTuple_GET_ITEM(weighted.get(), k);
        TORCH_CHECK_TYPE(PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2,
                         "a start comes with its gradients");
        edge_list edges = entries(PyTuple_GET_ITEM(pair, 0));
        THPObjectPtr gradients(owned(PySequence_Tuple(PyTuple_GET_ITEM(pair, 1))));
        TORCH_CHECK_VALUE((size_t)PyTuple_GET_SIZE(gradients.get()) == edges.size(),
                          "there are not as many gradients as edges");
        for (size_t i = 0; i < edges.size(); i++) {
            PyObject *gradient = PyTuple_GET_ITEM(gradients.get(), (Py_ssize_t)i);
            if (gradient == Py_None || !edges[i].is_valid())
                continue;
            if (is_leaf(*edges[i].function)) {
                THPObjectPtr leaf(wrapped(edges[i].function));
                THPObjectPtr pair(owned(PyTuple_Pack(2, leaf.get(), gradient)));
                if (PyList_Append(sums.get(), pair.get()) < 0)
                    return nullptr;
            }
            else {
                roots.push_back(std::move(edges[i]));
                flowing.push_back(as_tensor(gradient));
            }
        }
    }
    variable_list captured;
    if (!roots.empty() && !ends.empty())
        captured = run_engine(roots, flowing, retain, create, ends);
    THPObjectPtr of_leaves(listed(captured, 0, leaves));
    THPObjectPtr of_recvs(listed(captured, leaves, ends.size()));
    return PyTuple_Pack(3, of_leaves.get(), of_recvs.get(), sums.get());
    END_HANDLE_TH_ERRORS
}

/* ---- Leaves ---- */

/* Whether anything hangs on a leaf that has to see its gradient; what Python has removed counts. */
bool
has_hooks(AccumulateGrad &leaf)
{
    return !leaf.tensor_pre_hooks().empty() || !leaf.pre_hooks().empty() ||
           !leaf.post_hooks().empty() || leaf.tensor_post_acc_grad_hooks() != nullptr;
}

PyObject *
settle(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 1, "gradients by node");
    TORCH_CHECK_TYPE(PyDict_CheckExact(args[0]), "gradients come by node");
    THPObjectPtr found(owned(PyList_New(0)));
    std::vector<at::TensorImpl *> seen;
    Py_ssize_t at = 0;
    PyObject *node, *object;
    while (PyDict_Next(args[0], &at, &node, &object)) {
        const Variable &gradient = as_tensor(object);
        if (gradient.use_count() != 1 || !is_plain(gradient) || !gradient.is_contiguous())
            Py_RETURN_NONE;
        const NodePtr &accumulator = node_of(node);
        TORCH_CHECK_TYPE(is_leaf(*accumulator), "that is not the node of a leaf");
        auto &leaf = static_cast<AccumulateGrad &>(*accumulator);
        if (has_hooks(leaf))
            Py_RETURN_NONE;
        THPObjectPtr variable(owned(THPVariable_Wrap(leaf.variable)));
        THPObjectPtr pair(owned(PyTuple_Pack(2, variable.get(), object)));
        if (PyList_Append(found.get(), pair.get()) < 0)
            return nullptr;
        seen.push_back(gradient.unsafeGetTensorImpl());
    }
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end())
        Py_RETURN_NONE;
    return found.release();
    END_HANDLE_TH_ERRORS
}

/* ---- Messages ---- */

/* Of Python, found by `found_in_messages`. */
PyObject *parcel_type, *gradient_type, *topic, *known_options, *no_history, *read_followed;
PyObject *str_bits, *str_sequel_bytes;

enum { GRADIENT = 1, CREATES = 2, KNOWN = 7, ENGAGES = 8, ACKNOWLEDGES = 16, FOLLOWED = 32 };
enum { HEAD = 42, MOST_COMPACTED = 4096 };

struct [[gnu::packed]] Head {
    uint8_t kind, bits;
    uint32_t count, width;
    uint64_t context, pass, over, message;
};
static_assert(sizeof(Head) == HEAD);

/* A named tuple, without the Python function that it has for being made. */
PyObject *
named_tuple(PyObject *type, std::initializer_list<PyObject *> fields)
{
    auto *made = (PyTypeObject *)type;
    PyObject *tuple = owned(made->tp_alloc(made, (Py_ssize_t)fields.size()));
    Py_ssize_t at = 0;
    for (PyObject *field : fields)
        PyTuple_SET_ITEM(tuple, at++, Py_NewRef(field));
    return tuple;
}

PyObject *
write(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 3, "context, pass, gradient");
    PyObject *message = args[2];
    TORCH_CHECK_TYPE(Py_IS_TYPE(message, (PyTypeObject *)gradient_type), "that is not a gradient");
    PyObject *options = PyTuple_GET_ITEM(message, 0), *history = PyTuple_GET_ITEM(message, 1);
    PyObject *failed = PyTuple_GET_ITEM(history, 1);
    THPObjectPtr gradients(owned(PySequence_Tuple(PyTuple_GET_ITEM(message, 4))));
    if (PyTuple_GET_SIZE(failed) || PyTuple_GET_SIZE(gradients.get()) != 1 ||
        !THPVariable_Check(PyTuple_GET_ITEM(gradients.get(), 0)))
        Py_RETURN_NONE;
    THPObjectPtr bits(owned(PyObject_GetAttr(options, str_bits)));
    THPObjectPtr sequel(owned(PyObject_GetAttr(options, str_sequel_bytes)));
    Head head = {GRADIENT, (uint8_t)as_number(bits.get()), 0, 1, as_number(args[0]),
                 as_number(args[1]), as_number(PyTuple_GET_ITEM(history, 0)),
                 as_number(PyTuple_GET_ITEM(message, 3))};
    bool creates = head.bits & CREATES;
    if (PyTuple_GET_ITEM(message, 2) == Py_True)
        head.bits |= ENGAGES;
    if (PyTuple_GET_ITEM(message, 5) == Py_True)
        head.bits |= ACKNOWLEDGES;
    TORCH_CHECK_TYPE(PyBytes_CheckExact(sequel.get()), "a sequel is written as bytes");
    Py_ssize_t more = PyBytes_GET_SIZE(sequel.get());
    THPObjectPtr data(owned(PyBytes_FromStringAndSize(nullptr, HEAD + more)));
    memcpy(PyBytes_AS_STRING(data.get()), &head, HEAD);
    memcpy(PyBytes_AS_STRING(data.get()) + HEAD, PyBytes_AS_STRING(sequel.get()), (size_t)more);
    const Variable &gradient = THPVariable_Unpack(PyTuple_GET_ITEM(gradients.get(), 0));
    if (!creates && is_plain(gradient) && !gradient.is_contiguous() &&
        gradient.numel() <= MOST_COMPACTED)
        gradients = owned(PyTuple_Pack(1, THPObjectPtr(THPVariable_Wrap(gradient.contiguous())).get()));
    return named_tuple(parcel_type, {topic, data.get(), gradients.get()});
    END_HANDLE_TH_ERRORS
}

PyObject *
read(PyObject *, PyObject *const *args, Py_ssize_t count)
{
    HANDLE_TH_ERRORS
    count_arguments(count, 1, "parcel");
    PyObject *parcel = args[0];
    if (!Py_IS_TYPE(parcel, (PyTypeObject *)parcel_type))
        Py_RETURN_NONE;
    PyObject *data = PyTuple_GET_ITEM(parcel, 1), *gradients = PyTuple_GET_ITEM(parcel, 2);
    if (!PyBytes_CheckExact(data) || PyBytes_GET_SIZE(data) < HEAD || !PySequence_Check(gradients))
        Py_RETURN_NONE;
    Py_ssize_t width = PyObject_Size(gradients);
    if (width != 1) {
        if (width < 0)
            return nullptr;
        Py_RETURN_NONE;
    }
    Head head;
    memcpy(&head, PyBytes_AS_STRING(data), HEAD);
    if (head.kind != GRADIENT || head.count || head.over || head.width != 1)
        Py_RETURN_NONE;
    THPObjectPtr options, followed;
    if (head.bits & FOLLOWED) {
        followed = PyObject_CallFunction(read_followed, "iO", (int)head.bits, data);
        if (!followed) {
            if (!PyErr_ExceptionMatches(PyExc_Exception))
                return nullptr;
            /* The long way says what is wrong with it. */
            PyErr_Clear();
            Py_RETURN_NONE;
        }
        TORCH_CHECK_TYPE(PyTuple_CheckExact(followed.get()), "options come with their end");
        options = Py_NewRef(PyTuple_GET_ITEM(followed.get(), 0));
        if (as_number(PyTuple_GET_ITEM(followed.get(), 1)) != (uint64_t)PyBytes_GET_SIZE(data))
            Py_RETURN_NONE;
    }
    else if (PyBytes_GET_SIZE(data) != HEAD)
        Py_RETURN_NONE;
    else
        options = Py_NewRef(PyTuple_GET_ITEM(known_options, head.bits & KNOWN));
    THPObjectPtr number(owned(PyLong_FromUnsignedLongLong(head.message)));
    THPObjectPtr message(named_tuple(
        gradient_type, {options.get(), no_history, head.bits & ENGAGES ? Py_True : Py_False,
                        number.get(), gradients, head.bits & ACKNOWLEDGES ? Py_True : Py_False}));
    return Py_BuildValue("KKO", head.context, head.pass, message.get());
    END_HANDLE_TH_ERRORS
}

PyObject *
found_in_messages(PyObject *, PyObject *args)
{
    PyObject *found[6];
    if (!PyArg_ParseTuple(args, "OOOO!OO", &found[0], &found[1], &found[2], &PyTuple_Type, &found[3],
                          &found[4], &found[5]))
        return nullptr;
    if (PyTuple_GET_SIZE(found[3]) != KNOWN + 1) {
        PyErr_SetString(PyExc_ValueError, "there are eight kinds of options");
        return nullptr;
    }
    PyObject **places[6] = {&parcel_type,   &gradient_type, &topic,
                            &known_options, &no_history,    &read_followed};
    for (int i = 0; i < 6; i++)
        Py_XSETREF(*places[i], Py_NewRef(found[i]));
    Py_RETURN_NONE;
}

/* ---- The module ---- */

PyObject *
found_in_python(PyObject *, PyObject *args)
{
    PyObject *found[6];
    if (!PyArg_ParseTuple(args, "OOOOOO", &found[0], &found[1], &found[2], &found[3], &found[4],
                          &found[5]))
        return nullptr;
    PyObject **places[6] = {&take, &fire, &refuse, &anchor, &put_away, &bring_back};
    for (int i = 0; i < 6; i++)
        Py_XSETREF(*places[i], Py_NewRef(found[i]));
    Py_RETURN_NONE;
}

PyObject *
set_names(PyObject *, PyObject *args)
{
    const char *send, *recv;
    if (!PyArg_ParseTuple(args, "ss", &send, &recv))
        return nullptr;
    send_name = send;
    recv_name = recv;
    Py_RETURN_NONE;
}

template <PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t)>
PyCFunction
fast()
{
    return (PyCFunction)(void (*)())function;
}

PyMethodDef methods[] = {
    {"send", fast<send>(), METH_FASTCALL,
     "send(next_message, peer, tensors): message, node and indices; None if none needs gradient"},
    {"receive", fast<receive>(), METH_FASTCALL,
     "receive(message, peer, indices, tensors): a node for each of these tensors"},
    {"fits", fast<fits>(), METH_FASTCALL, "fits(node, gradients): whether they are dense and fit"},
    {"walk", fast<walk>(), METH_FASTCALL,
     "walk(starts): leaves and recvs of each, what a later one met, the number of nodes"},
    {"run", fast<run>(), METH_FASTCALL,
     "run(weighted, leaves, recvs, retain, create): what flowed to leaves, to recvs and straight to "
     "leaves; None if a leaf has hooks"},
    {"settle", fast<settle>(), METH_FASTCALL,
     "settle(gradients by node): leaves with their gradients, or None"},
    {"write", fast<write>(), METH_FASTCALL,
     "write(context, pass, gradient): the parcel, or None if it is not of the usual form"},
    {"read", fast<read>(), METH_FASTCALL,
     "read(parcel): context, pass and gradient, or None if it is not of the usual form"},
    {"found_in_messages", found_in_messages, METH_VARARGS,
     "found_in_messages(parcel_type, gradient_type, topic, options, no_history, read_followed)"},
    {"found_in_python", found_in_python, METH_VARARGS,
     "found_in_python(take, fire, refuse, anchor, put_away, bring_back): what is called from here"},
    {"set_names", set_names, METH_VARARGS, "set_names(send, recv): what nodes say they are"},
    {nullptr, nullptr, 0, nullptr},
};

/* torch's macro for the methods of nodes names it, and no header declares it. */
PyObject *
THPCppFunction_set_sequence_nr(PyObject *self, PyObject *number)
{
    HANDLE_TH_ERRORS
    node_of(self)->set_sequence_nr(as_number(number));
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyMethodDef node_methods[] = {THP_FUNCTION_DEFAULT_METHODS, {nullptr, nullptr, 0, nullptr}};

int
execute(PyObject *module)
{
    if (!built_for_this_torch())
        return -1;
    PyObject *torch = PyImport_ImportModule("torch");
    size_type = torch ? PyObject_GetAttrString(torch, "Size") : nullptr;
    Py_XDECREF(torch);
    str_bits = PyUnicode_InternFromString("bits");
    str_sequel_bytes = PyUnicode_InternFromString("sequel_bytes");
    if (size_type == nullptr || str_bits == nullptr || str_sequel_bytes == nullptr)
        return -1;
    RecvType.tp_richcompare = compare_recvs;
    RecvType.tp_hash = PyBaseObject_Type.tp_hash;
    _initFunctionPyTypeObject(SendType, "SendBackward", send_properties, node_methods);
    _initFunctionPyTypeObject(RecvType, "RecvBackward", recv_properties, node_methods);
    registerCppFunction(typeid(Send), &SendType);
    registerCppFunction(typeid(Recv), &RecvType);
    return PyModule_AddObjectRef(module, "SendNode", (PyObject *)&SendType) < 0 ||
                   PyModule_AddObjectRef(module, "RecvNode", (PyObject *)&RecvType) < 0
               ? -1
               : 0;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "telegrad.autograd._graph", "Nodes, walks and runs.", 0, methods, slots,
    nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC
PyInit__graph(void)
{
    return PyModuleDef_Init(&definition);
}
