"""On the caller: the shapes of what a remote function returns, asked of its owner.

Asked once for each call site and kind of arguments (types, fixed sizes, which sizes may change).
An answer holds while its guards do. The guards are evaluated on the caller's own sizes, which puts
them into the graph that is being traced: if a later call breaks one, torch traces again, and the
owner is asked again.

What comes when the graph runs is compared with what was said. Compiled code would read outside of
a tensor that is smaller than it was told, so a function that was redefined meanwhile, or does
something else for other numbers, must be noticed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.compile import torch_private
from telegrad.compile.arguments import Template, holds_made
from telegrad.compile.expressions import Formula, evaluate
from telegrad.compile.owner import Answer, IntSpec, TensorSpec, infer
from telegrad.compile.sites import Site, ask, begin_era, give_key
from telegrad.compile.tracing import constant_of_graph
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.node import Node
from telegrad.wire.layouts import contiguous_strides

Size = int | torch.SymInt
Expected = tuple[torch.dtype, tuple[int, ...] | None, tuple[int, ...], bool]
"""Type, sizes and strides of an output, and whether gradients flow through it. Sizes that depend
on data are None."""
Kind = tuple[Any, ...]

_answers: dict[str, list[tuple[Kind, Answer]]] = {}
_latest: dict[str, Answer] = {}
_failed: dict[str, Exception] = {}
"""Why it could not be found out what a call returns, until that is told."""


class _Unknown(Exception):
    """A size depends on data."""


def outputs_of(
    node: Node,
    site: Site,
    tensors: Sequence[Tensor],
    ints: Sequence[Size],
    needs: Sequence[bool],
    unknown: Callable[[], Size],
) -> list[Tensor]:
    """Tensors with the shapes of what a call returns, made in the fake mode of the caller."""
    value = _evaluator(tensors, ints, unknown)
    answer = find_answer(node, site, tensors, ints, needs)
    for guard in answer.guards:
        if not value(guard):
            raise AssertionError(f"the owner's answer for {site.key} does not hold: {guard}")
    return [_made(output, value) for output in answer.outputs]


def _made(output: Any, value: Callable[[Formula], Any]) -> Tensor:
    sizes = [value(size) for size in output.sizes]
    if output.strides is None:
        return torch.empty(sizes, dtype=output.dtype, device=output.device)
    strides = [value(stride) for stride in output.strides]
    return torch.empty_strided(sizes, strides, dtype=output.dtype, device=output.device)


def _evaluator(
    tensors: Sequence[Tensor], ints: Sequence[Size], unknown: Callable[[], Size]
) -> Callable[[Formula], Any]:
    found: dict[int, Size] = {}

    def of_unknown(number: int) -> Size:
        if number not in found:
            found[number] = unknown()
        return found[number]

    def value(formula: Formula) -> Any:
        shapes = [tensor.shape for tensor in tensors]
        strides = [tensor.stride() for tensor in tensors]
        return evaluate(formula, shapes, strides, ints, of_unknown)

    return value


def find_answer(
    node: Node,
    site: Site,
    tensors: Sequence[Tensor],
    ints: Sequence[Size],
    needs: Sequence[bool],
) -> Answer:
    """What the owner says of a call with such arguments."""
    made = holds_made(site.template)
    specs = [
        _tensor_spec(t, n, place in made)
        for place, (t, n) in enumerate(zip(tensors, needs, strict=True))
    ]
    numbers = [IntSpec(torch_private.hint_of(i), isinstance(i, torch.SymInt)) for i in ints]
    kind = (*map(_kind, specs), *map(_kind, numbers))
    value = _evaluator(tensors, ints, _none)
    if site.asks_anew():
        _answers[site.key] = []
    known = _answers.setdefault(site.key, [])
    for its_kind, answer in known:
        if its_kind == kind and _holds(answer, value):
            break
    else:
        answer = ask(node, site.worker, infer, site.function, site.template, specs, numbers)
        known.append((kind, answer))
    _latest[site.key] = answer
    return answer


def look_ahead(
    node: Node,
    site: Site,
    tensors: Sequence[Tensor],
    ints: Sequence[Size],
    needs: Sequence[bool],
) -> None:
    """Find out what a call returns. An error is raised by `settled`, where Dynamo lets it pass."""
    try:
        find_answer(node, site, tensors, ints, needs)
    except Exception as error:
        _failed[site.key] = error


def _none() -> Size:
    raise _Unknown


def _holds(answer: Answer, value: Callable[[Formula], Any]) -> bool:
    try:
        return all(torch_private.seems_true(value(guard)) for guard in answer.guards)
    except _Unknown:
        return False


def _tensor_spec(tensor: Tensor, needs_gradient: bool, behind_reference: bool) -> TensorSpec:
    strides: tuple[Size, ...] = tensor.stride()
    return TensorSpec(
        tensor.dtype,
        tuple([torch_private.hint_of(size) for size in tensor.shape]),
        tuple([isinstance(size, torch.SymInt) for size in tensor.shape]),
        None if behind_reference else tuple(map(torch_private.hint_of, strides)),
        str(tensor.device),
        needs_gradient,
    )


def _kind(spec: TensorSpec | IntSpec) -> Any:
    """What of an argument decides whether an answer may serve again."""
    if isinstance(spec, IntSpec):
        return None if spec.dynamic else spec.value
    sizes = tuple([None if d else s for s, d in zip(spec.sizes, spec.dynamic, strict=True)])
    return (spec.dtype, sizes, _order_of(spec), spec.device, spec.needs_gradient)


def _order_of(spec: TensorSpec) -> Any:
    """How a tensor lies in memory, as far as it is the same for all sizes."""
    strides = spec.strides
    if strides is None or strides == contiguous_strides(spec.sizes):
        return None
    return ("order", *_order(strides)) if any(spec.dynamic) else strides


def _order(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=lambda d: (-strides[d], d)))


def _lies_so(order: Any, tensor: Tensor) -> bool:
    strides = tensor.stride()
    if order is None:
        return strides == contiguous_strides(tuple(tensor.shape))
    return bool(strides == order or ("order", *_order(strides)) == order)


# When the graph runs.


def expected(
    site: Site, tensors: Sequence[Tensor], ints: Sequence[int], needs: Sequence[bool]
) -> Sequence[Expected] | None:
    """What the outputs of a call with these arguments must be; None where that is not known."""
    seen = (*[(t.dtype, t.shape, t.stride()) for t in tensors], *ints, *needs)
    known = site.expected.get(seen, _ABSENT)
    if known is _ABSENT:
        if len(site.expected) >= _MANY:
            site.expected.clear()
        known = site.expected[seen] = _expected(site, tensors, ints, needs)
    return known  # type: ignore[no-any-return]


_ABSENT = object()
_MANY = 256


def _expected(
    site: Site, tensors: Sequence[Tensor], ints: Sequence[int], needs: Sequence[bool]
) -> Sequence[Expected] | None:
    value = _evaluator(tensors, ints, _none)
    for kind, answer in reversed(_answers.get(site.key, ())):
        if _is_of_kind(kind, site, tensors, ints, needs) and _holds(answer, value):
            return [_expected_output(output, value) for output in answer.outputs]
    return None


def _is_of_kind(
    kind: Kind, site: Site, tensors: Sequence[Tensor], ints: Sequence[int], needs: Sequence[bool]
) -> bool:
    made = holds_made(site.template)
    of_tensors, of_ints = kind[: len(tensors)], kind[len(tensors) :]
    return all(
        of[0] == tensor.dtype
        and len(of[1]) == tensor.dim()
        and all(s is None or s == t for s, t in zip(of[1], tensor.shape, strict=True))
        and (place in made or _lies_so(of[2], tensor))
        and of[4] == need
        for place, (of, tensor, need) in enumerate(zip(of_tensors, tensors, needs, strict=True))
    ) and all(of is None or of == number for of, number in zip(of_ints, ints, strict=True))


def _expected_output(output: Any, value: Callable[[Formula], Any]) -> Expected:
    try:
        sizes = tuple([int(value(size)) for size in output.sizes])
        if output.strides is None:
            strides = contiguous_strides(sizes)
        else:
            strides = tuple([int(value(stride)) for stride in output.strides])
        return output.dtype, sizes, strides, output.needs_gradient
    except _Unknown:
        return output.dtype, None, (), output.needs_gradient


def as_expected(
    site: Site,
    outputs: Sequence[Tensor],
    said: Sequence[Expected] | None,
    differentiable: Container[int],
) -> list[Tensor]:
    """The outputs as the graph wants them: what was said, or an error. `differentiable` are the
    places of those through which gradients would flow."""
    if said is None:
        return [output.contiguous() for output in outputs]
    if len(said) != len(outputs):
        raise _is_stale(site, f"{len(outputs)} tensors", f"{len(said)}")
    found = []
    for place, (output, wanted) in enumerate(zip(outputs, said, strict=True)):
        dtype, sizes, strides, flows = wanted
        if not flows and place in differentiable:
            raise _has_thawed(site)
        if sizes is None:
            found.append(output.contiguous())
            continue
        if output.dtype is not dtype or output.shape != sizes:
            came = f"a tensor of {output.dtype} and shape {tuple(output.shape)}"
            raise _is_stale(site, came, f"{dtype} and {sizes}")
        if output.stride() != strides:
            output = torch.empty_strided(sizes, strides, dtype=dtype).copy_(output)
        found.append(output)
    return found


def _is_stale(site: Site, came: str, said: str) -> TelegradError:
    forget(site)
    return TelegradError(
        f"{site.name} returned {came}; {said} was found out when the compiled function was traced. "
        "The function has changed since then, or what it returns depends on more than the shapes "
        "of its arguments. The next call traces anew; if this comes again, declare what it returns "
        "with telegrad.compile.declare_fake, or call it outside of the compiled function."
    )


def _has_thawed(site: Site) -> TelegradError:
    """The graph takes the result for one that needs no gradient: it would be lost in silence."""
    forget(site)
    return TelegradError(
        f"{site.name} returned a tensor that needs a gradient; when the compiled function was "
        "traced, it needed none. Parameters that it uses have been thawed since then, with "
        "requires_grad_(True). The next call traces anew. RemoteModule.requires_grad_ is noticed "
        "before the call, in compiled functions of the process that calls it."
    )


@constant_of_graph
def settled(key: str) -> str:
    """The key of a call site of which it is known what it returns; that is a part of it.

    Caches on disk know a graph by its text. The same text may be about functions that return
    something else today, such as a module with more features.
    """
    failed = _failed.pop(key, None)
    if failed is not None:
        raise failed
    answer = _latest.get(key)
    if answer is None:
        return key
    digest = hashlib.sha256(repr(answer).encode()).hexdigest()[:16]
    found = give_key(key, f"{key}.{digest}")
    # Two calls in one function may return the same for arguments of two kinds.
    known = _answers.setdefault(found, [])
    known += [each for each in _answers.get(key, ()) if each[1] == answer and each not in known]
    _latest[found] = answer
    return found


@constant_of_graph
def result_template(key: str) -> Any:
    """How the outputs of the call that was traced last at a site make up its result."""
    return template_of(key, _latest[key])


def template_of(key: str, answer: Answer) -> Template:
    if answer.template is None:
        raise TelegradError(
            f"{key.split(' #')[0]!r} returns a {answer.kind}, which cannot be part of a compiled "
            "graph. Return tensors (in tuples, lists or dicts), refer to the result with "
            "rpc.remote, or make the call outside of the compiled function."
        )
    return answer.template


def note_result(key: str, template: Template | None, kind: str) -> None:
    """A call returned that was never traced: a node that runs outside of compiled functions."""
    if key not in _latest:
        _latest[key] = Answer((), template, (), kind)


def drop(site: Site) -> None:
    """A call that was only asked about for another is not made by a graph."""
    _answers.pop(site.key, None)
    _latest.pop(site.key, None)


def forget(site: Site) -> None:
    """What was said of a call does not hold: ask again."""
    _answers.get(site.key, []).clear()
    site.expected.clear()
    begin_era()
