"""The options of parameter groups: what changed since they were sent to the owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from telegrad.autograd.messages import MOST_OF_A_SEQUEL
from telegrad.wire.codec import Trust, Unpackable, pack, unpack

Options = dict[str, Any]

_ABSENT = object()
_ABSENCES = repeat(_ABSENT)


def changed_options(
    groups: Sequence[Mapping[str, Any]], sent: Sequence[Options]
) -> dict[int, Options]:
    """By the place of their group."""
    changed: dict[int, Options] = {}
    for index, (group, known) in enumerate(zip(groups, sent, strict=True)):
        # Each option is the very object that was sent, as before nearly every step; the group has
        # "params" besides, which is never sent.
        now = map(group.get, known, _ABSENCES)
        if len(group) == len(known) + 1 and all(map(is_, now, known.values())):
            continue
        news = {
            key: value
            for key, value in group.items()
            if value is not (old := known.get(key, _ABSENT))
            and key != "params"
            and not _same(value, old)
        }
        if news:
            changed[index] = news
    return changed


def without_params(group: Mapping[str, Any]) -> Options:
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def snapshot(options: Mapping[str, Any]) -> Options:
    """Options as they are now: schedulers change a tensor in place."""
    return {key: _as_it_is(value) for key, value in without_params(options).items()}


def _as_it_is(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return tuple(map(_as_it_is, value))
    return value


def _same(value: Any, sent: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(sent, Tensor) and torch.equal(value, sent)
    return type(value) is type(sent) and bool(value == sent)


def write_options(options: Mapping[int, Options]) -> bytes | None:
    """Options as bytes; None if they are more than a few numbers and words."""
    if not options:
        return b""
    try:
        packed = pack(dict(options), None, Trust.DATA)
    except Unpackable:
        return None
    if packed.tensors or packed.buffers or len(packed.meta) > MOST_OF_A_SEQUEL:
        return None
    return bytes(packed.meta)


def read_options(data: bytes) -> dict[int, Options]:
    """What `write_options` wrote."""
    options: dict[int, Options] = unpack(data, [], None, Trust.DATA) if data else {}
    return options
