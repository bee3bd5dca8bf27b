"""One compilation for each kind of call, however many callers come at once.

`torch.compile` compiles when it is first called. Callers that come at the same moment all find
nothing compiled, and each compiles: with a dozen of them torch's limit on recompilations is
reached, and the module stays uncompiled or fails. So the first call of each *kind* (shapes and
types of the arguments, modes of torch) goes alone, and the others of its kind wait for it. What has
been compiled is called by all at once.

A kind is finer than what torch compiles for: a graph with dynamic sizes serves many of them. Then
the first call of a kind goes alone although nothing is compiled, which costs a moment and no more.

A module that calls itself through another worker would wait for itself here. So nobody waits longer
than `PATIENCE`: to compile twice is better than not to end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor

PATIENCE = 60.0
_MANY = 4096
"""Kinds that are remembered. Beyond, they begin anew: sizes that never come again are no use."""


class Compilation:
    """Lets calls of one compiled module through."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._known: set[object] = set()

    def __deepcopy__(self, _: object) -> Self:
        return type(self)()

    def forget(self) -> None:
        """The module has changed, so the next calls compile again."""
        self._known = set()

    @contextmanager
    def admit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """In this block a call is made, alone if it may compile."""
        kind = (_modes(), _kind(args), _kind(kwargs))
        known = self._known
        if kind not in known and self._turn.acquire(timeout=PATIENCE):
            try:
                if kind not in known:
                    with _keeping_what_backward_reads():
                        yield
                    if len(known) >= _MANY:
                        known.clear()
                    known.add(kind)
                    return
            finally:
                self._turn.release()
        yield


def _keeping_what_backward_reads() -> AbstractContextManager[Any]:
    """Compiled code may reuse the memory of what it saved for backward, and then `retain_graph`
    fails. The module's callers may want it, so it is compiled without."""
    patch: AbstractContextManager[Any] = torch._functorch.config.patch(donated_buffer=False)
    return patch


def _modes() -> object:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
    )


def _kind(value: Any) -> object:
    """What of an argument may decide whether it needs a compilation of its own."""
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, value.requires_grad, value.device)
    if isinstance(value, list | tuple):
        return (type(value), *[_kind(item) for item in value])
    if isinstance(value, dict):
        return (dict, *[(key, _kind(item)) for key, item in value.items()])
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    return type(value)
