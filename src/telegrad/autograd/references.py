"""`RRef.backward`: a pass that begins at the tensor behind a reference, on the worker that owns it.

The owner is the initiator. Whoever else has the reference asks it to begin, and waits for the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from telegrad.autograd.errors import AutogradError
from telegrad.autograd.messages import Options
from telegrad.autograd.roots import check_roots
from telegrad.rpc.reference_messages import ReferenceId

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd
    from telegrad.rpc.rref import RRef

BACKWARD = "autograd.backward"
NO_CONTEXT = -1


def backward_from(service: Autograd, rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """On any worker that has the reference."""
    rref._check_usable("backward()")
    if rref.is_owner():
        backward_on_owner(service, rref._reference, context_id, retain_graph)
        return
    if context_id == NO_CONTEXT:
        raise AutogradError(
            "User RRefs require 'dist_autograd_ctx_id' to be specified: this worker does not own "
            f"{rref!r}. Call backward(context_id) with the id of a telegrad.autograd.context()."
        )
    service.node.request(rref.owner(), BACKWARD, tuple(rref._reference), context_id, retain_graph)


def backward_on_owner(
    service: Autograd, reference: ReferenceId, context_id: int, retain_graph: bool
) -> None:
    root = service.node.values.value(reference)
    if not isinstance(root, Tensor):
        raise AutogradError(
            f"RRef should contain a tensor for .backward(), but {reference} refers to a "
            f"{type(root).__name__}."
        )
    if context_id == NO_CONTEXT:
        root.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return
    context = service.context(context_id)
    check_roots([root])
    service.backward(context, [root], Options(retain_graph=retain_graph))
