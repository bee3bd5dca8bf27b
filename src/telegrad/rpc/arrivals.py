"""Where links wait together on which replies may come that nobody reads, and one thread with them.

Who calls many workers and then waits for one after the other has a link for each. The replies come
in whatever order. Were each that comes while its caller waits for another one noticed by the watch,
and read by a thread that is lent for it, it would cost several switches between threads, and more
than the call itself. So a link is *armed* here by a call for which nobody may wait, and a thread
that waits for a reply by one of them *gathers*: it waits for all of them at once, and reads what
comes. While nobody gathers, the watch waits, and lends a thread that reads all that is there.

The rules that make this safe:
- To gather is to hold a lock, which nobody waits for: who finds it held reads its own link as if
  there was nothing here. Who ends releases it and then tells the watch, in this order: were it told
  before, it could notice bytes, find the one that gathers still here, and leave them to nobody.
- A link stays armed, and is noticed again and again, until somebody who has its reading role says
  otherwise, or whoever gathers and finds another one reading it: that one arms it if more is
  expected when it gives the role up. So nothing that was noticed can be lost by who noticed it.
- Who gathers waits for nothing but here. What would take long is left to other threads, together
  with the role: a link that broke, a worker that leaves, tensors that come beside their frame.
- What was read for others is completed by other threads: the one that gathers has its own call to
  come back from. Futures with callbacks (`Pending.pressing`) are given away at once; others may
  wait for a moment, as the one that gathers is about to ask for them as a rule.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from telegrad.rpc.calls import Pending
from telegrad.rpc.completions import Completions
from telegrad.rpc.watch import READABLE, Watch
from telegrad.wire.lookout import Lookout

if TYPE_CHECKING:
    from telegrad.rpc.outgoing import Outgoing

ARMED = select.EPOLLIN | select.EPOLLRDHUP
PATIENCE_AT_END = 0.5
_NOTHING = select.EPOLLONESHOT


class Arrivals:
    """The links of one worker by which replies may come that nobody reads."""

    def __init__(self, watch: Watch, run: Callable[[Callable[[], object]], None]) -> None:
        self._watch = watch
        self._run = run
        self._epoll = select.epoll()
        self._descriptor = self._epoll.fileno()
        self._gathering = threading.Lock()
        self._links: dict[int, Outgoing] = {}
        self._armed: set[int] = set()
        self._closed = False
        self._found: list[tuple[int, int]] = []
        self._lookout = Lookout(self._look)
        watch.register(self._descriptor, self._noticed, READABLE)

    def arm(self, link: Outgoing, descriptor: int) -> bool:
        """Whoever is here is to read what comes. False: the system has no room for it here."""
        try:
            if self._links.get(descriptor) is link:
                self._epoll.modify(descriptor, ARMED)
            else:
                self._links[descriptor] = link
                self._epoll.register(descriptor, ARMED)
        except OSError:
            self._links.pop(descriptor, None)
            return False
        except ValueError:
            return True  # This worker has left.
        self._armed.add(descriptor)
        return True

    def disarm(self, link: Outgoing, descriptor: int) -> None:
        """Somebody reads it."""
        # Once: the end of a stream is told whatever is looked for, and each time anew.
        if descriptor not in self._armed:
            return
        self._armed.discard(descriptor)
        if self._links.get(descriptor) is link:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.modify(descriptor, _NOTHING)

    def forget(self, link: Outgoing, descriptor: int) -> None:
        """The descriptor is not the link's any more, or the link is over."""
        # By now another link may have the number; or another thread forgets this one, too.
        if self._links.get(descriptor) is link and self._links.pop(descriptor, None) is link:
            self._armed.discard(descriptor)
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)

    def begin(self, descriptor: int) -> bool:
        """For who waits for that link: gather, if others are armed, and nobody does."""
        return len(self._armed) > 1 and descriptor in self._armed and self._begin()

    def _begin(self) -> bool:
        if not self._gathering.acquire(blocking=False):
            return False
        if self._closed:
            self._gathering.release()
            return False
        self._watch.look_for(self._descriptor, _NOTHING)
        return True

    def end(self) -> None:
        self._gathering.release()
        self._watch.look_for(self._descriptor, READABLE)

    def wait(self, awaited: int, seconds: float) -> list[Outgoing]:
        """For who gathers: the links that have something to read, after so long at most."""
        if not self._lookout.wait(awaited, seconds):
            self._found = self._poll(seconds)
            self._lookout.ended(bool(self._found))
        return self._take_found()

    def _take_found(self) -> list[Outgoing]:
        found, self._found = self._found, []
        links = (self._links.get(descriptor) for descriptor, _ in found)
        return [link for link in links if link is not None]

    def _look(self, milliseconds: int) -> bool:
        self._found = self._poll(milliseconds / 1000)
        return bool(self._found)

    def _poll(self, seconds: float) -> list[tuple[int, int]]:
        try:
            return self._epoll.poll(seconds)
        except (OSError, ValueError):
            return []  # This worker has left.

    def _noticed(self, _: int) -> None:
        """The watch says that there are bytes. It may have been told to look no more meanwhile."""
        if not self._gathering.locked():
            self._run(self._read_for_others)

    def _read_for_others(self) -> None:
        """Read what is here, on a thread that was lent for that."""
        if not self._begin():
            return
        settled: list[Pending] = []
        try:
            self._found = self._poll(0)
            for link in self._take_found():
                settled += link.read_in_passing()
        finally:
            self.end()
            Completions(settled, self._run, self._watch.call_later).run()

    def close(self) -> None:
        """This worker leaves. After its links have ended, and its watch."""
        self._closed = True
        # Whoever gathers sees soon that its call has ended.
        if self._gathering.acquire(timeout=PATIENCE_AT_END):
            self._gathering.release()
        self._epoll.close()


def are_pressing(batch: Sequence[Pending]) -> bool:
    """Whether somebody may wait for their completion, and not for the calls."""
    return any(pending.pressing for pending in batch)
