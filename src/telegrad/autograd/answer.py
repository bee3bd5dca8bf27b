"""The answer to the initiator of a pass, who asked another worker to take part.

The initiator of a pass waits for the others anyway. So it sends the last message of what it has to
say as a call, and reads the reply itself, on the thread that waits; a message would be read by
another thread that then had to wake it. The reply is the next that the worker has to say to the
initiator: gradients, its acknowledgement, or both in one. What it says after that travels as any
other message, unless the initiator has asked again meanwhile, as it does when it answers gradients
by gradients. A chain of calls back and forth is so gone back by one thread on each side.

The reply leaves at the moment that it is given, from inside of the engine if need be. If there is
nothing to come that would be an answer, the reply is empty: a call must be answered in any case.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from telegrad.rpc.results import Finish


class Answer(NamedTuple):
    """To be given once, by whoever drives the worker's part of the pass."""

    asker: int
    finish: Finish

    def give(self, payload: Any = None) -> None:
        self.finish(payload, None)
