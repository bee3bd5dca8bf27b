"""The messages of the reference protocol, in order between each two workers.

They wait in a lane for each worker, so that one who cannot be reached holds up nobody else, and are
numbered there: the receiver puts them in order and drops doubles. Those that wait leave together.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from telegrad.rpc.reference_messages import Fence, Message, read_messages, write_message
from telegrad.rpc.runtime import Condition
from telegrad.wire.parcel import Parcel

if TYPE_CHECKING:
    from telegrad.rpc.node import Node

TOPIC = "reference"
MAX_EARLY = 1 << 16
MOST_TOGETHER = 128
BYTES_OF_ONE = 512
"""More than nearly any message takes."""
_NUMBER = struct.Struct("<Q")
"""Of the first message in a parcel."""


class Inbox:
    """Puts the messages of one sender back in order.

    Posts are begun in order, but a handler may be overtaken by the next one before it comes to
    our lock. The core relies on the order: a `Fenced` that overtakes a `Register` drops a value
    that someone has.
    """

    __slots__ = ("early", "receiving", "seen", "weight")

    def __init__(self) -> None:
        self.seen = 0
        self.early: dict[int, Message] = {}
        self.receiving = False
        self.weight = 0

    def keep(self, number: int, message: Message) -> None:
        """A message came; it may be received when those before it have been.

        An honest sender is a few messages ahead of the slowest handler.
        """
        if number - self.seen > MAX_EARLY or self.weight > MAX_EARLY:
            raise ValueError("a message of the reference protocol has a number out of turn")
        if number > self.seen and number not in self.early:
            self.early[number] = message
            self.weight += _weight(message)

    def begin_next(self) -> Message | None:
        """The next message in order. None if it is not there, or another thread receives."""
        if self.receiving:
            return None
        message = self.early.pop(self.seen + 1, None)
        if message is not None:
            self.seen += 1
            self.receiving = True
            self.weight -= _weight(message)
        return message


class Lane:
    """The messages to one worker that have not left. One thread at a time sends them."""

    __slots__ = ("messages", "sending", "sent")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.sent = 0
        self.sending = False


class Mail:
    """What one worker sends of the protocol, and what comes."""

    def __init__(
        self, node: Node, changed: Condition, receive: Callable[[int, Message], None]
    ) -> None:
        """`changed` guards the lanes, and tells when they are empty."""
        self._node = node
        self._changed = changed
        self._guard = changed.guard
        self._receive = receive
        # What is within the limit one by one must be so together.
        self._most_together = min(MOST_TOGETHER, node.limits.metadata_bytes // BYTES_OF_ONE) or 1
        self.lanes: dict[int, Lane] = {}
        self._inboxes: dict[int, Inbox] = {}
        node.on_post(TOPIC, self._received)

    def put(self, to: int, message: Message) -> Lane:
        """Let a message wait in its lane; `send_along` follows. With the lock held."""
        lane = self.lanes.setdefault(to, Lane())
        lane.messages.append(message)
        return lane

    def waits(self) -> bool:
        """Whether there are messages that have not left. With the lock held."""
        return any(lane.messages for lane in self.lanes.values())

    def forget(self, worker: int) -> None:
        """That worker is lost. With the lock held."""
        self.lanes.pop(worker, None)
        self._inboxes.pop(worker, None)

    def send_along(self, lanes: dict[int, Lane]) -> None:
        """Let messages leave: on this thread if it need not wait for a worker to be met."""
        node = self._node
        for number, (to, lane) in enumerate(lanes.items(), 1):
            if number == len(lanes) and node.transport.knows(to):
                self._send_lane(to, lane)
            else:
                node.runtime.spawn(partial(self._send_lane, to, lane))

    def _send_lane(self, to: int, lane: Lane) -> None:
        sending = False
        try:
            with self._guard:
                if lane.sending:
                    return
                sending = lane.sending = True
            while True:
                with self._guard:
                    if not lane.messages:
                        sending = lane.sending = False
                        self._changed.notify_all()
                        return
                    leaving = together(lane.messages, self._most_together)
                self._node.post(to, TOPIC, in_one(lane.sent + 1, leaving))
                with self._guard:
                    for _ in leaving:
                        lane.messages.popleft()
                    lane.sent += len(leaving)
        except BaseException:
            # They may have left or not: another thread sends them again, under the same numbers.
            if sending:
                lane.sending = False
                self._node.runtime.spawn(partial(self._send_lane, to, lane))
            raise

    def _received(self, sender: int, payload: Any) -> None:
        if type(payload) is not Parcel or len(payload.data) < _NUMBER.size:
            raise ValueError("a message of the reference protocol has no number")
        (first,) = _NUMBER.unpack_from(payload.data)
        came = list(read_messages(payload.data[_NUMBER.size :]))
        with self._guard:
            if self._node.is_lost(sender):
                return
            inbox = self._inboxes.setdefault(sender, Inbox())
            for number, message in enumerate(came, first):
                inbox.keep(number, message)
            following = inbox.begin_next()
        failure: Exception | None = None
        while following is not None:
            try:
                self._receive(sender, following)
            except Exception as error:
                # Those behind it have left their threads to this one.
                failure = failure or error
            with self._guard:
                inbox.receiving = False
                following = inbox.begin_next()
        if failure is not None:
            raise failure


def together(messages: Iterable[Message], most: int) -> list[Message]:
    """The first of those that wait, as many as leave in one. With a fence, which may be long, ends
    what a receiver can be given at a time."""
    leaving: list[Message] = []
    for message in islice(messages, most):
        leaving.append(message)
        if isinstance(message, Fence):
            break
    return leaving


def in_one(first: int, messages: Iterable[Message]) -> Parcel:
    """Messages that follow one another, of which the first has that number."""
    return Parcel(TOPIC, _NUMBER.pack(first) + b"".join(map(write_message, messages)), ())


def _weight(message: Message) -> int:
    return len(message.lost) if isinstance(message, Fence) else 0
