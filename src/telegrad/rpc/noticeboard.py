"""What the workers of a job write for each other in a store, as JSON.

The store may be open to anyone: what stands there may be of strangers, who can keep a job from
starting but must not make a worker believe anything (see `entries`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from telegrad.rpc.errors import RendezvousError

LEAST_PATIENCE = 0.5
"""So many seconds a worker waits for an entry, also if its time to join is over."""


class WaitedInVain(RendezvousError):
    """An entry did not come in time."""


class Noticeboard:
    """A store as one worker reads and writes it. `incarnation` tells its claims from others'.

    The worker has `timeout` seconds to join, from the moment that it gets its board.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        incarnation: int,
        timeout: float,
        until: float | None = None,
    ) -> None:
        self._store: Store | None = store
        self.timeout = timeout
        self.incarnation = incarnation
        self._name = name
        self._until = time.monotonic() + timeout if until is None else until

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
        return Noticeboard(store, self._name, self.incarnation, self.timeout, self._until)

    def claim(self, key: str, value: str) -> bool:
        """Whether we are the first to write this entry."""
        mine = f"{value} {self.incarnation}"
        return bool(self.store.compare_set(key, "", mine).decode() == mine)

    def put(self, key: str, value: object) -> None:
        self.store.set(key, json.dumps(value))

    def get(self, key: str, whom: str | Callable[[], str]) -> Any:
        """An entry, when it is there. `whom` it is waited for is said if it does not come."""
        try:
            # By its own timeout a store that others use, too, might wait for longer or less.
            left = max(self._until - time.monotonic(), LEAST_PATIENCE)
            self.store.wait([key], timedelta(seconds=left))
        except (RuntimeError, dist.DistError) as error:
            if time.monotonic() < self._until:
                raise self._no_answer(error) from None
            awaited = whom if isinstance(whom, str) else whom()
            raise WaitedInVain(
                f"worker {self._name!r} waited {self.timeout:g} s for {awaited}, which did not "
                f"join: is it running, with the same init_method and world_size? ({error})"
            ) from None
        return self.read(key)

    def read(self, key: str) -> Any:
        """An entry that is there."""
        try:
            return json.loads(self.store.get(key))
        except (ValueError, RecursionError):
            raise not_ours(key) from None
        except (RuntimeError, dist.DistError) as error:
            raise self._no_answer(error) from None

    def _no_answer(self, error: Exception) -> RendezvousError:
        return RendezvousError(
            f"worker {self._name!r} hears nothing from the store in which the workers meet: does "
            f"the process that serves it run? ({error})"
        )

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
