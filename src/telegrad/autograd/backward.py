"""The distributed pass as one worker sees it: a core, without engine, thread, socket or clock.

**Taking part.** The first message that *engages* a worker makes its sender the worker's parent.
Engaging are `Begin`, and the first `Gradient` from one worker to another. Each is acknowledged
once: at once if the worker is already engaged, else when its part has ended, that is when

    its local graph is complete (all its sends are resolved, all nodes have run), and
    all that it engaged itself has been acknowledged.

The initiator has no parent; the pass is over when its own part has ended (Dijkstra-Scholten).
Further gradients need no acknowledgement: the worker that gets them cannot complete without them.
Nor does what goes to one's own parent, or to the initiator: they cannot end before this worker has.

No worker may act in a pass without a parent: it could engage others who then engage it, in a circle
that the initiator does not wait for. If a later gradient overtakes the message that engages, its
sender is the parent, and the message that was overtaken is not acknowledged a second time.

**Absence.** A tensor that crossed but whose gradient never comes would keep its sender waiting. So
its receiver says `Absent` for it, as soon as nothing can reach it. That needs workers that no
gradient reaches to take part: when a worker's engine has nothing more to run, it sends `Begin` to
those partners that it has told nothing yet. Where every tensor is used there are none left to tell,
and a SMART pass sends exactly the messages of a FAST one.

**FAST** is the same with this half muted. If the assumption behind it is broken, some worker waits
for ever, hence the initiator does. After a time without news the initiator *probes*: it sends
`Begin` as if the pass were SMART, others pass it on, and absences flow. An absence that meets a
waiting send is the culprit, by name.

**Failing.** The first error anywhere floods; a part that has failed ignores all else. Nothing is
acknowledged any more, nobody waits for it.

What must never happen: an acknowledgement before the part has ended; a message that engages
and is not counted; an `Absent` that engages anyone (its receiver may not belong to the pass).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from telegrad.autograd.context import SendRecord
from telegrad.autograd.enclosed import EnclosedSend
from telegrad.autograd.errors import BadGradient
from telegrad.autograd.messages import (
    Absent,
    Ack,
    Begin,
    Fail,
    Failure,
    Gradient,
    History,
    Message,
    Mode,
    Options,
)
from telegrad.autograd.nodes import fits

_ACK = Ack()


class Post(NamedTuple):
    """Send `message` to worker `to`."""

    to: int
    message: Message


class Part:
    """One worker's part in one pass. Methods take events and return what is to be sent."""

    failure: Failure | None = None
    complete = False
    probing = False
    _parent: int | None = None
    _unacknowledged = 0
    _overtaken: frozenset[int] = frozenset()

    def __init__(self, worker: int, initiator: int, options: Options, history: History) -> None:
        self.options = options
        self._history = history
        self._initiator = worker == initiator
        self._told = {worker, initiator}
        self._worker = worker
        self._root = initiator
        self._absent: dict[int, list[int]] = {}

    @property
    def ended(self) -> bool:
        """Nothing is left to do or to wait for; at the initiator: the pass is over."""
        return self.complete and not self._unacknowledged

    @property
    def muted(self) -> bool:
        return self.options.mode is Mode.FAST and not self.probing

    def engage(self, sender: int) -> list[Post]:
        """A message that engages came from `sender`."""
        if self.failure is not None:
            return []
        if sender in self._overtaken:
            self._overtaken -= {sender}
            return []
        if self._initiator or self._parent is not None:
            return [Post(sender, _ACK)]
        self._parent = sender
        self._told.add(sender)
        return []

    def overtook(self, sender: int) -> None:
        """A gradient that does not engage came: if nothing has engaged this worker, what should
        have is still under way. Its sender is the parent all the same."""
        if self._initiator or self._parent is not None or self.complete:
            return
        self._parent = sender
        self._told.add(sender)
        self._overtaken |= {sender}

    def begin(self, sender: int, partners: Iterable[int]) -> list[Post]:
        """A `Begin` came. In a FAST pass it is a probe, and is passed on."""
        posts = self.engage(sender)
        if self.options.mode is Mode.FAST:
            posts += self.probe(partners, besides=sender)
        return posts

    def probe(self, partners: Iterable[int], besides: int | None = None) -> list[Post]:
        """Find out whether a FAST pass waits for what will never come."""
        if self.probing or self.failure is not None:
            return []
        self.probing = True
        return self._tell(set(partners) - {besides, self._worker, self._root}) + self._absences()

    def gradient(self, peer: int, message: int, gradients: Sequence[Tensor | None]) -> list[Post]:
        """The gradients of a message that came from `peer` are complete."""
        if self.failure is not None:
            return []
        engages = peer not in self._told
        if engages:
            self._told.add(peer)
            self._unacknowledged += 1
        return [Post(peer, Gradient(self.options, self._history, engages, message, gradients))]

    def absent(self, peer: int, message: int) -> None:
        """No gradient will come for a message from `peer`; said when the engine rests."""
        self._absent.setdefault(peer, []).append(message)

    def rest(self, partners: Iterable[int]) -> list[Post]:
        """The engine has nothing to run: time to tell those that no gradient told."""
        if not self._absent and self._told.issuperset(partners):
            return []
        if self.muted or self.failure is not None:
            return []
        return self._tell(set(partners) - self._told) + self._absences()

    def acknowledged(self) -> None:
        """An `Ack` came."""
        self._unacknowledged -= 1

    def report(self) -> list[Post]:
        """Acknowledge the parent if this part has ended."""
        parent = self._parent
        if parent is None or not self.ended or self.failure is not None:
            return []
        self._parent = None
        return [Post(parent, _ACK)]

    def owes(self, sender: int) -> bool:
        """Is an acknowledgement for `sender` still to come?"""
        return self._parent == sender

    def fail(self, failure: Failure, partners: Iterable[int], sender: int | None) -> list[Post]:
        """The pass fails here, or failed elsewhere: tell everyone who may take part."""
        if self.failure is not None:
            return []
        self.failure = failure
        return [Post(peer, Fail(failure)) for peer in sorted(self._audience(partners) - {sender})]

    def depends_on(self, worker: int, partners: Iterable[int]) -> bool:
        """Does what is left to do here need that worker?"""
        if self.failure is not None or (self.ended and self._parent is None):
            return False
        return worker in self._audience(partners)

    def _audience(self, partners: Iterable[int]) -> set[int]:
        return (self._told | set(partners)) - {self._worker}

    def _tell(self, peers: Iterable[int]) -> list[Post]:
        begin = Begin(self.options, self._history)
        posts = [Post(peer, begin) for peer in sorted(peers)]
        self._told.update(post.to for post in posts)
        self._unacknowledged += len(posts)
        return posts

    def _absences(self) -> list[Post]:
        absent, self._absent = self._absent, {}
        return [Post(peer, Absent(tuple(messages))) for peer, messages in absent.items()]


def engages(message: Message) -> bool:
    return type(message) is Begin or (type(message) is Gradient and message.engages)


def calls_for_answer(message: Message) -> bool:
    """Whether the worker that gets it has something to say after it, sooner or later."""
    return type(message) is Gradient or type(message) is Begin


def merge_ack(posts: list[Post], ack: list[Post]) -> list[Post]:
    """Let the last gradient for the parent carry the acknowledgement, if there is one."""
    if not ack:
        return posts
    parent = ack[0].to
    for place in reversed(range(len(posts))):
        to, message = posts[place]
        if to == parent and type(message) is Gradient:
            posts[place] = Post(to, Gradient(*message[:-1], True))
            return posts
    return posts + ack


_LAYOUTS = (torch.strided, torch.sparse_coo)


def fit(
    record: SendRecord | EnclosedSend, sender: int, gradients: Sequence[Tensor | None] | None
) -> bool:
    """Nearly always true, and quick to tell; what is wrong otherwise, `check_gradients` finds."""
    if sender != record.peer or not gradients or record.node is None:
        return False
    return fits(record.node, gradients)


def check_gradients(
    record: SendRecord | EnclosedSend,
    sender: int,
    gradients: Sequence[Tensor | None] | None,
    name_of: Callable[[int], str] = str,
) -> None:
    """Refuse gradients (None: their absence) that do not belong to the tensors that were sent."""
    name = f"The gradients of message {record.message}, sent to worker {name_of(record.peer)},"
    if sender != record.peer:
        raise BadGradient(f"{name} came from worker {name_of(sender)}, which never had it.")
    if gradients is None:
        return
    if len(gradients) != len(record.shapes):
        raise BadGradient(
            f"{name} are {len(gradients)}, but {len(record.shapes)} tensors need one."
        )
    for place, (gradient, (shape, dtype)) in enumerate(zip(gradients, record.shapes, strict=True)):
        if gradient is None:
            continue
        if gradient.shape != shape:
            raise BadGradient(
                f"{name} do not fit: tensor {place} has shape {tuple(shape)}, its gradient "
                f"{tuple(gradient.shape)}."
            )
        if gradient.dtype != dtype:
            raise BadGradient(
                f"{name} do not fit: tensor {place} is {dtype}, its gradient {gradient.dtype}."
            )
        if gradient.layout not in _LAYOUTS:
            raise BadGradient(
                f"{name} do not fit: the gradient of tensor {place} has the layout "
                f"{gradient.layout}; only strided and sparse COO gradients travel."
            )
