"""All contexts of one worker, and the memory of those that are gone.

Ids. A context id has 64 bits: the worker that made it in the upper 16, a counter in the lower 48.
It is unique in the job without any talk between workers.

Gone without a trace. A message of a context may arrive after the context was released; it must
not bring the context back. Remembering every released id would grow for ever. Instead each release
carries a *census* of its origin: the newest id that the origin had issued and the few that were
still live. Anything of that origin up to the newest and not live is released. A later census says
all that an earlier one said, so one census per origin is all that is kept. A census also heals: a
context that it declares gone is dropped wherever it is met. And one census speaks for all contexts
that were released before it, so releases need not be told of one by one.

Lost workers. A release travels as the context did: each worker tells those it knows. If one on the
way dies, those behind it would never hear. So whoever holds a context and loses a worker that it
knows in it reports to the origin, and is told by the origin itself. What a lost worker sent may
still be read after its loss was noticed; it makes no context any more. A worker that is started
again gets another id, so a lost id stays lost.

One lock guards all: under it nothing is done but to change a dictionary or a set. A context that is
there is found without it.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from telegrad.autograd.context import COUNTER_MASK, WORKER_SHIFT, Context, worker_of
from telegrad.autograd.errors import AutogradError, UnknownContext
from telegrad.rpc.limits import Ledger, unlimited

MAX_WORKER_ID = 0xFFFF


@dataclass(frozen=True, slots=True)
class Census:
    """Which contexts of one origin exist, as of its `version`-th release."""

    origin: int
    version: int
    newest: int
    live: frozenset[int]

    def has_released(self, context_id: int) -> bool:
        return context_id <= self.newest and context_id not in self.live


class Container:
    """The contexts of one worker; safe and quick under many threads."""

    def __init__(
        self,
        worker: int,
        *,
        first: int = 1,
        ledger: Ledger | None = None,
        records: Ledger | None = None,
        may_be_worker: Callable[[int], bool] = lambda worker: True,
    ) -> None:
        """`ledger` bounds the contexts that each other worker brings, `records` what they keep.
        A context of a worker that is none is not made: nobody would ever release it."""
        if not 0 <= worker <= MAX_WORKER_ID:
            raise AutogradError(
                f"A worker id must be in 0..{MAX_WORKER_ID} to make context ids, but is {worker}."
            )
        self.worker = worker
        self._ledger = ledger or unlimited()
        self._records = records
        self._may_be_worker = may_be_worker
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._brought: defaultdict[int, dict[int, Context]] = defaultdict(dict)
        """By origin, those that others made and that `take_earlier` has not told of."""
        self._newest = (worker << WORKER_SHIFT) + first - 1
        self.max_id = (worker << WORKER_SHIFT) + COUNTER_MASK
        """The last context id that this worker can issue."""
        self._live: set[int] = set()
        self._releases = itertools.count(1)
        self._census: dict[int, Census] = {}
        self._lost: set[int] = set()

    def new(self) -> Context:
        """A fresh context of which this worker is the origin."""
        with self._lock:
            if self._newest == self.max_id:
                raise AutogradError(
                    f"Worker {self.worker} has issued all {COUNTER_MASK} context ids that it has."
                )
            self._newest = number = self._newest + 1
            context = self._contexts[number] = Context(number, self._records)
            self._live.add(number)
        return context

    def get(self, context_id: int) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            raise UnknownContext(context_id)
        return context

    def find(self, context_id: int) -> Context | None:
        return self._contexts.get(context_id)

    def join(self, context_id: int, sender: int) -> Context | None:
        """The context that a message carries, made on demand; None once it is released, or if it
        is made up.

        Raises if the sender has brought more than it may.
        """
        context = self._contexts.get(context_id)
        if context is None:
            origin = context_id >> WORKER_SHIFT
            if not self._may_be_worker(origin):
                return None
            with self._lock:
                context = self._contexts.get(context_id)
                if context is None:
                    if self._is_gone(context_id, origin) or sender in self._lost:
                        return None
                    self._ledger.charge(sender)
                    context = self._contexts[context_id] = Context(context_id, self._records)
                    context.brought_by = sender
                    self._brought[origin][context_id] = context
        context.known_workers.add(sender)
        return context

    def _is_gone(self, context_id: int, origin: int) -> bool:
        if origin == self.worker or origin in self._lost:
            return True
        census = self._census.get(origin)
        return census is not None and census.has_released(context_id)

    def release_own(self, context_id: int) -> Context | None:
        """Release a context of which this worker is the origin; None if that was done already."""
        with self._lock:
            if context_id not in self._live:
                return None
            self._live.discard(context_id)
            return self._contexts.pop(context_id)

    @property
    def still_open(self) -> int:
        """How many contexts of which this worker is the origin are not released."""
        return len(self._live)

    def is_alone(self, context: Context) -> bool:
        """Whether all contexts that were made here before this one are released."""
        live = self._live
        return len(live) == 1 and context.id in live

    def take_earlier(self, context: Context) -> list[Context]:
        """The contexts here that the same origin made before this one. Each is told of once: it
        stays known as one that is gone, until a census says so to all."""
        brought = self._brought[context.origin]
        if len(brought) == 1:
            return []
        with self._lock:
            return [brought.pop(number) for number in [*brought] if number < context.id]

    def census(self) -> Census:
        """What the other workers are told of the contexts that were made here."""
        with self._lock:
            live = frozenset(self._live)
            return Census(self.worker, next(self._releases), self._newest, live)

    def released_since(self, census: Census) -> int | None:
        """A context that this census declares gone, if there is one that no other did before."""
        known = self._census.get(census.origin, Census(census.origin, 0, 0, frozenset()))
        if known.version >= census.version:
            return None
        if lately := known.live - census.live:
            return min(lately)
        number = census.newest
        while number in census.live:
            number -= 1
        is_news = number > known.newest and worker_of(number) == census.origin
        return number if is_news else None

    def learn(self, census: Census) -> list[Context]:
        """Take note of a census; the contexts that it declares gone are removed and returned."""
        with self._lock:
            known = self._census.get(census.origin)
            if known is not None and known.version >= census.version:
                census = known
            self._census[census.origin] = census
            return self._remove_of(census.origin, census.has_released)

    def was_never_made(self, context_id: int) -> bool:
        """Whether this worker would be the origin of that context, and is not."""
        return worker_of(context_id) == self.worker and context_id > self._newest

    def forget(self, context_id: int) -> list[Context]:
        """Its origin says that there was never such a context."""
        with self._lock:
            return [self._remove(context_id)] if context_id in self._contexts else []

    def lose(self, worker: int) -> list[Context]:
        """A worker is lost: the contexts of which it was the origin end here."""
        with self._lock:
            self._lost.add(worker)
            self._census.pop(worker, None)
            gone = self._remove_of(worker, lambda _: True)
            self._brought.pop(worker, None)
            return gone

    def _remove_of(self, origin: int, gone: Callable[[int], bool]) -> list[Context]:
        ids = [i for i in self._contexts if i >> WORKER_SHIFT == origin and gone(i)]
        return [self._remove(i) for i in ids]

    def _remove(self, context_id: int) -> Context:
        context = self._contexts.pop(context_id)
        self._brought[context.origin].pop(context_id, None)
        if context.brought_by is not None:
            self._ledger.credit(context.brought_by)
        return context

    def __iter__(self) -> Iterator[Context]:
        return iter(list(self._contexts.values()))

    def __len__(self) -> int:
        return len(self._contexts)
