"""The transport of production: links to other workers, and the threads that serve them.

Between two workers there are up to two links, one for the calls of each: `Outgoing` is the caller's
end, `Incoming` the callee's. They are made when the first call needs them. A link whose connection
breaks is mended while the other process answers at its address; a process that does not, is gone.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any

from telegrad.rpc.arrivals import Arrivals
from telegrad.rpc.calls import Pending, latched
from telegrad.rpc.closing import IT_IS_OVER
from telegrad.rpc.completions import Completions
from telegrad.rpc.errors import NoRoom, TelegradError, WorkerLost
from telegrad.rpc.failures import report_background_error
from telegrad.rpc.futures import runs_callbacks
from telegrad.rpc.incoming import Aside, Incoming
from telegrad.rpc.lobby import Lobby
from telegrad.rpc.lookout import Lookout
from telegrad.rpc.loopback import Loopback
from telegrad.rpc.meeting import (
    PATIENCE,
    Connected,
    CutShort,
    Meeting,
    Unanswered,
    Visit,
    meet,
)
from telegrad.rpc.members import Member
from telegrad.rpc.node import Node
from telegrad.rpc.outgoing import Outgoing
from telegrad.rpc.room import is_lack, no_room
from telegrad.rpc.runtime import Threads
from telegrad.rpc.slow import Run, SlowFunctions
from telegrad.rpc.transport import Reply
from telegrad.rpc.visitors import Visitors
from telegrad.rpc.watch import QUICK_TICK, TICK, Watch
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire import interrupts
from telegrad.wire.address import Unreachable
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Kind
from telegrad.wire.handshake import HandshakeError
from telegrad.wire.link import Link, LinkClosed
from telegrad.wire.session import SessionError
from telegrad.wire.stream import Stream

PAUSE_BEFORE_RETRY = 0.05
MAX_UNANSWERED = 5
PATIENCE_WITH_FAREWELL = 0.5
LONGEST_WAIT = 3600.0
BURY_EVERY = 0.02
"""Seconds between two tellings of references that died: each takes the interpreter from those who
work, and a step of training may let go of one after the other."""


class Found(Enum):
    """How a worker is that was asked for a sign."""

    WELL = 0
    BUSY = 1
    SILENT = 2
    DEAD = 3


class _Turn(threading.local):
    """What the calling thread serves: the link that the request came by, and its token there."""

    incoming: Incoming | Loopback | None = None
    token: object = None
    timed: Run | None = None
    """A function that may be slow."""


class _NotInTime(OSError):
    """The deadline of a call passed before its worker was met."""


class Agent:
    """Runs a node over sockets."""

    def __init__(self, node: Node, threads: Threads, meeting: Meeting, liveness: float) -> None:
        self.node = node
        self.threads = threads
        self.local = _Turn()
        self.slow_functions = SlowFunctions()
        self._meeting = meeting
        self._liveness = liveness
        self._limits = node.limits.of_frames()
        self.silence = threading.Condition()
        self._lock = threading.Lock()
        self._outgoing: dict[int, Outgoing | Loopback] = {}
        self._incoming: dict[int, Incoming] = {}
        most_bytes = node.limits.bytes_in_flight
        self._aside: defaultdict[int, Aside] = defaultdict(partial(Aside, most_bytes))
        self._connecting: dict[int, threading.Lock] = {}
        self._ended: set[int] = set()
        self.lookout = Lookout(self, meeting, liveness)
        meeting.silence = liveness
        self._next_burial = 0.0
        self._closed = False
        self.watch = Watch(self._tick, self._next_deadline, threads.run)
        try:
            self.lobby = Lobby(self.watch, threads.run, self.about_to_sleep)
            self.arrivals = Arrivals(self.watch, threads.run)
        except OSError:  # No room for its descriptor.
            self.watch.close()
            raise
        threads.nudge = self.watch.poke
        self.visitors = Visitors(self, meeting, liveness)
        self._loopback = Loopback(self)
        self._outgoing[node.info.id] = self._loopback

    def start(self, announce: bool = False) -> None:
        """`announce`: the others may not know of this worker. None may call it before all do."""
        self.watch.start()
        self.lookout.start()
        self.visitors.expect()
        if announce:
            self._announce()
        self.visitors.ready()

    def _announce(self) -> None:
        """Show this worker to all others that live, which so learn that its predecessor is gone.

        A reference that it is given by one who dies thereafter would else be lost: the owner has to
        know whom to ask.
        """
        for member in self.node.members.members():
            self.replace(member.info)
        for member in self.node.members.members():
            worker = member.info.id
            if worker != self.node.info.id and not self.node.is_lost(worker):
                with contextlib.suppress(OSError):
                    meet(self._meeting, self.node.info, member, "", 0, "probe").stream.close()

    def replace(self, info: WorkerInfo) -> None:
        """Only one worker has a name: whoever had it before this one is gone."""
        for worker in self.node.members.predecessors(info):
            self.lose(worker, "it was started anew")

    # The node's transport.

    def call(self, pending: Pending, packed: Packed, note: bytes) -> None:
        worker = pending.callee.id
        try:
            outgoing = self._outgoing.get(worker) or self._reach_for(pending)
            outgoing.call(pending, packed, note)
        except _NotInTime:
            self.node.calls.expire_one(pending)
            self.node.never_left(pending)
            self.complete_elsewhere([pending])
            return
        except NoRoom as error:
            # Also if its deadline passed meanwhile, which has settled it: it has not left.
            is_open = self.node.calls.take(worker, pending.call_id) is not None
            self.node.never_left(pending)
            if is_open:
                pending.settle(None, error)
            pending.complete()
            return
        except (WorkerLost, LinkClosed):
            # Whoever found the worker gone has settled its calls, unless this one came just after.
            self._settle_unreachable(pending)
            return
        if pending.completion:
            outgoing.attend()
            if pending.deadline < self.node.calls.next_deadline:
                self.node.calls.look_by(pending.deadline)
                self.watch.poke()

    def interrupted(self, pending: Pending) -> None:
        """Its caller is gone before the call has left: nobody will answer it."""
        # If it is settled, its deadline passed just before, or its worker was lost.
        self.node.calls.take(pending.callee.id, pending.call_id)
        self.node.never_left(pending)

    def post(self, to: int, packed: Packed, note: bytes) -> None:
        try:
            outgoing = self._outgoing.get(to) or self._reach(to)
            outgoing.post(packed, note)
        except NoRoom as error:
            # Nobody else could tell that it never left, and what it was about would hang.
            self.lose(to, f"it cannot be told what it has to know: {error}")
        except (WorkerLost, LinkClosed):
            return

    def reply(self, to: int, call_id: int, reply: Reply) -> None:
        if to == self.node.info.id:
            self._loopback.reply(call_id, reply)
            return
        incoming = self._incoming.get(to)
        if incoming is not None:
            incoming.reply_late(call_id, reply)

    def wait(self, pending: Pending, until: float = math.inf) -> None:
        if self.local.incoming is not None or self.node.coroutines.loops:
            self.blocking()
        # A worker that is just being lost has no link any more, and its calls are not settled yet.
        (self._outgoing.get(pending.callee.id) or self._loopback).wait(pending, until)
        if interrupts.put_off:
            interrupts.run_put_off()

    def attend(self, pending: Pending) -> None:
        outgoing = self._outgoing.get(pending.callee.id)
        if outgoing is not None:
            outgoing.attend()

    def starting(self, function: object) -> None:
        incoming = self.local.incoming
        if incoming is not None:
            incoming.about_to_run(self.local.token, function)

    def blocking(self) -> None:
        incoming = self.local.incoming
        if incoming is not None:
            incoming.about_to_block(self.local.token)
        if self.node.coroutines.loops:
            self.node.coroutines.blocking()

    def call_later(self, delay: float, work: Callable[[], object]) -> Callable[[], None]:
        return self.watch.call_later(delay, work).cancel

    def serving(self) -> bool:
        """Whether the calling thread runs a request, or what a request may wait for."""
        return (
            self.local.incoming is not None or runs_callbacks() or self.node.coroutines.run_here()
        )

    @property
    def closed(self) -> bool:
        return self._closed

    def is_ended(self, worker: int) -> bool:
        return worker in self._ended

    def ends(self) -> list[Outgoing | Incoming]:
        """Both kinds of links to other workers."""
        ends = (*self._outgoing.values(), *self._incoming.values())
        return [end for end in ends if not isinstance(end, Loopback)]

    def knows(self, worker: int) -> bool:
        return worker in self._outgoing

    def nudge(self) -> None:
        self.watch.poke()

    def _settle_unreachable(self, pending: Pending) -> None:
        if self.node.calls.take(pending.callee.id, pending.call_id) is not None:
            reason = self.node.lost_workers().get(pending.callee.id, "it cannot be reached")
            what = f"the call {pending.describe()}"
            pending.settle(None, WorkerLost.of(pending.callee.name, reason, what))
        pending.complete()

    def about_to_sleep(self) -> None:
        """A thread that serves requests has none."""
        self.watch.turn_off(self._needs_watch)

    def _needs_watch(self) -> bool:
        """Whether something runs that may take long, or is to be told to others."""
        if self._loopback.runs or any(end.runs for end in list(self._incoming.values())):
            return True
        return any(end.link.freed or end.link.has_unwritten for end in self.ends())

    # What the watch asks.

    def _tick(self, now: float) -> float:
        running = self._loopback.tick()
        tidy_in = math.inf
        if self.threads.has_waiting:
            self.threads.retry()
            running |= self.threads.has_waiting
        for incoming in list(self._incoming.values()):
            running |= incoming.tick()
            tidy_in = min(tidy_in, incoming.tidies(now))
        for outgoing in list(self._outgoing.values()):
            if isinstance(outgoing, Outgoing):
                tidy_in = min(tidy_in, outgoing.tidies(now))
        if self.node.values.has_deaths:
            running = True
            if now >= self._next_burial:
                self._next_burial = now + BURY_EVERY
                self.threads.run(self._bury)
        if self.node.calls.next_deadline <= now:
            self.complete_elsewhere(self.node.calls.expire(now))
        if not tidy_in:
            return QUICK_TICK
        return TICK if running or tidy_in < math.inf else 0.0

    def _bury(self) -> None:
        try:
            self.node.values.bury()
        except Exception:
            report_background_error("the release of references")

    def _next_deadline(self) -> float:
        return self.node.calls.next_deadline

    def complete_elsewhere(self, settled: Iterable[Pending]) -> None:
        completed = [pending for pending in settled if pending.completion]
        if completed:
            self.threads.run(Completions(completed, self.threads.run, self.watch.call_later).run)

    # Meeting others.

    def _reach(self, worker: int, deadline: float = math.inf) -> Outgoing | Loopback:
        """The link to a worker; connect if there is none."""
        with self._lock:
            gate = self._connecting.setdefault(worker, threading.Lock())
        left = deadline - self.node.runtime.now()
        if not gate.acquire(timeout=max(0.0, min(left, LONGEST_WAIT))):
            raise _NotInTime
        try:
            outgoing = self._outgoing.get(worker)
            if outgoing is not None:
                return outgoing
            if worker in self._ended or self._closed:
                raise WorkerLost(f"worker {worker} is gone")
            member = self._find(worker)
            session = secrets.token_hex(16)
            try:
                visit = self._meet(member, session, deadline)
            except _NotInTime:
                raise
            except OSError as error:
                if is_lack(error):
                    raise no_room(f"connect to worker {member.info.name!r}", error) from error
                give_up = self.lose if is_dead(error) else self.lookout.suspect
                give_up(worker, f"it cannot be reached ({error})")
                raise WorkerLost(f"worker {member.info.name!r} cannot be reached") from error
            link = self.link_over(visit)
            made = Outgoing(self, member, session, link)
            with self._lock:
                if worker in self._ended or self._closed:
                    made.end()
                    raise WorkerLost(f"worker {member.info.name!r} is gone")
                self._outgoing[worker] = made
            return made
        finally:
            gate.release()

    def _reach_for(self, pending: Pending) -> Outgoing | Loopback:
        """As `_reach`. A handler may raise what a connect that fails raises, so the main thread,
        which runs handlers, does not connect itself: it can be interrupted while another does."""
        worker, deadline = pending.callee.id, pending.deadline
        if threading.current_thread() is not threading.main_thread():
            return self._reach(worker, deadline)
        latch = latched()
        outcome: list[Outgoing | Loopback | BaseException] = []

        def reach() -> None:
            try:
                outcome.append(self._reach(worker, deadline))
            except BaseException as error:
                outcome.append(error)
            finally:
                latch.release()

        self.threads.run(reach)
        # Who connects keeps to the deadline; there may be no thread that does.
        left = max(0.0, deadline - self.node.runtime.now())
        try:
            reached_in_time = interrupts.await_latch(latch, -1 if left > LONGEST_WAIT else left)
        except BaseException:
            self.interrupted(pending)
            raise
        if not reached_in_time:
            raise _NotInTime
        reached = outcome.pop()
        if not isinstance(reached, BaseException):
            return reached
        try:
            raise reached
        finally:
            # Its traceback knows this frame: without this the two would keep each other.
            del reached

    def _find(self, worker: int) -> Member:
        try:
            return self.node.members.member(worker)
        except TelegradError as error:
            # Where others may lie, somebody has made it up, as a rule: who counts as lost is fenced
            # by all, and they know no such worker.
            if not self.node.data_only:
                self.lose(worker, f"it cannot be found ({error})")
            raise WorkerLost(f"worker {worker} cannot be found") from error

    def link_over(self, connected: Connected) -> Link:
        return Link(
            connected.stream,
            arena=connected.arena,
            view=connected.view,
            freed=connected.freed,
            limits=self._limits,
            group=connected.group,
            name=connected.name,
        )

    def _meet(self, member: Member, session: str, deadline: float) -> Visit:
        """Connect; again, if the connection is cut before the two have met.

        On a machine that has too much to do, a process that lives may take long to answer.
        """
        started = self.node.runtime.now()
        unanswered = 0
        while True:
            left = deadline - self.node.runtime.now()
            try:
                return meet(self._meeting, self.node.info, member, session, 0, "calls", left)
            except OSError as error:
                if deadline <= self.node.runtime.now() and not is_dead(error):
                    raise _NotInTime from None
                unanswered += isinstance(error, Unanswered)
                may_pass = isinstance(error, CutShort) or is_lack(error)
                if not may_pass or unanswered == MAX_UNANSWERED:
                    raise
                late = self.node.runtime.now() - started > self._liveness
                if late and not self._is_busy(member, error):
                    raise
                time.sleep(PAUSE_BEFORE_RETRY)

    def _is_busy(self, member: Member, error: OSError) -> bool:
        """Whether a worker that was not met is there: its system has taken the connection, and it
        shows signs of life, but its interpreter has no time for us. That may last for minutes."""
        return isinstance(error, CutShort) and self.lookout.hears(member.info.id)

    def incoming(self, worker: int) -> Incoming | None:
        """The end of the link by which that worker calls this one."""
        return self._incoming.get(worker)

    def aside(self, worker: int) -> Aside:
        with self._lock:
            return self._aside[worker]

    def take_in(self, incoming: Incoming) -> bool:
        """A worker has come to make calls, by a link in the place of any before."""
        worker = incoming.member.info.id
        with self._lock:
            if self._closed or worker in self._ended:
                return False
            old = self._incoming.get(worker)
            self._incoming[worker] = incoming
        if old is not None:
            old.end()
        return True

    def widen(self, outgoing: Outgoing, name: str) -> None:
        """Give a connection a lane. Without one, large tensors travel as they did before."""
        try:
            visit = meet(self._meeting, self.node.info, outgoing.member, name, 0, "lane")
        except OSError:
            outgoing.offer_to_widen()
            return
        if not self.attach(outgoing, name, visit):
            visit.close()

    def attach(self, end: Outgoing | Incoming, name: str, connected: Connected) -> bool:
        return end.link.attach(name, connected.stream, self.threads.run)

    # Breaks.

    def mend(self, outgoing: Outgoing, reason: str) -> None:
        """A connection broke; its reader tries to go on over a new one.

        An attempt to which nothing is said is given up in time for others: the next may pass.
        """
        member = outgoing.member
        worker = member.info.id
        patience = self._liveness / 4
        until = self.node.runtime.now() + self._liveness
        visit: Visit | None = None
        while not (outgoing.gone or self._closed):
            try:
                visit = meet(
                    self._meeting,
                    self.node.info,
                    member,
                    outgoing.session,
                    outgoing.link.session.seen,
                    "resume",
                    patience,
                )
                outgoing.resume(visit)
                return
            except (HandshakeError, SessionError, LinkClosed) as error:
                if visit is not None:
                    visit.close()
                self.lose(worker, f"{reason}, and could not be mended ({error})")
                return
            except OSError as error:
                if is_dead(error):
                    self.lose(worker, f"{reason}, and its process does not answer any more")
                    return
                left = until - self.node.runtime.now()
                if left <= 0 and not self._is_busy(member, error):
                    self.lookout.suspect(worker, f"{reason}, and it does not answer any more")
                    return
                patience = min(2 * patience, left) if left > 0 else PATIENCE
                time.sleep(PAUSE_BEFORE_RETRY)

    def incoming_broke(self, incoming: Incoming, reason: str) -> None:
        """The caller has to mend this link. If its process is gone, nobody will."""
        if incoming.gone or self._closed or incoming.member.info.id in self._ended:
            return
        member = incoming.member
        self.await_return(incoming, incoming.link.stream, reason)
        if self._probe(member, self._liveness) is Found.DEAD:
            self.lose(member.info.id, f"{reason}, and its process does not answer any more")

    def await_return(self, incoming: Incoming, broken: Stream, reason: str) -> None:
        """Its caller is lost, if it has not mended this link in time and could have."""
        member = incoming.member
        worker = member.info.id
        # A timer lasts longer than a link may, whose descriptors go with its stream.
        of_broken = weakref.ref(broken)

        def is_awaited() -> bool:
            present = self._incoming.get(worker)
            if present is None or not present.link.broken:
                return False
            return present.link.stream is of_broken()

        def give_up() -> None:
            lives = self.lookout.hears(worker)
            found = self._probe(member, PATIENCE) if lives else Found.SILENT
            if not is_awaited():
                return
            if found is Found.BUSY:
                look_again()
            else:
                self.lose(worker, f"{reason}, and it did not come back")

        def look_again() -> None:
            self.watch.call_later(
                self._liveness, lambda: self.threads.run(give_up) if is_awaited() else None
            )

        look_again()

    def _probe(self, member: Member, patience: float) -> Found:
        """See whether a worker answers."""
        try:
            meet(self._meeting, self.node.info, member, "", 0, "probe", patience).stream.close()
        except OSError as error:
            if is_dead(error):
                return Found.DEAD
            return Found.BUSY if self._is_busy(member, error) else Found.SILENT
        return Found.WELL

    def sever(self, worker: int) -> None:
        """Break the connections with a worker, as a network may: they have to mend."""
        for end in (self._outgoing.get(worker), self._incoming.get(worker)):
            if end is not None and not isinstance(end, Loopback):
                end.link.mark_broken()

    # Endings.

    def leave_all(self, reason: str) -> None:
        """Lose all others in one step: nobody is told, as what they count as lost is their own."""
        with self._lock:
            others = sorted(self.node.members.live() - self._ended - {self.node.info.id})
            self._ended.update(others)
            links = [*self._outgoing.values(), *self._incoming.values()]
            self._outgoing = {self.node.info.id: self._loopback}
            self._incoming = {}
            self._aside.clear()
        for worker in others:
            self.complete_elsewhere(self.node.worker_lost(worker, reason))
        for end in links:
            if not isinstance(end, Loopback):
                end.end()

    def lose(self, worker: int, reason: str) -> None:
        """Be done with a worker: settle what waits for it and accept nothing more from it."""
        with self._lock:
            if worker in self._ended or worker == self.node.info.id:
                return
            self._ended.add(worker)
            links = (self._outgoing.pop(worker, None), self._incoming.pop(worker, None))
            self._aside.pop(worker, None)
        failed = self.node.worker_lost(worker, reason)
        for link in links:
            if link is not None:
                link.end()
        self.complete_elsewhere(failed)

    def told_of_loss(self, sender: int, worker: int) -> None:
        """One worker says that another is gone.

        If that one answers here, the two have lost each other, and the one with the higher id has
        to go (agreement.py). Who sends what cannot be read is lost by those that it sends it to,
        and must not take them along.
        """
        if worker == self.node.info.id or self.is_ended(worker):
            return
        if self.node.data_only and not self.node.members.has(worker):
            return
        name, says = self.node.members.name(worker), self.node.members.name(sender)
        if sender > worker and self._answers(worker):
            self.lose(sender, f"it says that worker {name!r} is gone, which answers here")
        else:
            self.lose(worker, f"worker {says!r} reports that it is gone")

    def _answers(self, worker: int) -> bool:
        self.blocking()
        try:
            member = self.node.members.member(worker)
        except TelegradError:
            return False
        return self._probe(member, self._liveness) is Found.WELL and not self.is_ended(worker)

    def leave(self, worker: int, job_is_over: bool) -> None:
        """A worker said that it leaves."""
        by_itself = "it has left the job (its shutdown() was called)"
        self.lose(worker, IT_IS_OVER if job_is_over else by_itself)

    def close(self, farewell: bool = True, job_is_over: bool = False) -> None:
        """End every link. Others are told, so that they do not take it for a death."""
        with self._lock:
            self._closed = True
            links: list[Any] = [*self._outgoing.values(), *self._incoming.values()]
            self._outgoing.clear()
            self._incoming.clear()
        # Before all else: who still wants to visit is to see at once that nobody is here.
        self.visitors.close()
        self._meeting.close()
        cut = self.node.close()
        until = self.node.runtime.now() + PATIENCE_WITH_FAREWELL
        for end in links:
            if farewell and not isinstance(end, Loopback):
                with contextlib.suppress(OSError):
                    end.link.send(Kind.LEAVING, int(job_is_over), deadline=until)
                    end.link.drain(until)
            end.end()
        self._complete_cut(cut)
        self.watch.close()
        self.lobby.close()
        self.arrivals.close()
        self.lookout.close()

    def _complete_cut(self, cut: list[Pending]) -> None:
        """Complete the calls that were cut off. What users do then holds nobody up who leaves."""
        completed = latched()

        def complete() -> None:
            try:
                _complete(cut)
            finally:
                completed.release()

        if any(pending.completion for pending in cut):
            self.threads.run(complete)
            completed.acquire(timeout=PATIENCE_WITH_FAREWELL)

    def debug_info(self) -> dict[str, int]:
        return {
            "outgoing links": len(self._outgoing) - 1,
            "incoming links": len(self._incoming),
            "threads": threading.active_count(),
        }

    def bytes_moved(self) -> dict[str, tuple[int, int]]:
        """Bytes sent to and received from each worker, by its name, tensors included."""
        moved: dict[str, tuple[int, int]] = {}
        for end in [*self._outgoing.values(), *self._incoming.values()]:
            if isinstance(end, Loopback):
                continue
            link, name = end.link, end.member.info.name
            sent, received = moved.get(name, (0, 0))
            moved[name] = (sent + link.sent_bytes, received + link.received_bytes)
        return moved


def _complete(settled: list[Pending]) -> None:
    for pending in settled:
        pending.complete()


def is_dead(error: OSError) -> bool:
    """Whether a failed connect says that no process is there, not just that none answered yet."""
    cause = error.__context__ if isinstance(error, Unreachable) else error
    return isinstance(cause, ConnectionRefusedError | FileNotFoundError)
