"""Stands for `torch.distributed.autograd`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from telegrad.autograd import api as native
from telegrad.autograd.api import autograd_of, require_context, retrieve_context
from telegrad.autograd.context import COUNTER_MASK, WORKER_SHIFT, Context, refuse_nested, working_in
from telegrad.rpc.errors import TelegradError

__all__ = ["context", "is_available"]


def is_available() -> bool:
    return True


class DistAutogradContext:
    """One worker's part of a context, as torch shows it."""

    def __init__(self, native_context: Context) -> None:
        self._native = native_context

    def _context_id(self) -> int:
        return self._native.id

    def _send_functions(self) -> dict[int, Any]:
        """The node of each send, by the number of its message, in the order of sending."""
        return {number: record.node for number, record in self._native.sends.items()}

    def _recv_functions(self) -> dict[int, Any]:
        return {number: record.nodes[0] for number, record in self._native.recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        return set(self._native.known_workers)


_entered: dict[int, Any] = {}


def _new_context() -> DistAutogradContext:
    """Make a context and work in it until `_release_context`."""
    refuse_nested()
    made = autograd_of().new_context()
    inside = working_in(made)
    inside.__enter__()
    _entered[made.id] = inside
    return DistAutogradContext(made)


def _release_context(context_id: int) -> None:
    inside = _entered.pop(context_id, None)
    if inside is not None:
        inside.__exit__(None, None, None)
    autograd_of().release(context_id)


class context:
    """Calls made in this block are recorded for `backward`; gives the id of the context."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context._context_id()

    def __exit__(self, *error: object) -> None:
        _release_context(self.autograd_context._context_id())


def backward(context_id: int, roots: list[Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of `roots` on every worker that had a part in making them.

    What a function raises on this worker is told as it is told of others: with the worker.
    """
    try:
        native.backward(context_id, roots, retain_graph)
    except (TelegradError, TypeError):
        raise
    except Exception as error:
        raise RuntimeError(f"Error on Node {autograd_of().node.info.id}: {error}") from error


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    return native.get_gradients(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(retrieve_context(context_id))


def _current_context() -> DistAutogradContext:
    return DistAutogradContext(require_context())


def _is_valid_context(context_id: int) -> None:
    retrieve_context(context_id)


def _get_max_id() -> int:
    worker: int = autograd_of().node.info.id
    return (worker << WORKER_SHIFT) + COUNTER_MASK


def _get_debug_info() -> dict[str, str]:
    return {name: str(count) for name, count in autograd_of().counts().items()}


def _init(worker_id: int) -> None:
    """Nothing to do: a node brings its autograd with it."""
