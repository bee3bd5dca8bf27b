"""Call sites: what of a call is known when it is traced.

A graph node can carry a string. So each call site gets a key, and a table leads from the key to the
worker, the function and the template of the arguments. The key is made from what they are, not from
when they were met: a graph that another process compiled and left in the disk cache finds its sites
again. It also has a fingerprint of the function's code on the owner and of what it returns
(`shapes.settled`), because inductor's disk cache does not know that the shapes of a node's outputs
depend on them.

What was traced holds for one *era*, which is a constant of every graph. A new one begins with each
job, whose workers may be others under the same names, and when a function turns out to have
changed. A worker that is started anew within a job is called by the graphs that there are.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import weakref
from collections.abc import Callable
from contextvars import Context as Variables
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from telegrad.autograd.enclosed import Reads
from telegrad.compile import torch_private
from telegrad.compile.arguments import Builder, Template, builder
from telegrad.compile.handles import call_method, constant, value_of
from telegrad.compile.own import run_here
from telegrad.compile.owner import tensors_in
from telegrad.compile.tracing import constant_of_graph, passing
from telegrad.compile.written import Written, may_be_kept
from telegrad.rpc import api
from telegrad.rpc.current import current_node, find_node
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.node import Node, register_layer
from telegrad.rpc.worker import WorkerInfo

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Site:
    """One call in the source of a program."""

    key: str
    worker: WorkerInfo
    held: Callable[[], Callable[..., Any] | None]
    """Gives the function, while it is there (see `holding`)."""
    template: Template
    timeout: float | None
    code: str = ""
    """The fingerprint of the function."""

    @property
    def function(self) -> Callable[..., Any]:
        function = self.held()
        if function is None:
            raise TelegradError(f"What is to be called, {self.name}, is gone: keep it meanwhile.")
        return function

    def follow(self, node: Node) -> None:
        """The worker is lost. Whoever has come under its name is meant from now on, as in eager
        mode; a value is lost with its worker, though."""
        worker = node.members.find(self.worker.name)
        if node.is_lost(worker.id) or self.function in (call_method, value_of):
            return  # Who makes the call says so.
        if ask(node, worker, fingerprint, self.function) != self.code:
            begin_era()
            raise TelegradError(
                f"Worker {worker.name!r} was started anew with other code for {self.name}. The "
                "next call of the compiled function traces anew."
            )
        self.__dict__.pop("written", None)
        self.__dict__["worker"] = worker

    @functools.cached_property
    def name(self) -> str:
        """For its reader."""
        return self.key.split(" #")[0]

    @functools.cached_property
    def arguments(self) -> Builder:
        return builder(self.template)

    @functools.cached_property
    def written(self) -> Written | None:
        """The messages that were sent from here, if they may be sent again."""
        if not travels_by_name(self.function):
            return None
        template = self.template
        if self.function is call_method:
            _, (_, _, *rest), _ = template
            template = ("tuple", *rest) if template[1][1][0] == "rref" else ("made", 0)
        return Written() if may_be_kept(template) else None

    @functools.cached_property
    def to_itself(self) -> Site:
        """What a worker sends to itself for a call from here, if gradients may flow (own.py)."""
        template = ("tuple", ("tuple", ("int", 0)), ("dict",))
        site = Site(self.key, self.worker, holding(run_here), template, self.timeout)
        site.__dict__["written"] = None  # No number comes twice.
        return site

    def asks_anew(self) -> bool:
        """Whether what it returns has not been asked for since the call was traced."""
        if self.key not in _unasked:
            return False
        _unasked.discard(self.key)
        return True

    @functools.cached_property
    def reads(self) -> Reads:
        """The tensors of this process that the graphs read which make this call."""
        return Reads()

    @functools.cached_property
    def expected(self) -> dict[Any, Any]:
        """What the outputs must be, by the arguments that were given (see shapes.py)."""
        return {}


def holding(function: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """Gives a function again. An object that goes along is not kept alive by it: Dynamo guards
    which one it is, so whoever runs the graph has it."""
    if not travels_by_name(function) and not isinstance(function, BuiltinFunctionType):
        try:
            if isinstance(function, MethodType):
                return weakref.WeakMethod(function)
            return weakref.ref(function)
        except TypeError:
            pass  # Of a class whose objects cannot be referred to weakly.
    return lambda: function


class Era:
    """Graphs ask for it by `is`, so Dynamo guards which one it is."""


class _Eras:
    now = Era()
    roll = Era()
    """Changes as well when another worker comes under a name."""


eras = _Eras()
eras.now, eras.roll = _Eras.now, _Eras.roll
NEVER = Era()


def begin_era() -> None:
    """Have every compiled function that makes calls traced anew when it is called again."""
    eras.now = Era()
    _fingerprints.clear()


def _begin_roll(*_: object) -> None:
    eras.roll = Era()


def _join(node: Node) -> None:
    begin_era()
    _begin_roll()
    if find_node() is None:
        # Nobody runs them now. Torch would count them as compilations of the same function, of
        # which it allows a few.
        for code in _codes.values():
            torch_private.forget_graphs(code)
        _codes.clear()


def _watch(node: Node) -> None:
    """Have a new roll begin when the workers that a node knows are others. Asked for when it
    matters: the node may have been made before this room was needed."""
    if node.members.on_replaced is None:
        node.members.on_replaced = _begin_roll
        node.on_lost(_begin_roll)


register_layer("compile", _join)


class _Loading:
    """This room is loaded when it is first needed, which may be in the middle of a trace. What
    Dynamo has traced by then is not guarded as it should be."""

    in_trace = torch_private.code_being_traced() is not None


def _begin_trace_anew() -> None:
    if _Loading.in_trace:
        _Loading.in_trace = False
        torch_private.trace_again("telegrad.compile was loaded")


_codes: weakref.WeakValueDictionary[int, CodeType] = weakref.WeakValueDictionary()
"""The code of which there are graphs that hold for an era, or for a roll."""


def _note_code() -> None:
    code = torch_private.code_being_traced()
    if code is not None:
        _begin_trace_anew()
        _codes[id(code)] = code
        torch_private.guard_hooks_of_all_modules()


def _makes_calls(code: CodeType) -> bool:
    return id(code) in _codes


torch_private.guard_empty_hooks(_makes_calls)
_sites: dict[str, Site] = {}
_unasked: set[str] = set()
_fingerprints: dict[tuple[str, Any], str] = {}


def site(key: str) -> Site:
    return _sites[key]


@constant_of_graph
def locate(
    to: Any,
    function: Callable[..., Any],
    holder: Any,
    template: Template,
    timeout: float | None,
    traced: bool,
) -> tuple[str, str]:
    """The key of a call site, and the name of its worker. Runs while Dynamo traces, or outside of
    compiled functions for what these have made. `holder` is what the function is a method of."""
    if traced:
        _note_code()
    node = current_node()
    if holder is not None:
        function = MethodType(function, holder)
    api.check_call(function)
    _refuse_gradients_of(function)
    worker = node.members.find(to)
    known = (worker.name, _code_of(function))
    if traced or known not in _fingerprints:
        _fingerprints[known] = ask(node, worker, fingerprint, function)
    described = _name(function)
    parts = (worker.name, described, _description(template), timeout, _fingerprints[known])
    key = f"{described} on {worker.name} #{_digest(repr(parts))}"
    _sites[key] = Site(key, worker, holding(function), template, timeout, _fingerprints[known])
    if traced:
        _unasked.add(key)
        torch_private.once_traced(functools.partial(_note_reads, _sites[key].reads))
    return key, worker.name


refuse_args = constant_of_graph(api.refuse_args)
refuse_kwargs = constant_of_graph(api.refuse_kwargs)


def _refuse_gradients_of(function: Callable[..., Any]) -> None:
    if travels_by_name(function):
        return
    holder = getattr(function, "__self__", function)
    if any(tensor.requires_grad for tensor in tensors_in(holder)):
        raise TelegradError(
            f"A compiled function calls {_name(function)} elsewhere, which takes along tensors "
            "that need a gradient: it would be lost. Make a RemoteModule of it, or give these "
            "tensors as arguments."
        )


def _not_constant() -> Exception:
    sentence = (
        "What a compiled function calls elsewhere, and what it gives along besides tensors and "
        "numbers, must exist before: a function, a method of an object that was made outside, a "
        "string. Make such objects outside of the compiled function, or give their tensors."
    )
    return passing(TelegradError(sentence))


_arguments: dict[int, list[str]] = {}
"""Where the tensors are found that a compiled function was given, by the identity of its code."""


def _note_reads(reads: Reads, tensors: list[Tensor], code: CodeType, arguments: list[str]) -> None:
    reads.note(tensors)
    known = _arguments.setdefault(id(code), [])
    known += [name for name in arguments if name not in known]
    weakref.finalize(code, _arguments.pop, id(code), None)
    reads.arguments = _arguments_in


def _arguments_in(thread: int) -> list[Tensor]:
    return torch_private.arguments_in(thread, _arguments)


def give_key(known: str, key: str) -> str:
    """Have a site found under another key as well."""
    _sites[key] = named = replace(_sites[known], key=key)
    named.__dict__["reads"] = _sites[known].reads
    return key


def worker_info(to: str | int) -> WorkerInfo:
    """Who that is. Inlined by Dynamo."""
    if eras.roll is NEVER:
        raise AssertionError("a roll that never begins has begun")
    name, number = _name_and_number(to if isinstance(to, str) else constant(to))
    return WorkerInfo(name, number)


@constant_of_graph
def _name_and_number(to: str | int) -> tuple[str, int]:
    node = current_node()
    _watch(node)
    _note_code()
    found = node.members.find(to)
    return found.name, found.id


def ask(node: Node, worker: WorkerInfo, function: Callable[..., T], *args: Any) -> T:
    """Call a function on a worker while something is traced here.

    On a thread of its own: this one runs under fake tensors, and may not unpack what comes for
    others. And outside of any autograd context.
    """
    answered = node.runtime.condition()
    answers: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            answers.append(node.wait(node.call(worker, function, args, None)))
        except BaseException as error:
            errors.append(error)
        with answered:
            answered.notify_all()

    node.runtime.spawn(functools.partial(Variables().run, call))
    with answered:
        while not (answers or errors):
            answered.wait()
    for error in errors:
        raise error
    return answers[0]


def fingerprint(function: Callable[..., Any]) -> str:
    """On the owner: tells whether the code of a function is the same."""
    if not travels_by_name(function) and not isinstance(function, MethodType):
        function = type(function).__call__
    code = getattr(torch_private.as_written(function), "__code__", None)
    return f"torch {torch.__version__}" if code is None else _digest(repr(_parts(code)))


def _code_of(function: Callable[..., Any]) -> Any:
    """What has the code of a function: not the object that goes along, which may have no hash."""
    if travels_by_name(function):
        return function
    return getattr(function, "__func__", type(function))


def _parts(code: CodeType) -> tuple[Any, ...]:
    constants = [_parts(c) if isinstance(c, CodeType) else _plain(c) for c in code.co_consts]
    return code.co_code, code.co_names, constants


def _plain(constant: object) -> object:
    known = constant is None or isinstance(constant, bool | int | float | str | bytes | tuple)
    return constant if known else type(constant).__name__


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_objects = itertools.count(1)


def _name(function: Callable[..., Any]) -> str:
    """By what it is known. An object has no name, and two may look the same."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if travels_by_name(function):
        return f"{module}.{name or repr(function)}"
    return f"{module}.{name or type(function).__qualname__} of object {next(_objects)}"


def travels_by_name(function: Callable[..., Any]) -> bool:
    """Whether a function is sent as its name, and not with a state that may change."""
    if isinstance(function, MethodType | BuiltinFunctionType):
        return function.__self__ is None or isinstance(function.__self__, type | ModuleType)
    return isinstance(function, FunctionType | type) or hasattr(function, "__qualname__")


def _description(template: Template) -> Any:
    if template[0] == "constant" and callable(template[1]):
        return ("constant", _name(template[1]))
    return tuple(
        _description(item) if isinstance(item, tuple) and item else item for item in template
    )


torch_private.explain_constants(locate, _not_constant)
torch_private.guard_callables(locate)
