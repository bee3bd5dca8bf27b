"""On the caller: the shapes of what a remote function returns, asked of its owner.

Asked once for each call site and kind of arguments (types, fixed sizes, which sizes may change).
An answer holds while its guards do. The guards are evaluated on the caller's own sizes, which puts
them into the graph that is being traced: if a later call breaks one, torch traces again, and the
owner is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.compile import torch_private
from telegrad.compile.arguments import Template
from telegrad.compile.expressions import Formula, evaluate
from telegrad.compile.owner import Answer, IntSpec, TensorSpec, infer
from telegrad.compile.sites import Site, ask
from telegrad.rpc.errors import TelegradError
from telegrad.rpc.node import Node

Size = int | torch.SymInt

_answers: dict[Any, list[Answer]] = {}
_latest: dict[str, Answer] = {}


def outputs_of(
    node: Node,
    site: Site,
    tensors: Sequence[Tensor],
    ints: Sequence[Size],
    needs: Sequence[bool],
    unknown: Callable[[], Size],
) -> list[Tensor]:
    """Tensors with the shapes of what a call returns, made in the fake mode of the caller."""
    found: dict[int, Size] = {}

    def value(formula: Formula) -> Any:
        return evaluate(formula, [tensor.shape for tensor in tensors], ints, of_unknown)

    def of_unknown(number: int) -> Size:
        if number not in found:
            found[number] = unknown()
        return found[number]

    answer = _answer(node, site, tensors, ints, needs, value)
    for guard in answer.guards:
        if not value(guard):
            raise AssertionError(f"the owner's answer for {site.key} does not hold: {guard}")
    _latest[site.key] = answer
    return [
        torch.empty([value(size) for size in o.sizes], dtype=o.dtype, device=o.device)
        for o in answer.outputs
    ]


def _answer(
    node: Node,
    site: Site,
    tensors: Sequence[Tensor],
    ints: Sequence[Size],
    needs: Sequence[bool],
    value: Callable[[Formula], Any],
) -> Answer:
    specs = [_tensor_spec(t, n) for t, n in zip(tensors, needs, strict=True)]
    numbers = [IntSpec(torch_private.hint_of(i), isinstance(i, torch.SymInt)) for i in ints]
    known = _answers.setdefault((site.key, *map(_kind, specs), *map(_kind, numbers)), [])
    for answer in known:
        if all(torch_private.seems_true(value(guard)) for guard in answer.guards):
            return answer
    answer = ask(node, site.worker, infer, site.function, site.template, specs, numbers)
    known.append(answer)
    return answer


def _tensor_spec(tensor: Tensor, needs_gradient: bool) -> TensorSpec:
    return TensorSpec(
        tensor.dtype,
        tuple([torch_private.hint_of(size) for size in tensor.shape]),
        tuple([isinstance(size, torch.SymInt) for size in tensor.shape]),
        str(tensor.device),
        needs_gradient,
    )


def _kind(spec: TensorSpec | IntSpec) -> Any:
    """What of an argument decides whether an answer may serve again."""
    if isinstance(spec, IntSpec):
        return "dynamic" if spec.dynamic else spec.value
    sizes = tuple([None if d else s for s, d in zip(spec.sizes, spec.dynamic, strict=True)])
    return (spec.dtype, sizes, spec.device, spec.needs_gradient)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def result_template(key: str) -> Any:
    """How the outputs of the call that was traced last at a site make up its result."""
    answer = _latest[key]
    if answer.template is None:
        raise TelegradError(
            f"{key.split(' #')[0]!r} returns a {answer.kind}, which cannot be part of a compiled "
            "graph. Return tensors (in tuples, lists or dicts), refer to the result with "
            "rpc.remote, or make the call outside of the compiled function."
        )
    return answer.template


def is_known(key: str) -> bool:
    """Whether it is known what a call of this site returns."""
    return key in _latest


def note_result(key: str, template: Template | None, kind: str) -> None:
    """A call returned that was never traced: a node that runs outside of compiled functions."""
    if key not in _latest:
        _latest[key] = Answer((), template, (), kind)


def forget_answers() -> None:
    """For tests: ask the owners again."""
    _answers.clear()
