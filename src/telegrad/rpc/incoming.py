"""The callee's end of a link: requests come in, replies go back.

The thread that reads a request runs it. Such a *leader* saves the hand-over to another thread,
which costs more than most requests. Three things make it let go, so that nobody waits behind it:

- The request starts to wait for something (a nested call, a value): another thread takes over the
  reading before it does.
- The watch sees it run for longer than a tick. The function is remembered as slow: from then on
  another thread takes over before it starts, until it has been quick a few times.
- The link has been read to its end, and others have links to this worker, too: all of them wait in
  the lobby for their next request, and one thread with them.

A leader is known by its token. Reading belongs to the token in `_leader`; whoever takes over puts a
new one there, and the old leader, when its request is done, sees that and goes home.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from telegrad.rpc.cargo import weigh_arrived
from telegrad.rpc.failures import report_background_error
from telegrad.rpc.lobby import IDLE_TIMEOUT
from telegrad.rpc.members import Member
from telegrad.rpc.slow import Run
from telegrad.rpc.transport import Reply
from telegrad.rpc.watch import TICK
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.link import Link, LinkBroken, LinkClosed

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent

TICKS_BEFORE_BEGUN = 12
PATIENCE = 5.0
FEW_ANSWERS = 64
MOST_ANSWERS = 1 << 15
MOST_ANSWER_BYTES = 1 << 30


class Aside:
    """What of the requests of one worker runs, or will be answered, while another thread reads.

    It is the same for all connections by which that worker comes, one after the other: what came by
    a former one still runs.
    """

    __slots__ = ("_lock", "_most_bytes", "_weight", "count", "loads")

    def __init__(self, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._most_bytes = most_bytes
        self._weight = 0
        self.count = 0
        self.loads: dict[int, int] = {}
        """The bytes of each call, by its number: of those that bring next to none as well, or one
        of them, under the number of a heavy call, would end that one's account."""

    def add(self, count: int) -> None:
        with self._lock:
            self.count += count

    def load(self, call_id: int, size: int) -> bool:
        """Take in the bytes of a call. False: they are too many beside those that are here."""
        with self._lock:
            if size and self._weight and self._weight + size > self._most_bytes:
                return False
            self.loads[call_id] = size
            self._weight += size
            return True

    def unload(self, call_id: int) -> None:
        with self._lock:
            self._weight -= self.loads.pop(call_id, 0)


class Incoming:
    """Calls from one other worker to this one."""

    def __init__(
        self, agent: Agent, member: Member, session: str, link: Link, aside: Aside
    ) -> None:
        self.agent = agent
        self.member = member
        self._worker = member.info.id
        self.session = session
        self.link = link
        self.gone = False
        self._lock = threading.Lock()
        self._leader: object | None = None
        self._is_held = False
        """Nobody may lead: the link is being mended, and another thread empties its buffer."""
        self._turn = 0
        self._seen_turn = 0
        self._ticks_seen = 0
        self._function: object | None = None
        self._refuses = False
        self._aside = aside
        self._most_aside = agent.node.limits.calls_in_flight
        self._weighs = agent.node.limits.weighs_calls
        link.nudge = agent.watch.poke
        self._adopt_stream()

    def _adopt_stream(self) -> None:
        stream = self.link.stream
        stream.set_receive_timeout(IDLE_TIMEOUT)
        stream.about_to_sleep = self.agent.about_to_sleep
        self._descriptor = stream.fileno()

    @property
    def runs(self) -> bool:
        """Whether the one that leads runs a request."""
        return bool(self._turn & 1)

    def start(self) -> None:
        """Have a thread lead, if none does."""
        with self._lock:
            if self._leader is not None or self._is_held or self.gone:
                return
            me = self._leader = object()
        self.agent.threads.run(lambda: self._lead_and_host(me))

    # Leading.

    def lead(self) -> None:
        """Bytes were noticed: read and serve, on the calling thread, if nobody does."""
        with self._lock:
            if self._leader is not None or self._is_held or self.gone:
                return
            me = self._leader = object()
        self._lead(me)

    def _lead_and_host(self, me: object) -> None:
        if self._leader is not me or not self._park():
            self._lead(me)
        self.agent.lobby.host()

    def _lead(self, me: object) -> None:
        agent, link, local = self.agent, self.link, self.agent.local
        local.timed = None
        while self._leader is me:
            try:
                frame = link.receive()
            except (LinkBroken, LinkClosed) as error:
                with agent.silence:
                    self._leader = None
                    agent.silence.notify_all()
                if link.broken:
                    agent.incoming_broke(self, str(error))
                else:
                    # Mended before we gave up leading: who mended it found a leader.
                    self.start()
                return
            except CodecError as error:
                self._leader = None
                agent.lose(self._worker, f"it sent what cannot be read ({error})")
                return
            if frame is None:
                if self._park():
                    return
                continue
            is_call = frame.kind == Kind.CALL
            if not is_call and frame.kind != Kind.POST:
                if frame.kind == Kind.LEAVING:
                    agent.leave(self._worker, frame.call_id == 1)
                else:
                    # A call under another name would be none of those that are counted.
                    agent.lose(self._worker, "it sent an answer where requests come")
                return
            if is_call and link.session.kept_frames > FEW_ANSWERS and self._keeps_too_much():
                agent.lose(self._worker, "it never acknowledges the answers it gets")
                return
            by_turns = agent.lobby.last != self._worker
            agent.lobby.last = self._worker
            self._function = None
            self._turn += 1
            if agent.watch.idle:
                # As if it had looked now: when it does, this one has run for all the time.
                self._seen_turn, self._ticks_seen = self._turn, 0
                agent.watch.set_alarm()
            local.incoming, local.token = self, me
            try:
                if is_call:
                    is_counted = self._serve_call(frame, me)
                else:
                    agent.node.serve_post(self._worker, frame)
                    is_counted = True
                    if link.has_unwritten and not link.has_message():
                        link.flush()
            except BaseException:
                # Whatever it was: those that come after it are to be read.
                report_background_error(f"a request of worker {self.member.info.name!r}")
                is_counted = True
            finally:
                local.incoming = None
            link.stream.awaited = agent.lobby.awaited = agent.node.served ^ self._worker
            if local.timed is not None:
                agent.slow_functions.ended(local.timed)
                local.timed = None
            with self._lock:
                if self._leader is me:
                    self._turn += 1
                    self._function = None  # What it refers to is not kept until the next one.
                    if by_turns and self._is_left_to_lobby():
                        return
                elif is_counted:
                    self._aside.add(-1)
        self._flush()

    def _keeps_too_much(self) -> bool:
        """Whether more answers are kept for a resend than a caller that follows the rules causes.

        A call carries the acknowledgement of all answers that its caller has read, so those kept
        when it arrives belong to calls that were in flight when it left; and a caller that has read
        a megabyte acknowledges it at once.
        """
        session = self.link.session
        return session.kept_frames > MOST_ANSWERS or session.kept_bytes > MOST_ANSWER_BYTES

    def _serve_call(self, frame: Frame, me: object) -> bool:
        """Run a call, and answer it. Whether it is still counted among those that run aside, if
        another thread has come to lead."""
        node = self.agent.node
        reply: Reply | None
        if self._aside.count >= self._most_aside:
            reply = self._refuse(node.too_many_calls, frame)
        elif self._weighs:
            reply = self._weigh_and_serve(frame)
        else:
            reply = node.serve_call(self._worker, frame)
            if reply is None:
                self._aside.add(1)
        if reply is None:
            if self.link.has_unwritten and not self.link.has_message():
                self.link.flush()
            return True
        leads = self._leader is me
        if not leads:
            # Before its caller hears of it, and may send the next one.
            self._aside.add(-1)
        self.reply(frame.call_id, reply, leads and self.link.has_message())
        return leads

    def _weigh_and_serve(self, frame: Frame) -> Reply | None:
        """Serve a call of one who may not fill the memory here."""
        node, worker = self.agent.node, self.member.info.id
        aside, call_id = self._aside, frame.call_id
        if call_id in aside.loads:
            return self._refuse(node.numbered_twice, frame)
        if self.link.session.kept_bytes > MOST_ANSWER_BYTES:
            return self._refuse(node.too_many_answers, frame)
        size = weigh_arrived(frame)
        if not aside.load(call_id, size):
            return self._refuse(node.too_many_bytes, frame)
        reply = node.serve_call(worker, frame)
        if reply is None:
            aside.add(1)
        else:
            aside.unload(call_id)
        return reply

    def _refuse(self, refusal: Callable[[int, Frame], Reply], frame: Frame) -> Reply:
        """Nobody else reads meanwhile: whoever sends on would have ever more threads read what is
        refused."""
        self._refuses = True
        try:
            return refusal(self.member.info.id, frame)
        finally:
            self._refuses = False

    def reply(self, call_id: int, reply: Reply, later: bool = False) -> None:
        packed = reply.packed
        try:
            self.link.send(
                reply.kind,
                call_id,
                packed.meta,
                packed.buffers,
                reply.note,
                packed.tensors,
                later,
                untracked=packed.untracked,
            )
        except LinkClosed:
            return
        except Exception:
            report_background_error(f"a reply to worker {self.member.info.name!r}")

    def reply_late(self, call_id: int, reply: Reply) -> None:
        """The answer to a request that was left open when its turn ended."""
        self._aside.add(-1)
        if self._aside.loads:
            self._aside.unload(call_id)
        self.reply(call_id, reply)

    def _flush(self) -> None:
        if self.link.has_unwritten:
            self.link.flush()

    # Handing over.

    def about_to_block(self, token: object) -> None:
        self._flush()
        if self._leader is token:
            self._hand_over(token)

    def about_to_run(self, token: object, function: object) -> None:
        if self._leader is token:
            self._function = function
            slow = self.agent.slow_functions
            if slow.counts and slow.knows(function):
                self.agent.local.timed = Run.of(function)
                if slow.expects(function):
                    self._flush()
                    self._hand_over(token)

    def _hand_over(self, token: object | None, turn: int | None = None) -> bool:
        """Let another thread read, if `token` leads; with a `turn`, only if it is still running.

        A leader that has ended its turn reads again, and must be left alone: two threads that read
        one stream tear its frames apart.
        """
        with self._lock:
            if token is None or self._leader is not token or self.gone:
                return False
            if turn is not None and turn != self._turn:
                return False
            self._turn += 1
            self._aside.add(1)
            # Nobody need be woken before there is something to read.
            if not self.link.has_bytes() and self.agent.lobby.admit(self, self._descriptor):
                self._leader = None
                return True
            heir = self._leader = object()
        self.agent.threads.run(lambda: self._lead_and_host(heir))
        return True

    def _park(self) -> bool:
        """Leave the link to the lobby, if there is nothing to read, and room."""
        # In one step: who finds that nobody leads may have the lobby forget it again.
        with self._lock:
            return self._is_left_to_lobby()

    def _is_left_to_lobby(self) -> bool:
        """As `_park`, with the lock held."""
        if self.gone:
            return True
        if self.link.has_bytes() or not self.agent.lobby.admit(self, self._descriptor):
            return False
        self._leader = None
        return True

    def tick(self) -> bool:
        """The watch looks in. Whether anything runs."""
        turn = self._turn
        running = bool(turn & 1)
        # Before its function has begun a request is left alone for longer: requests begin in order.
        self._ticks_seen = self._ticks_seen + 1 if turn == self._seen_turn else 0
        patience = 1 if self._function is not None else TICKS_BEFORE_BEGUN
        if running and self._ticks_seen >= patience and not self._refuses:
            function = self._function
            if self._hand_over(self._leader, turn) and function is not None:
                self.agent.slow_functions.was_slow(function)
        self._seen_turn = turn
        return running

    def tidies(self, now: float) -> float:
        """Have written what was left unwritten; in how many seconds to look for that again."""
        left = self.link.tidy_in(now)
        if not left:
            self.agent.threads.run(self._tidy)
        return left

    def _tidy(self) -> None:
        with contextlib.suppress(LinkClosed):
            self.link.tidy()

    # Breaking and ending.

    def await_silence(self) -> None:
        """The caller comes back over a new connection: give the old one up, if we had not yet.

        A leader that runs a request might come back to the link while that is mended. It is not
        waited for: it leads no longer. Nor does whoever was given the link by the lobby just before
        and is late: until the link has been mended, nobody leads.
        """
        self.link.mark_broken()
        until = time.monotonic() + PATIENCE
        with self.agent.silence:
            # Nobody tells when a request begins.
            while not self._is_silent() and time.monotonic() < until:
                self.agent.silence.wait(TICK)
        # While the stream that broke still has its number: another may have it soon.
        self.agent.lobby.forget(self, self._descriptor)
        # Nobody else may notice that the caller does not come after all.
        self.agent.await_return(self, self.link.stream, "the connection broke")

    def _is_silent(self) -> bool:
        with self._lock:
            if self._leader is not None and self._turn & 1:
                self._leader = None
                self._turn += 1
                self._aside.add(1)
            self._is_held = self._leader is None
            return self._is_held or self.gone

    def resumed(self) -> None:
        with self._lock:
            self._adopt_stream()
            self._is_held = False
        self.start()

    def end(self) -> None:
        with self._lock:
            self.gone = True
            self.agent.lobby.forget(self, self._descriptor)
        self.link.close()
