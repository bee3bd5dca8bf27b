"""Those who come to a worker of their own accord: who may enter, and what for.

Another worker connects in order to make calls (and its connection becomes an `Incoming`), to go on
with one that broke, to give one a lane, or only to see whether somebody answers. Before that it has
stood at the door (`reception.py`) and has proved that it knows the job's key (`meeting.py`).

What a network delivers late must not count. A caller makes one attempt after the other, and numbers
them: once a later one has been let in, an earlier one comes from a time that is over, and would put
a dead connection in the place of the one that works; with a session that has forgotten what came by
the other, calls would run twice.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from telegrad.rpc.errors import NoRoom, UnknownWorker
from telegrad.rpc.incoming import Incoming
from telegrad.rpc.meeting import PATIENCE, Meeting, Visitor, greet
from telegrad.rpc.reception import Reception
from telegrad.rpc.room import is_lack
from telegrad.wire.handshake import HandshakeError, Hello, Refuse
from telegrad.wire.link import LinkClosed
from telegrad.wire.session import SessionError

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent


@dataclass
class _Caller:
    """Lets one worker's connections in, one at a time."""

    door: threading.Lock = field(default_factory=threading.Lock)
    latest: int = 0
    """The latest of its attempts that was let in."""


class Visitors:
    """Lets others in."""

    def __init__(self, agent: Agent, meeting: Meeting, liveness: float) -> None:
        self._agent = agent
        self._node = agent.node
        self._meeting = meeting
        self._entering: set[str] = set()
        self._callers: dict[int, _Caller] = {}
        self._ready = threading.Event()
        self.reception = Reception(agent.watch, agent.threads.run, self._greet, liveness)

    def expect(self) -> None:
        """Open the doors. Who comes waits until this worker is ready."""
        for listener in self._meeting.listeners:
            self.reception.open(listener)

    def ready(self) -> None:
        """Those that have to know of this worker do: others may come in."""
        self._ready.set()

    def close(self) -> None:
        self.reception.close()
        for listener in self._meeting.listeners:
            self._agent.watch.forget(listener.fileno())

    def _greet(self, connection: socket.socket, listener: socket.socket) -> None:
        session: list[str] = []
        try:
            lack = self.reception.lack_for(connection)
            admit = partial(self._admit, session) if lack is None else partial(self._refuse, lack)
            visitor = self._meet_visitor(connection, listener, admit)
            if visitor is not None:
                self._receive(visitor)
        finally:
            with self._agent.silence:
                self._entering.difference_update(session)
                self._agent.silence.notify_all()

    def _refuse(self, lack: NoRoom, hello: Hello) -> Refuse:
        return Refuse(f"worker {self._node.info.name!r} has no room: {lack}")

    def _meet_visitor(
        self,
        connection: socket.socket,
        listener: socket.socket,
        admit: Callable[[Hello], Refuse | int],
    ) -> Visitor | None:
        visitor = None
        try:
            visitor = greet(self._meeting, self._node.info, connection, listener, admit)
        except (HandshakeError, OSError) as error:
            if is_lack(error):
                self.reception.lacks()
            connection.close()
        finally:
            self.reception.has_gone(connection, visitor is not None)
        return visitor

    def _receive(self, visitor: Visitor) -> None:
        hello = visitor.hello
        if hello.purpose == "probe":
            visitor.stream.close()
            return
        if hello.purpose == "lane":
            incoming = self._agent.incoming(hello.worker_id)
            if incoming is None or not self._agent.attach(incoming, hello.session, visitor):
                visitor.close()
            return
        caller = self._caller(hello)
        with caller.door:
            if caller.latest != hello.attempt:
                visitor.close()
            elif hello.purpose == "resume":
                self._resume_incoming(visitor)
            else:
                self._welcome(visitor)

    def _caller(self, hello: Hello) -> _Caller:
        return self._callers.setdefault(hello.worker_id, _Caller())

    def _admit(self, session: list[str], hello: Hello) -> Refuse | int:
        """Whether a worker that proved the key may enter; and what we have seen of its session.

        A new session is noted in `session`. For its caller it begins with our answer, and may break
        and be resumed before the thread that answered has made the link.
        """
        if self._agent.closed:
            return Refuse(f"worker {self._node.info.name!r} is shutting down")
        try:
            member = self._node.members.member(hello.worker_id)
        except UnknownWorker:
            return Refuse(f"worker {hello.worker!r} is not a member of this job")
        except Exception as error:
            return Refuse(f"worker {hello.worker!r} cannot be told from a stranger: {error}")
        if self._agent.is_ended(hello.worker_id) or member.incarnation != hello.incarnation:
            why = self._node.lost_workers().get(hello.worker_id, "another came in its place")
            return Refuse(
                f"this incarnation of worker {hello.worker!r} counts as gone ({why}): it has to "
                "join anew"
            )
        if self._node.members.predecessors(member.info):
            # Elsewhere: a loss may have to be told to the very worker that waits for this answer.
            self._agent.threads.run(partial(self._agent.replace, member.info))
        if hello.purpose == "probe":
            return 0
        self._ready.wait(PATIENCE)
        if hello.purpose == "lane":
            present = self._agent.incoming(hello.worker_id)
            if present is None or not hello.session or present.link.name != hello.session:
                return Refuse(f"worker {self._node.info.name!r} has no such connection")
            return 0
        if hello.purpose == "resume":
            self._await_entry(hello.session)
        caller = self._caller(hello)
        with caller.door:
            if hello.attempt <= caller.latest:
                return Refuse(f"worker {hello.worker!r} has come by a later connection meanwhile")
            seen = self._resumable(hello) if hello.purpose == "resume" else 0
            if isinstance(seen, int):
                caller.latest = hello.attempt
        if hello.purpose != "resume":
            session.append(hello.session)
            with self._agent.silence:
                self._entering.add(hello.session)
        return seen

    def _await_entry(self, session: str) -> None:
        with self._agent.silence:
            self._agent.silence.wait_for(lambda: session not in self._entering, PATIENCE / 2)

    def _resumable(self, hello: Hello) -> Refuse | int:
        """What we have seen of a session that is to go on. No more of it is read until it does."""
        incoming = self._agent.incoming(hello.worker_id)
        if incoming is None or incoming.session != hello.session:
            return Refuse(f"worker {self._node.info.name!r} knows nothing of that session")
        incoming.await_silence()
        return incoming.link.session.seen

    def _welcome(self, visitor: Visitor) -> None:
        agent = self._agent
        member = self._node.members.member(visitor.hello.worker_id)
        aside = agent.aside(member.info.id)
        link = agent.link_over(visitor)
        incoming = Incoming(agent, member, visitor.hello.session, link, aside)
        if agent.take_in(incoming):
            incoming.start()
        else:
            incoming.end()

    def _resume_incoming(self, visitor: Visitor) -> None:
        worker = visitor.hello.worker_id
        incoming = self._agent.incoming(worker)
        if incoming is None:
            visitor.close()
            return
        try:
            resume_at = visitor.hello.resume_at
            incoming.link.resume(visitor.stream, resume_at, visitor.group, visitor.name)
        except (SessionError, LinkClosed) as error:
            visitor.close()
            self._agent.lose(worker, f"its connection broke and could not be mended ({error})")
            return
        incoming.resumed()
