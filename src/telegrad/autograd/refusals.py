"""Messages that were recorded on one side only, or not taken at all: no pass may wait for them.

A send is recorded before its message leaves, and a recv when it arrives. In between the message may
be refused: the receiver keeps as many records or contexts as it may, or cannot read it; or the call
never leaves, as its worker is not met in time. Nothing of such a message is ever used, so in one
process its tensors would have no gradient. Its sender takes the record back, and a pass that has
begun there goes on as if *none* had come.

What workers say to each other in a pass can be refused, too: gradients that are differentiated
again are recorded like all tensors. That is no call, so nobody would be told of it. Such a pass
fails, both where it was refused and where it came from, whichever of the two still waits.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from telegrad.autograd.context import Context
from telegrad.autograd.crossing import unpack_note
from telegrad.autograd.errors import AutogradError
from telegrad.autograd.events import Event, TakenBack, Unread
from telegrad.rpc.errors import in_few_words
from telegrad.wire.frames import Frame

if TYPE_CHECKING:
    from telegrad.autograd.service import Autograd

TOPIC_REFUSED = "autograd.refused"
TOPIC_UNREAD = "autograd.unread"


class Refusals:
    """What one worker says and hears of messages that were not taken."""

    def __init__(self, service: Autograd) -> None:
        self._node = node = service.node
        self._container = service.container
        node.on_post(TOPIC_REFUSED, self._on_refused)
        node.on_post(TOPIC_UNREAD, self._on_unread)
        node.on_unread(self._unread)

    def never_left(self, context_id: int, message: int, to: int) -> None:
        """A message that was recorded as sent to that worker will not leave."""
        context = self._container.find(context_id)
        if context is not None and context.take_back(message, to) and context.participants:
            # On another thread: whoever brings news to a pass may have to run it.
            self._node.runtime.spawn(partial(self._tell, context, TakenBack(message)))

    def never_arrived(self, context_id: int, message: int, sender: int) -> None:
        """A message of that worker was refused, and is not recorded."""
        self._node.post(sender, TOPIC_REFUSED, (context_id, message))

    def _on_refused(self, sender: int, payload: Any) -> None:
        match payload:
            case (int(context_id), int(message)):
                context = self._container.find(context_id)
                if context is not None and context.take_back(message, sender):
                    self._tell(context, TakenBack(message))
            case _:
                raise AutogradError("A refusal names no context and message.")

    def _unread(self, sender: int, frame: Frame, reason: str) -> None:
        """A post of that worker was refused. It may have belonged to a pass."""
        note = frame.note
        context_id = unpack_note(note)[0] if note else 0
        reason = in_few_words(reason)
        self._fail_passes(sender, context_id, reason)
        # Who shares no context with this worker has no pass that needs it. Two whose limits let
        # nothing through would tell each other so for ever.
        if note or any(sender in context.known_workers for context in self._container):
            self._node.post(sender, TOPIC_UNREAD, (context_id, reason))

    def _on_unread(self, sender: int, payload: Any) -> None:
        match payload:
            case (int(context_id), str(reason)):
                self._fail_passes(sender, context_id, in_few_words(reason))
            case _:
                raise AutogradError("A refusal names no context and reason.")

    def _fail_passes(self, worker: int, context_id: int, reason: str) -> None:
        """Those in this context (0: in any, as none was named) that need that worker."""
        for context in self._container:
            if not context_id or context.id == context_id:
                # More than there is to say comes from one who lies: it has been heard.
                with contextlib.suppress(AutogradError):
                    self._tell(context, Unread(worker, reason), worker)

    def _tell(self, context: Context, event: Event, sender: int | None = None) -> None:
        for participant in list(context.participants.values()):
            participant.deliver(self._node.info.id if sender is None else sender, event)
