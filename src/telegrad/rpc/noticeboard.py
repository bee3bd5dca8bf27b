"""What the workers of a job write for each other in a store, as JSON.

The store may be open to anyone: what stands there may be of strangers, who can keep a job from
starting but must not make a worker believe anything (see `entries`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from telegrad.rpc.errors import RendezvousError


class Noticeboard:
    """A store as one worker reads and writes it. `incarnation` tells its claims from others'."""

    def __init__(self, store: Store, name: str, incarnation: int, timeout: float) -> None:
        self._store: Store | None = store
        self.timeout = timeout
        self._name = name
        self._incarnation = incarnation

    @property
    def store(self) -> Store:
        if self._store is None:
            raise RendezvousError(f"worker {self._name!r} has left its job")
        return self._store

    def close(self) -> None:
        """Let go of the store: its connection, and its server if that is here, end with it."""
        self._store = None

    def room(self, name: str) -> Noticeboard:
        """A board of its own for some of the workers."""
        store = PrefixStore(name, self.store)
        return Noticeboard(store, self._name, self._incarnation, self.timeout)

    def claim(self, key: str, value: str) -> bool:
        """Whether we are the first to write this entry."""
        mine = f"{value} {self._incarnation}"
        return bool(self.store.compare_set(key, "", mine).decode() == mine)

    def put(self, key: str, value: object) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str, whom: str) -> Any:
        try:
            return json.loads(self.store.get(key))
        except (ValueError, RecursionError):
            raise not_ours(key) from None
        except (RuntimeError, dist.DistError) as error:
            raise RendezvousError(
                f"worker {self._name!r} waited {self.timeout:g} s for {whom}, which did not "
                f"join: is it running, with the same init_method and world_size? ({error})"
            ) from None

    def present_ranks(self) -> Iterator[int]:
        """Of the workers that are in a job without a world size."""
        for number in range(1, self.store.add("arrivals", 0) + 1):
            rank = self.get(f"arrival {number}", "an earlier worker")
            if type(rank) is int and self.store.check([f"worker {rank}"]):
                yield rank


def not_ours(entry: str) -> RendezvousError:
    return RendezvousError(
        f"the store holds under {entry!r} what no worker wrote: can strangers write to it?"
    )
