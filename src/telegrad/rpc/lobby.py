"""Where links that nobody reads wait for their next request, together, and one thread with them.

A worker that several others call has a link for each. With a reader for each, the next request
would find another thread than the last one: asleep, perhaps on another core, with the interpreter
in the hands of the one that was served last and now looks for bytes in vain. Threads that take
turns so make a step of training about a millisecond longer than one does (`make bench-floor`).

So a link that has been read to its end is *admitted* here, and the thread that read it *hosts*: it
waits for all links at once and leads the first that has something. There is one host at a time; a
thread that finds one goes home. While the host serves a request, nobody is here: then the watch is
told to notice the next bytes, and sends a thread. So requests of different links run at the same
time, and a thread is woken for that only if there is something to do. Where one link alone brings
one request after the other, its reader waits for the next by itself.

To host is to hold a lock, which nobody waits for. Who leaves releases it and then tells the watch,
in this order: were it told before, it could notice bytes, find the host still here, and leave them
to nobody. If the next one hosts in between, the watch may send a thread in vain, which goes home.
So while nobody hosts, the watch waits, or is just being told to, or has sent a thread; who admits a
link need not see to it.

Bytes are noticed once for each admission (EPOLLONESHOT): of several threads that wait, or look, one
is given the link. What must never happen: a link that nobody leads and that is not here, or a link
that is here while neither a host nor the watch waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.rpc.watch import READABLE, Watch
from telegrad.wire.lookout import Lookout

if TYPE_CHECKING:
    from telegrad.rpc.incoming import Incoming

IDLE_TIMEOUT = 0.5
"""Seconds after which a host leaves the links to the watch."""
_NOTHING = select.EPOLLONESHOT


class Lobby:
    """The links of one worker that wait for requests."""

    def __init__(
        self,
        watch: Watch,
        run: Callable[[Callable[[], object]], None],
        about_to_sleep: Callable[[], object],
    ) -> None:
        self._watch = watch
        self._run = run
        self._about_to_sleep = about_to_sleep
        self._epoll = select.epoll()
        self._descriptor = self._epoll.fileno()
        self._hosting = threading.Lock()
        self._links: dict[int, Incoming] = {}
        self._closed = False
        self.last = -1
        """The worker whose request was served last."""
        self.awaited = 0
        """What is waited for, as far as what was served last tells."""
        self._found: list[tuple[int, int]] = []
        self._lookout = Lookout(self._look)
        watch.register(self._descriptor, self._noticed, READABLE)

    def admit(self, link: Incoming, descriptor: int) -> bool:
        """Nobody leads this link any more: whoever is here is to be given its next bytes.

        False: the system has no room for it here, and somebody has to go on leading.
        """
        try:
            if self._links.get(descriptor) is link:
                self._epoll.modify(descriptor, READABLE)
            else:
                self._links[descriptor] = link
                self._epoll.register(descriptor, READABLE)
        except OSError:
            self._links.pop(descriptor, None)
            return False
        except ValueError:
            pass  # This worker has left.
        return True

    def forget(self, link: Incoming, descriptor: int) -> None:
        """The descriptor is not the link's any more, or the link is over."""
        # By now another link may have the number; or another thread forgets this one, too.
        if self._links.get(descriptor) is link and self._links.pop(descriptor, None) is link:
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(descriptor)

    def host(self) -> None:
        """Wait here and lead what comes, while nobody else does; return when it is quiet."""
        while self._begin_to_host() and (link := self._next()) is not None:
            link.lead()

    @property
    def _hosted(self) -> bool:
        return self._hosting.locked()

    def _begin_to_host(self) -> bool:
        """False: somebody else does."""
        if not self._hosting.acquire(blocking=False):
            return False
        if self._closed:
            self._hosting.release()
            return False
        self._watch.look_for(self._descriptor, _NOTHING)
        return True

    def _next(self) -> Incoming | None:
        """Stop hosting when a link has something to read, and give it; None if none had."""
        try:
            if not self._lookout.wait(self.awaited):
                self._about_to_sleep()
                self._found = self._sleep()
                self._lookout.ended(bool(self._found))
            found, self._found = self._found, []
        finally:
            self._hosting.release()
            self._watch.look_for(self._descriptor, READABLE)
        return self._links.get(found[0][0]) if found else None

    def _look(self, milliseconds: int) -> bool:
        try:
            self._found = self._epoll.poll(milliseconds / 1000, 1)
        except (OSError, ValueError):
            return False  # This worker has left.
        return bool(self._found)

    def _sleep(self) -> list[tuple[int, int]]:
        try:
            return self._epoll.poll(IDLE_TIMEOUT, 1)
        except (OSError, ValueError):
            return []

    def _noticed(self, _: int) -> None:
        """The watch says that there are bytes. It may have been told to look no more meanwhile."""
        if not self._hosted:
            self._run(self.host)

    def close(self) -> None:
        """This worker leaves. After its links have ended, and its watch."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._epoll.close)
            # A host that sleeps here would sleep on. If there is no room, it does.
            with contextlib.suppress(OSError):
                alarm = os.eventfd(1, os.EFD_CLOEXEC)
                stack.callback(os.close, alarm)
                self._epoll.register(alarm, select.EPOLLIN)
            self._closed = True
            if self._hosting.acquire(timeout=IDLE_TIMEOUT):
                self._hosting.release()
