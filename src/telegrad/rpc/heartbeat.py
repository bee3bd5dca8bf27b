"""Asks the companions of peers on other hosts, and tells who has fallen silent.

`silence.py` decides, `pulse.py` answers; here is the socket between them. Only peers whose process
this worker cannot see are asked: those of its own host it looks at itself.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from telegrad.rpc.members import Member
from telegrad.rpc.pulse import SIZE, question, read_answer
from telegrad.rpc.silence import Ask, GiveUp, Listening


class Heartbeat:
    """One worker's questions. `give_up` is called with who gives no sign of life any more."""

    def __init__(
        self,
        key: bytes,
        window: float,
        interval: float,
        inquiry: float,
        give_up: Callable[[GiveUp], object],
    ) -> None:
        self._key = key
        self._give_up = give_up
        self._core = Listening(window, interval, inquiry)
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[int, tuple[str, int]]] = {}
        self._workers: dict[int, int] = {}
        self._sockets: dict[int, socket.socket] = {}

    def beat(self, members: Iterable[Member], now: float) -> None:
        """Take the answers that have come, and ask everyone who is to be asked once more."""
        self._listen()
        with self._lock:
            self._follow(members)
            actions = self._core.tick(now)
        for action in actions:
            if isinstance(action, GiveUp):
                self._give_up(action)
            else:
                self._ask(action)

    def _follow(self, members: Iterable[Member]) -> None:
        present = {member.info.id: member for member in members if is_asked(member)}
        for worker in self._asked.keys() - present.keys():
            self._core.forget(worker)
            self._workers.pop(self._asked.pop(worker)[0], None)
        for worker, member in present.items():
            if worker not in self._asked:
                self._asked[worker] = (member.incarnation, read_pulse(member.pulse))
                self._workers[member.incarnation] = worker
                self._core.follow(worker)

    def _ask(self, action: Ask) -> None:
        incarnation, address = self._asked[action.worker]
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with contextlib.suppress(OSError):  # no way there: then there is no answer either
            self._socket(family).sendto(question(self._key, incarnation, action.nonce), address)

    def _socket(self, family: int) -> socket.socket:
        asking = self._sockets.get(family)
        if asking is None:
            asking = self._sockets[family] = socket.socket(family, socket.SOCK_DGRAM)
            asking.setblocking(False)
        return asking

    def _listen(self) -> None:
        for asking in list(self._sockets.values()):
            while True:
                try:
                    data = asking.recv(SIZE + 1)
                except BlockingIOError:
                    break
                except OSError:
                    if asking.fileno() < 0:
                        return  # This worker leaves.
                    continue  # an earlier question found nobody there
                self._hear(data)

    def _hear(self, data: bytes) -> None:
        said = read_answer(self._key, data)
        worker = None if said is None else self._workers.get(said[0])
        if said is None or worker is None:
            return
        with self._lock:
            verdict = self._core.answered(worker, said[1], said[2])
        if verdict is not None:
            self._give_up(verdict)

    def heard(self, worker: int) -> None:
        with self._lock:
            self._core.heard(worker)

    def hears(self, worker: int) -> bool:
        with self._lock:
            return self._core.hears(worker)

    def silent(self) -> set[int]:
        with self._lock:
            return self._core.silent()

    def close(self) -> None:
        for asking in self._sockets.values():
            asking.close()


def is_asked(member: Member) -> bool:
    """Whether only its companion can tell how this worker is."""
    return bool(member.pulse) and (member.process is None or not member.process.is_visible)


def read_pulse(text: str) -> tuple[str, int]:
    """Where a companion answers, as its worker says; `ValueError` if nobody can answer there."""
    host, _, port = text.rpartition(" ")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
        raise ValueError("a companion is at no port")
    # Not by name: to look one up may take for ever.
    ip_address(host)
    return host, int(port)
