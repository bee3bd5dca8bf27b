"""How the others hear that contexts were released: by a census of their origin (see `container`).

A census travels as the contexts did: each worker tells those it knows. Where workers trust each
other, it is as good from any of them as from its origin. Where they do not (`trust="data"`), what
one says of the contexts of another is news and no more: who hears it asks the origin, whose own
answer counts. So nobody can end the contexts of another worker, and no one is left out.

A census has a bound as all else that others have a worker keep: an origin with more contexts open
than that is not believed until it has fewer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from telegrad.autograd.container import Census
from telegrad.autograd.context import WORKER_SHIFT, worker_of
from telegrad.autograd.errors import AutogradError

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd

TOPIC_RELEASE = "autograd.release"
TOPIC_HOLDER = "autograd.holder"
TOPIC_NEVER = "autograd.never"
MOST_NAMED = 64
"""So many workers are named in a census as those that were told. Where they are more, some are told
twice: the names would cost more than that."""
OPEN_PER_CONTEXT = 16
"""An origin may have so many times as many contexts open as it may bring to one worker."""
_MOST = 1 << 64


class Censuses:
    """What one worker says and hears of contexts that exist no more."""

    def __init__(self, service: Autograd) -> None:
        self._service = service
        self._node = node = service.node
        self._me: int = node.info.id
        self._container = service.container
        self._most_open = OPEN_PER_CONTEXT * node.limits.contexts
        node.on_post(TOPIC_RELEASE, self._on_release)
        node.on_post(TOPIC_HOLDER, self._on_holder)
        node.on_post(TOPIC_NEVER, self._on_never)

    def tell(self, workers: set[int]) -> None:
        """Contexts that were made here, and that these workers know, are released."""
        self._pass_on(self._container.census(), workers, set())

    def report(self, context_id: int) -> None:
        """To the origin of a context: this worker holds it, and may not hear of its end."""
        self._node.post(worker_of(context_id), TOPIC_HOLDER, context_id)

    def _on_release(self, sender: int, payload: Any) -> None:
        census, were_told = read_census(payload, self._most_open)
        if census.origin == self._me:
            return  # It has come around; nobody else knows better what was made here.
        if self._node.data_only and sender != census.origin:
            self._look_into(census)
            return
        told: set[int] = set()
        for context in self._container.learn(census):
            self._service.end(context)
            told |= context.known_workers
        told.discard(sender)
        self._pass_on(census, told, were_told)

    def _look_into(self, census: Census) -> None:
        """Have the origin say itself what another one says of it."""
        released = self._container.released_since(census)
        if released is not None and self._service.may_be_worker(census.origin):
            self.report(released)

    def _pass_on(self, census: Census, workers: set[int], told: set[int]) -> None:
        """Tell a census to these workers, but for those that were told as it came here."""
        workers = workers - told - {self._me}
        told = (told | workers) if len(told) + len(workers) <= MOST_NAMED else set()
        payload = (census.origin, census.version, census.newest, (*census.live,), (*told,))
        for worker in sorted(workers):
            self._node.post(worker, TOPIC_RELEASE, payload)

    def _on_holder(self, sender: int, context_id: Any) -> None:
        """A worker holds a context of ours and lost one through whom it might have been told."""
        context = self._container.find(read_number(context_id))
        if self._container.was_never_made(context_id):
            self._node.post(sender, TOPIC_NEVER, context_id)
        if context is not None:
            context.know(sender)
        if context is None or context.released:
            self.tell({sender})

    def _on_never(self, sender: int, context_id: Any) -> None:
        """Somebody spoke in the name of a worker, which knows nothing of it."""
        if worker_of(read_number(context_id)) == sender:
            for context in self._container.forget(context_id):
                self._service.end(
                    context,
                    AutogradError(
                        f"Context {context.id} was never made by the worker that it names."
                    ),
                )


def read_census(payload: Any, most_open: int) -> tuple[Census, set[int]]:
    """A census as it came, and the workers that were told of it."""
    match payload:
        case (origin, version, newest, (*live,), (*told,)):
            pass
        case _:
            raise AutogradError("What came is no census of contexts.")
    if len(live) > most_open or len(told) > MOST_NAMED:
        raise AutogradError(
            f"A census names {len(live)} contexts that are open, and {len(told)} workers. More "
            f"than {most_open} and {MOST_NAMED} are not kept."
        )
    numbers = (origin, version, newest, *live, *told)
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        raise AutogradError("A census holds something else where a number has to be.")
    if any(number >> WORKER_SHIFT != origin for number in (newest, *live)):
        raise AutogradError(f"A census of worker {origin} speaks of contexts of another worker.")
    return Census(origin, version, newest, frozenset(live)), set(told)


def read_number(value: Any) -> int:
    """What others send as a number is one: other values may take for ever to hash or to show."""
    if type(value) is not int:
        raise AutogradError(f"A message holds a {type(value).__name__} where a number has to be.")
    return value
