"""The answer to a worker that asked another to take part in a pass.

The initiator of a pass waits for it anyway. So the last message by which it engages a worker is a
call: it reads the reply itself, on the thread that waits, where a message would be read by another
thread that then had to wake it. The reply is what would have been the worker's acknowledgement,
with the last gradients for the initiator. If the acknowledgement has gone another way, the reply is
empty; a call must be answered in any case.
"""

from __future__ import annotations

import threading
from typing import Any

from telegrad.rpc.results import Finish, Later

_lock = threading.Lock()
"""Of all answers: it is held for a few instructions."""


class Answer:
    """Given once, by whichever thread comes to it; later ones are not heard."""

    __slots__ = ("_finish", "_given", "_payload", "asker")

    def __init__(self, asker: int) -> None:
        self.asker = asker
        self._given = False
        self._payload: Any = None
        self._finish: Finish | None = None

    def give(self, payload: Any = None) -> None:
        with _lock:
            if self._given:
                return
            self._given, self._payload = True, payload
            finish, self._finish = self._finish, None
        if finish is not None:
            finish(payload, None)

    def result(self) -> Any:
        """The answer itself, if it has been given."""
        return self._payload if self._given else Later(self._subscribe)

    def _subscribe(self, finish: Finish) -> None:
        with _lock:
            if not self._given:
                self._finish = finish
                return
        finish(self._payload, None)
