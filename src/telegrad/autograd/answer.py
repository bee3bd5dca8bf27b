"""The answer to a worker that asked another to take part in a pass.

The initiator of a pass waits for it anyway. So the last message by which it engages a worker is a
call: it reads the reply itself, on the thread that waits, where a message would be read by another
thread that then had to wake it. The reply is what would have been the worker's acknowledgement,
with the last gradients for the initiator. If the acknowledgement has gone another way, the reply is
empty; a call must be answered in any case.

Code inside of a node (see `enclosed`) waits in the midst of a pass, for gradients that the worker
may have long before its part ends. It asks *at once*: the reply is the first that the worker has to
say to it, and what comes later travels as any other message. Were it the last, both could wait for
each other.
"""

from __future__ import annotations

import threading
from typing import Any

from telegrad.autograd.backward import Post, acknowledges
from telegrad.rpc.results import Finish, Later

_lock = threading.Lock()
"""Of all answers: it is held for a few instructions."""


class Answer:
    """Given once, by whichever thread comes to it; later ones are not heard."""

    __slots__ = ("_at_once", "_finish", "_given", "_payload", "asker")

    def __init__(self, asker: int, at_once: bool = False) -> None:
        self.asker = asker
        self._at_once = at_once
        self._given = False
        self._payload: Any = None
        self._finish: Finish | None = None

    def takes(self, post: Post) -> bool:
        """Whether this message travels as the answer."""
        return post.to == self.asker and (self._at_once or acknowledges(post.message))

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
