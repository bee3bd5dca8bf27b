"""What a backward pass can begin at."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from telegrad.autograd.errors import AutogradError


def check_roots(roots: Sequence[Tensor]) -> None:
    """Refuse, by its place, a root from which no gradient can be computed."""
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    for place, root in enumerate(roots):
        if not root.requires_grad:
            raise AutogradError(f"requires_grad not set on root {place}.")
        if root.numel() != 1:
            raise AutogradError(
                f"Root {place} is not a scalar, all roots need to be scalar; its shape is "
                f"{tuple(root.shape)}. Reduce it first, for instance with .sum()."
            )
        if root.grad_fn is None:
            raise AutogradError(
                f"Root {place} does not have a valid gradient function: it is a leaf, not the "
                "result of a computation."
            )
