"""Visitors at the door: connections that have not proved the job's key.

Each has a thread, a descriptor and a time limit, so there are places for a number of them only.
When all are taken, the one who has stood there longest has to go: a worker is through in a few
milliseconds, so who dawdles is most likely none. Strangers therefore keep workers out only if
they come faster than all places are taken in the time of one handshake; were newcomers turned away
instead, as many connections as there are places could lock a worker out.

The watch accepts, and the watch has more to do: it takes a few visitors at a time. A visitor costs
about half a millisecond of the processor (twice that with TLS), so after a burst, as when a large
job starts, only so many per second are let in as cost less than a tenth of a core. Those beyond
wait in the kernel's queue, which costs nothing. So a flood slows down whoever wants to come in, and
hardly those who are in.

Without a descriptor left, nobody can be let in. The door is then closed for a moment: to look on at
a visitor who cannot enter would burn a core. If that lasts for as long as a worker may be silent,
visitors are told so, one after the other, by way of a descriptor that was kept for it: else they
would wait for a minute for one who lives and does not open, and whoever waits for them as well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from telegrad.rpc.errors import NoRoom
from telegrad.rpc.room import NO_ROOM, lack_of, no_room
from telegrad.rpc.watch import Watch
from telegrad.wire.stream import shut_down

PLACES = 256
AT_A_TIME = 16
BURST = 1000
PER_SECOND = 100
PAUSE_WITHOUT_ROOM = 0.1
NEEDED_FOR_A_LINK = 3
LET_IN = "let another connection in"
_READABLE_ALWAYS = 0x001

Greet = Callable[[socket.socket, socket.socket], None]


class Reception:
    """Accepts connections and has each greeted on a thread: `greet(connection, listener)`."""

    def __init__(
        self,
        watch: Watch,
        run: Callable[[Callable[[], object]], None],
        greet: Greet,
        patience: float,
    ) -> None:
        """`patience` are the seconds that visitors are to wait for a descriptor."""
        self._watch = watch
        self._patience = patience
        self._lacks_since: float | None = None
        self._turned_away: dict[socket.socket, NoRoom] = {}
        self._spare: int | None = None
        self._run = run
        self._greet = greet
        self._lock = threading.Lock()
        self._standing: dict[socket.socket, None] = {}
        self._threads = 0
        self._closed = False
        self._said = False
        self._budget = float(BURST)
        self._counted_at = time.monotonic()
        self._keep_spare()

    def open(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._watch.register(listener.fileno(), partial(self._accept, listener), _READABLE_ALWAYS)

    def close(self) -> None:
        """Let nobody in any more. The listeners are their owner's to close."""
        self._closed = True
        self._use_spare()

    def lack_for(self, connection: socket.socket) -> NoRoom | None:
        """Why this visitor cannot stay, if that is so and has been so for long."""
        if connection in self._turned_away:
            return self._turned_away[connection]
        since = self._lacks_since
        if since is None or time.monotonic() - since < self._patience:
            return None
        lack = lack_of(NEEDED_FOR_A_LINK)
        return None if lack is None else no_room(LET_IN, lack)

    def lacks(self) -> None:
        """A visitor could not be let in for want of descriptors."""
        if self._lacks_since is None:
            self._lacks_since = time.monotonic()

    def _accept(self, listener: socket.socket, events: int) -> None:
        """In the watch's thread."""
        for _ in range(AT_A_TIME):
            if not self._afford():
                self._pause(listener, AT_A_TIME / PER_SECOND)
                return
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in NO_ROOM:
                    lack = no_room(LET_IN, error)
                    self._say_once(lack)
                    self._turn_one_away(listener, lack)
                    self._pause(listener, PAUSE_WITHOUT_ROOM)
                return
            self._seat(connection, listener)

    def _turn_one_away(self, listener: socket.socket, lack: NoRoom) -> None:
        """Tell one visitor that there is no room, if that has been so for long."""
        self.lacks()
        since = self._lacks_since
        if since is None or time.monotonic() - since < self._patience:
            return
        if not self._use_spare():
            # The one before may have gone meanwhile; then it is the turn of the next.
            self._keep_spare()
            return
        try:
            connection, _ = listener.accept()
        except OSError:
            self._keep_spare()
            return
        self._turned_away[connection] = lack
        self._seat(connection, listener)

    def _use_spare(self) -> bool:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
        return spare is not None

    def _keep_spare(self) -> None:
        with self._lock:
            if self._spare is None and not self._closed and not self._turned_away:
                with contextlib.suppress(OSError):
                    self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _say_once(self, lack: NoRoom) -> None:
        """Those outside only see that nobody opens."""
        if not self._said:
            self._said = True
            print(f"telegrad: {lack}", file=sys.stderr)

    def _afford(self) -> bool:
        now = time.monotonic()
        self._budget = min(BURST, self._budget + (now - self._counted_at) * PER_SECOND)
        self._counted_at = now
        if self._budget < 1:
            return False
        self._budget -= 1
        return True

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._watch.forget(listener.fileno())
        self._watch.call_later(seconds, partial(self._reopen, listener))

    def _reopen(self, listener: socket.socket) -> None:
        if not self._closed and listener.fileno() >= 0:
            self.open(listener)

    def _seat(self, connection: socket.socket, listener: socket.socket) -> None:
        oldest: socket.socket | None = None
        with self._lock:
            # Threads of those who had to go may take a moment to see it.
            turned_away = self._closed or self._threads >= 2 * PLACES
            if not turned_away:
                self._threads += 1
                self._standing[connection] = None
                if len(self._standing) > PLACES:
                    oldest = next(iter(self._standing))
                    del self._standing[oldest]
        if turned_away:
            connection.close()
            return
        if oldest is not None:
            shut_down(oldest)
        self._run(partial(self._see_to, connection, listener))

    def _see_to(self, connection: socket.socket, listener: socket.socket) -> None:
        try:
            self._greet(connection, listener)
        finally:
            with self._lock:
                self._threads -= 1
            if self._turned_away.pop(connection, None) is not None:
                connection.close()
                self._keep_spare()

    def has_gone(self, connection: socket.socket, is_in: bool) -> None:
        """A visitor is in, or was sent away: his place is free."""
        if is_in:
            self._lacks_since = None
        with self._lock:
            self._standing.pop(connection, None)
