"""Everything that this room uses of torch without torch promising it.

Each private call sits behind one small function here, and nowhere else. What is relied upon:

* Fake tensors with one symbol for each dynamic size, and a list of the guards on those symbols.
* A compiled function knows the function that it was made from.
* Dynamo inlines a Python function, `polyfills.accumulate_grad`, for each leaf of a `backward` that
  it traces; so a function of ours in its place sees all leaves with their gradients.
* Dynamo's settings can be changed by a block in the code that it traces.
* Dynamo makes variables of objects by one method, and knows by then which it has seen.
* Dynamo looks up how to trace `is` and `is not` in a table, and asks one method of each kind of
  object for its hash when the object is used as a key.
* Dynamo guards a constant by one method of its guard builder, and takes functions as guards.
* Dynamo knows the code that it compiles, and forgets the graphs of one when it is told to.
* Dynamo makes constants of what a function of ours returns by one function, and lets assertions
  that are raised meanwhile pass.
* Dynamo says when a graph is complete; its placeholders know the tensors that they stand for, and
  expressions that find them in the frame of the function, whose code it remembers.
* Dynamo traces a call of one of torch's functions by one method of its variable.
* An operator holds the function that dispatches it, and calls that function.
* The record that torch keeps of the types `ProcessGroup` and `DeviceMesh` has a place for a guard
  function, and says which of their methods are folded or traced.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import polyfills, symbolic_convert
from torch._dynamo.decorators import DynamoConfigPatchProxy
from torch._dynamo.eval_frame import remove_from_cache
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts, install_guard
from torch._dynamo.source import AttrSource, ConstantSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator, compare_op_handlers
from torch._dynamo.utils import orig_code_map
from torch._dynamo.variables import functions
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import (
    FrozenDataClassVariable,
    UserDefinedObjectVariable,
)
from torch._guards import ChainedSource
from torch._library import opaque_object
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
    statically_known_true,
)

from telegrad.compile.expressions import Formula, encode


class Fakes:
    """Fake tensors, and what was asked about their sizes."""

    def __init__(self) -> None:
        self._shapes = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self._symbols: dict[Any, Formula] = {}
        self._guards: list[Formula] = []

    def tensor(
        self,
        place: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        dynamic: tuple[bool, ...],
        strides: tuple[int, ...] | None,
        device: str,
        needs_gradient: bool,
    ) -> Tensor:
        """A fake tensor whose dynamic sizes are symbols, one for each."""
        # DYNAMIC, not DUCK: two sizes that are equal now may differ in the next call.
        kinds = [DimDynamic.DYNAMIC if d else DimDynamic.STATIC for d in dynamic]
        example = (
            torch.empty(sizes, dtype=dtype, device=device)
            if strides is None
            else torch.empty_strided(sizes, strides, dtype=dtype, device=device)
        )
        fake: Tensor = self._mode.from_tensor(
            example,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
            source=ConstantSource(f"argument{place}"),
        )
        for dimension, size in enumerate(fake.shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                symbol = size.node.expr
                self._symbols.setdefault(symbol, ("input", place, dimension))
                # Torch reasons about symbols as if they were at least 2.
                self._guards.append(("GreaterThan", self._symbols[symbol], 2))
        for dimension, stride in enumerate(fake.stride()):
            if isinstance(stride, torch.SymInt) and stride.node.expr.is_symbol:
                self._symbols.setdefault(stride.node.expr, ("stride", place, dimension))
        if not needs_gradient:
            return fake
        # What arrives is not a leaf: the function may change it.
        with self._mode, torch.enable_grad():
            leaf = fake.detach().requires_grad_()
            return torch.empty_strided(fake.shape, fake.stride(), dtype=dtype).copy_(leaf)

    def integer(self, place: int, value: int) -> Any:
        """An integer that is a symbol."""
        source = ConstantSource(f"integer{place}")
        symbol = self._shapes.create_symbol(
            value, source, DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        self._symbols[symbol] = ("int", place)
        return self._shapes.create_symintnode(symbol, hint=value, source=source)

    def like(self, tensor: Tensor) -> Tensor:
        """A fake of a real tensor, with the sizes it has."""
        fake: Tensor = self._mode.from_tensor(tensor.detach(), static_shapes=True)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            with self._mode:
                return torch.nn.Parameter(fake, tensor.requires_grad)
        return fake

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._mode:
            yield

    def is_contiguous(self, tensor: Tensor) -> bool:
        """Whether a fake tensor is contiguous whatever its sizes are. No guard comes of it."""
        step: Any = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            if not statically_known_true(stride == step):
                return False
            step = step * size
        return True

    def formula(self, size: int | torch.SymInt) -> Formula:
        """A size of an output in terms of the arguments."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        for symbol in sorted(free_unbacked_symbols(size), key=str):
            self._symbols.setdefault(symbol, ("unknown", len(self._symbols)))
        return encode(size.node.expr, self._symbols)

    def guards(self) -> tuple[Formula, ...]:
        asked = [encode(guard.expr, self._symbols) for guard in self._shapes.guards]
        return (*self._guards, *asked)


_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


class above_autograd:
    """Inside of a kernel: let operations be recorded by autograd as they are outside of it.

    A kernel of ours runs what comes for others meanwhile, and makes graph nodes of its own.
    """

    __slots__ = ("_excluded",)

    def __enter__(self) -> None:
        self._excluded = [key for key in _AUTOGRAD if _is_excluded(key)]
        for key in self._excluded:
            _set_excluded(key, False)

    def __exit__(self, *_: object) -> None:
        for key in self._excluded:
            _set_excluded(key, True)


set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
"""What `torch.set_grad_enabled` does, without the object that undoes it."""


class _Straight:
    """Stands for the function that dispatches an operator, and leaves it out where it adds nothing.

    That is when a compiled function runs: nothing traces, fakes, profiles or differentiates. The
    way through the dispatcher and back to Python costs more than many a kernel.
    """

    __slots__ = ("_dispatch", "_kernel", "_place")

    def __init__(
        self, dispatch: Callable[..., Any], kernel: Callable[..., Any], place: int
    ) -> None:
        self._dispatch = dispatch
        self._kernel = kernel
        self._place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs
            or _is_grad_enabled()
            or _modes_of_dispatch()
            or _is_profiling()
            or _is_excluded(_AUTOGRAD[0])
            or type(args[self._place]) is not Tensor
        ):
            return self._dispatch(*args, **kwargs)
        return self._kernel(*args)

    def __hash__(self) -> int:
        return hash(self._dispatch)

    def __eq__(self, other: object) -> bool:
        return self is other or self._dispatch == other


_is_grad_enabled = torch.is_grad_enabled
_modes_of_dispatch = torch._C._len_torch_dispatch_stack
_is_profiling = torch._C._autograd._profiler_enabled


def go_straight(operator: Any, kernel: Callable[..., Any], place: int) -> None:
    """Have graphs call the kernel of an operator themselves. Its argument at `place` is a tensor,
    by which those that only stand for others are known."""
    operator._op = _Straight(operator._op, kernel, place)


def hint_of(size: int | torch.SymInt) -> int:
    """A size as it is in the call that is traced now, without a guard on it."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    return 8 if hint is None else int(hint)


def depends_on_data(size: int | torch.SymInt) -> bool:
    """Whether a size is known only when the function runs."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def seems_true(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds in the call that is traced now, without a guard on it."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    return bool(condition.node.hint)


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it was before `torch.compile`."""
    while hasattr(function, "_torchdynamo_orig_callable"):
        function = function._torchdynamo_orig_callable
    return function


class Collected:
    """What a traced backward finds, while it is active: leaves and their gradients."""

    def __init__(self) -> None:
        self.active = False
        self.leaves: list[Tensor] = []
        self.gradients: list[Tensor] = []


collected = Collected()
_accumulate = polyfills.accumulate_grad


def _collect_gradient(x: Tensor, variable_grad: Any, new_grad: Any) -> Any:
    """Inlined by Dynamo for each leaf; returns what is to become of its `.grad`."""
    if not collected.active:
        return _accumulate(x, variable_grad, new_grad)
    if new_grad is not None:
        collected.leaves.append(x)
        collected.gradients.append(new_grad)
    return variable_grad


def collect_gradients() -> None:
    """Have traced backward passes of ours see their leaves; others go on as before."""
    polyfills.accumulate_grad = _collect_gradient


collect_gradients()

TRACING_BACKWARD = DynamoConfigPatchProxy(torch._dynamo.config.patch(trace_autograd_ops=True))
"""In this block Dynamo traces `Tensor.backward`; elsewhere it does as the user's settings say.

`torch._dynamo.patch_dynamo_config` makes such objects, for fewer settings. Dynamo enters and leaves
the block while it traces, and leaves it also if it gives up."""


class Opaque:
    """The record that torch keeps of a type whose objects are constants of a graph."""

    def __init__(self, cls: type) -> None:
        found: Any = opaque_object._resolve_opaque_type_info(cls)
        if found is None:
            raise ImportError(
                f"torch {torch.__version__} does not know {cls.__name__} as an opaque type: "
                "telegrad cannot guard it. Use a torch version that telegrad supports (2.13)."
            )
        self._record = found
        self._guard = found.guard_fn

    def guard(self, identity: Callable[[Any], list[Any]]) -> None:
        """Have objects guarded by what `identity` says of them, besides torch's own guard."""
        own = self._guard

        def everything(value: Any) -> list[Any]:
            return [*(own(value) if own is not None else ()), *identity(value)]

        self._record.guard_fn = everything

    def fold(self, method: str) -> None:
        """Have the result of a method be a constant; the guard must see to it that it is."""
        self._record.members.setdefault(method, opaque_object.MemberType.USE_REAL)

    def trace(self, method: str) -> None:
        """Have a method traced."""
        self._record.members.setdefault(method, opaque_object.MemberType.INLINED)


def once_traced(tell: Callable[[list[Tensor], CodeType, list[str]], None]) -> None:
    """When the graph that is being traced is complete, say which tensors it reads: those that are
    there before it is called; the code that it is of, and where the arguments are found."""
    output = InstructionTranslator.current_tx().output
    code: CodeType = output.root_tx.f_code

    def finish() -> None:
        found: list[Tensor] = []
        arguments: list[str] = []
        for node in output.placeholders:
            given = node.meta.get("grapharg")
            if given is None or not isinstance(given.example, Tensor):
                continue
            source: Any = given.source
            if _is_argument(source):
                arguments.append(source.name)
            else:
                found.append(given.example)
                if isinstance(source, ChainedSource) and _is_argument(source.get_base()):
                    arguments.append(source.name)
        tell(found, code, arguments)

    output.add_cleanup_hook(finish)


def _is_argument(source: Any) -> bool:
    return isinstance(source, LocalSource) and not source.is_derefed_cell_contents


def arguments_in(thread: int, names: Mapping[int, Sequence[str]]) -> list[Tensor]:
    """The tensors that a thread gave to the compiled function that it runs now. `names` says where
    they are found, by the identity of the function's code."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = orig_code_map.get(frame.f_code)
        if code is not None and id(code) in names:
            places = {"L": frame.f_locals, "G": frame.f_globals}
            return [t for name in names[id(code)] if (t := _look_up(name, places)) is not None]
        frame = frame.f_back
    return []


def _look_up(name: str, places: dict[str, Any]) -> Tensor | None:
    try:
        found = eval(name, places)
    except Exception:
        return None  # Let go of by the function, or found by a way of Dynamo's own.
    return found if isinstance(found, Tensor) else None


def code_being_traced() -> CodeType | None:
    """The code of the function that Dynamo compiles now, if it does; not of one that it inlines."""
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    return None if translator is None else translator.output.root_tx.f_code


PASSES_THROUGH_DYNAMO = AssertionError
"""Errors of this class that are raised in a trace reach the caller as they are."""


def explain_constants(function: Callable[..., Any], refusal: Callable[[], Exception]) -> None:
    """Have an error raised, in the place of Dynamo's, if something that is given to a function of
    which the result is a constant is none: an object that the compiled function makes itself, say,
    which exists only when the graph runs."""
    invoke = functions.invoke_and_store_as_constant

    def explained(tx: Any, called: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if called is function and not all(map(_exists, args)):
            raise refusal()
        return invoke(tx, called, name, args, kwargs)

    functions.invoke_and_store_as_constant = explained  # type: ignore[assignment]


def _exists(variable: Any) -> bool:
    if isinstance(variable, LazyVariableTracker):
        variable = variable.realize()
    if isinstance(variable, UserDefinedObjectVariable) and variable.source is not None:
        return True
    try:
        variable.as_python_constant()
    except NotImplementedError:
        return False
    return True


def forget_graphs(code: CodeType) -> None:
    """Have no graphs of a function any more. None of them may be running."""
    remove_from_cache(code)


def trace_instead(substitutes: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Have Dynamo trace functions of ours in the place of some of torch's.

    `torch.compiler.substitute_in_graph` does so for functions that Dynamo has no rule for.
    """
    call = TorchInGraphFunctionVariable.call_function

    def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = substitutes.get(variable.value)
        if ours is None:
            return call(variable, tx, args, kwargs)
        return VariableTracker.build(tx, ours).call_function(tx, args, kwargs)

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign, assignment]


def guard_identity(classes: tuple[type, ...]) -> None:
    """Have compiled functions notice when `is` and `is not` have another object to compare."""

    def guarded(compare: Callable[..., Any]) -> Callable[..., Any]:
        def handler(tx: Any, args: Any, kwargs: Any) -> Any:
            values = [variable.get_real_python_backed_value() for variable in args]
            # What is compared with None is known by its type, which Dynamo guards by itself.
            if all(value is not None for value in values) and any(
                isinstance(value, classes) for value in values
            ):
                for variable in args:
                    if variable.source is not None:
                        guard = variable.source.make_guard(GuardBuilder.ID_MATCH)
                        install_guard(guard)
            return compare(tx, args, kwargs)

        return handler

    for name in ("is", "is not"):
        compare_op_handlers[name] = guarded(compare_op_handlers[name])


def guard_aliases(classes: tuple[type, ...]) -> None:
    """Have compiled functions notice when what was one object under two names is two.

    Dynamo makes one variable of them, and guards only one name if the other has another scope, as
    an argument and a global have.
    """
    build = VariableBuilder.__call__

    def guarded(builder: Any, value: Any) -> Any:
        if isinstance(value, classes) and value in builder.tx.output.side_effects:
            install_guard(builder.source.make_guard(GuardBuilder.ID_MATCH))
        return build(builder, value)

    VariableBuilder.__call__ = guarded  # type: ignore[method-assign, assignment]


def guard_signs_of_zero() -> None:
    """Have compiled functions notice when a float that was 0.0 is -0.0, which is equal to it but
    not the same: a remote function may divide by it."""
    match = GuardBuilder.EQUALS_MATCH

    def guarded(builder: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        match(builder, guard, *args, **kwargs)
        zero = builder.get(guard)
        if type(zero) is float and zero == 0:
            sign = math.copysign(1, zero)

            def has_that_sign(value: Any) -> bool:
                return math.copysign(1, value) == sign

            builder.get_guard_manager(guard).add_lambda_guard(
                has_that_sign,
                get_verbose_code_parts(f"the sign of {builder.arg_ref(guard)} is {sign}", guard),
                guard.user_stack,
            )

    functools.update_wrapper(guarded, match)
    GuardBuilder.EQUALS_MATCH = guarded  # type: ignore[method-assign]


def guard_keys(attributes: Mapping[type, Sequence[str]]) -> None:
    """Have compiled functions notice when another object of these classes is used as a key: one of
    which any of the attributes differs."""

    def guard(variable: Any) -> None:
        if variable.source is None:
            return
        for path in attributes.get(type(variable.value), ()):
            source = functools.reduce(AttrSource, path.split("."), variable.source)
            install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))

    def guarded(hash_of: Callable[..., Any]) -> Callable[..., Any]:
        def hash_impl(variable: Any, tx: Any) -> Any:
            guard(variable)
            return hash_of(variable, tx)

        return hash_impl

    kinds: tuple[Any, ...] = (UserDefinedObjectVariable, FrozenDataClassVariable)
    for kind in kinds:
        kind.hash_impl = guarded(kind.hash_impl)
