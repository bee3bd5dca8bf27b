"""What is done to gradients between the backward pass and the step.

A treatment is decided by the driver and carried out by the owners, on the way of the gradients into
the local optimizer. The gradients that the context holds stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiply by a factor: clipping by norm, and the inverse of a loss scale."""

    factor: float


@dataclass(frozen=True, slots=True)
class Clamp:
    """Bring each element into [-limit, limit]."""

    limit: float


Treatment = Scale | Clamp


def treat(gradients: Iterable[Tensor], treatments: Sequence[Treatment]) -> list[Tensor]:
    """New gradients, to which the treatments were applied in order."""
    treated = list(gradients)
    for treatment in treatments:
        treated = [_treat(gradient, treatment) for gradient in treated]
    return treated


def _treat(gradient: Tensor, treatment: Treatment) -> Tensor:
    match treatment:
        case Scale(factor):
            return gradient * factor
        case Clamp(limit) if gradient.is_sparse:
            gradient = gradient.coalesce()
            values = gradient.values().clamp(-limit, limit)
            return torch.sparse_coo_tensor(
                gradient.indices(), values, gradient.shape, is_coalesced=True
            )
        case Clamp(limit):
            return gradient.clamp(-limit, limit)


def norms(gradients: Iterable[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each gradient."""
    return [torch.linalg.vector_norm(_values(gradient), norm_type) for gradient in gradients]


def all_finite(gradients: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(_values(gradient)).all()) for gradient in gradients)


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def clipping(total_norm: Tensor, max_norm: float) -> Scale:
    """The treatment that brings the total norm down to `max_norm`; as torch computes it."""
    return Scale(float((max_norm / (total_norm + 1e-6)).clamp(max=1.0)))
