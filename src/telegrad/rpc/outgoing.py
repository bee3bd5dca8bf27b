"""The caller's end of a link: requests leave, replies come back.

There is no reading thread. Of the threads that wait for replies one *reads*: it takes what comes,
gives each reply to its call, and when its own is there hands the reading on to another that waits.
So the usual call, one thread that asks and waits, has no hand-over between threads at all. Replies
for which nobody waits (futures) are read by a thread that waits for another worker, or noticed by
the watch, which lends a thread to read them (`arrivals.py`).

The rules that make this safe:
- `_reading` is set and cleared under `_roles`; who finds it clear and wants a reply sets it, and
  puts its thread into `_reader`. An interrupt (Ctrl-C) may come between any two steps: whoever is
  interrupted looks there whether the role is its own, and gives it up.
- Who gives the role up either passes it to a waiter (the *heir*), or clears it, in one step under
  `_roles`: a waiter that registered before that step is found, one that comes after finds the role
  free. An heir whose call is settled gives the role up in turn.
- Waiters whose replies have come (`_served`) are woken one after the other, each by the one before:
  by the reader before it sleeps or as its heir, then by whoever leaves the queue. Only one thread
  at a time can have the interpreter; were all woken at once, most would wake in order to wait for
  it, on the core that the callee needs. Whoever is in `_served` and has left the queue was awake.
- A link is *armed* for replies that nobody waits for, and stays so. It is armed under `_roles` and
  while nobody reads, and disarmed by who has the role, or under `_roles` while another one has it:
  so what is said in `_armed` holds, but for a link that the watch has just noticed. Who gives the
  role up, and expects more, arms it.
- Futures are completed and signal handlers run (which is user code, and may call) only by threads
  that neither have the role nor are on the queue, where it might be left to them.
"""

from __future__ import annotations

import contextlib
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING

from telegrad.rpc.arrivals import are_pressing
from telegrad.rpc.calls import Pending, kind_of
from telegrad.rpc.cargo import LIGHT, Cargo, weigh
from telegrad.rpc.members import Member
from telegrad.rpc.watch import ENDED, READABLE
from telegrad.wire import interrupts
from telegrad.wire.codec import Packed
from telegrad.wire.errors import CodecError
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.link import Link, LinkBroken, LinkClosed

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent
    from telegrad.rpc.meeting import Visit

RECEIVE_TIMEOUT = 0.05
MAY_WAIT = 0.001
"""Seconds for which a future without callbacks is left to the thread that reads for it."""
MAX_CALLS_IN_FLIGHT = 8192
BACKLOG = 32
MOST_LANES = 8
PAUSE_FOR_ROOM = 0.001
HEAVY = 1 << 16
"""Bytes of a message whose memory is to be had back soon."""
LOOK_EVERY = 64
"""Posts that are not heavy: what is kept of them until they are acknowledged is little."""


class Outgoing:
    """Calls from this worker to one other."""

    def __init__(self, agent: Agent, member: Member, session: str, link: Link) -> None:
        self.agent = agent
        self.member = member
        self._worker = member.info.id
        self._open = agent.node.calls.open_to(member.info.id)
        self.session = session
        self.link = link
        self.gone = False
        self._roles = threading.Lock()
        self._reading = False
        self._reader = 0
        self._waiters: dict[int, Pending] = {}
        self._served: deque[Pending] = deque()
        self._heir: Pending | None = None
        self._armed = False
        self._completed: list[Pending] = []
        self._in_passing = False
        self._parting: Callable[[], None] | None = None
        self._lanes_asked = 0
        self._posts = 0
        self._allowed = agent.node.limits.calls_an_honest_caller_makes
        self._room = threading.Lock()
        self._held = 0
        """The calls that wait for room: they are open, and have not left."""
        self._cargo = Cargo(self._open, agent.node.limits.bytes_in_flight)
        link.while_blocked = self._read_while_blocked
        link.nudge = agent.watch.poke
        self._adopt_stream()

    def _adopt_stream(self) -> None:
        self.link.stream.set_receive_timeout(RECEIVE_TIMEOUT)
        self.link.stream.crowd = self._waiters
        self._descriptor = self.link.stream.fileno()
        self.agent.watch.register(self._descriptor, self._noticed, ENDED)
        self.offer_to_widen()

    def offer_to_widen(self) -> None:
        """Let the link ask for a lane, when it has something to send that is worth one."""
        if self.link.name and self._lanes_asked < MOST_LANES and not self.gone:
            self.link.widen = self._widen

    def _widen(self) -> None:
        """A lane would be of use. One after the other that breaks is worse than none."""
        self._lanes_asked += 1
        self.agent.threads.run(partial(self.agent.widen, self, self.link.name))

    # Waiting and reading.

    def wait(self, pending: Pending, until: float = math.inf) -> None:
        """Return when the call is settled, or at `until`."""
        if self.link.has_unwritten:
            self.link.flush(pending.deadline)
        try:
            while not pending.done:
                if self._begin_to_read(pending) or self._await_turn(pending, until):
                    self._read_until(pending, until)
                if interrupts.put_off:
                    interrupts.run_put_off()
                if pending.done or until <= self.agent.node.runtime.now():
                    return
        except BaseException:
            self._not_interrupted_while_reading()
            raise

    def _begin_to_read(self, pending: Pending | None = None) -> bool:
        """Take the reading role if nobody has it; else a call that waits is put on the queue."""
        with self._roles:
            if not self._reading:
                self._reader = get_ident()
                self._reading = True
                return True
            if pending is not None:
                pending.make_latch()
                self._waiters[pending.call_id] = pending
            return False

    def _not_interrupted_while_reading(self) -> None:
        """An exception came: the calling thread must not keep the role."""
        if self._reader == get_ident():
            self._give_up_reading()

    def _await_turn(self, pending: Pending, until: float) -> bool:
        """Wait until the call is settled or the reading role is ours. True: read on."""
        latch = pending.latch
        assert latch is not None
        now = self.agent.node.runtime.now
        try:
            while not pending.done and self._heir is not pending:
                time_is = now()
                if pending.deadline <= time_is:
                    self.agent.node.calls.expire_one(pending)
                elif until <= time_is or interrupts.has_put_off():
                    break
                else:
                    ends = min(pending.deadline, until)
                    latch.acquire(timeout=interrupts.at_a_time(ends - time_is))
        except BaseException:
            # Interrupted: an heir that is not there would keep all others from reading, and another
            # thread that waits for the same call would not be woken.
            if pending.done:
                pending.wake()
            if self._leave_queue(pending):
                self._give_up_reading()
            else:
                self._wake_next()
            raise
        heir = self._leave_queue(pending)
        if pending.done:
            # Several threads may wait for one call: each wakes the next.
            pending.wake()
            if heir:
                self._give_up_reading()
            elif self._served:
                self._wake_next()
            return False
        return heir

    def _leave_queue(self, pending: Pending) -> bool:
        """Wait no longer. Whether the reading role has been left to this call."""
        with self._roles:
            self._waiters.pop(pending.call_id, None)
            heir = self._heir is pending
            if heir:
                self._reader = get_ident()
                self._heir = None
        return heir

    def _wake_next(self) -> None:
        """Wake one of those whose replies have come. It wakes the next when it leaves the queue."""
        with self._roles:
            served = self._next_served()
            if served is not None:
                served.wake()

    def _next_served(self) -> Pending | None:
        """One whose reply has come and that has not left the queue. With the lock held."""
        while self._served:
            served = self._served.popleft()
            if served.call_id in self._waiters:
                return served
        return None

    def _read_until(self, pending: Pending, until: float) -> None:
        """Read until the call is settled, the time has come, or the link breaks."""
        now = self.agent.node.runtime.now
        link = self.link
        try:
            if not (self._armed and self._gathers(pending, until)):
                link.stream.awaited = kind_of(pending.target)
                while not pending.done:
                    if self._served and not link.has_frame():
                        self._wake_next()
                    self._take_one(link)
                    if pending.done:
                        break
                    # Also when something came: replies of others may come without a pause.
                    time_is = now()
                    if pending.deadline <= time_is:
                        self.agent.node.calls.expire_one(pending)
                    elif until <= time_is or interrupts.has_put_off():
                        break
                    elif self._completed and not link.has_frame():
                        self.agent.complete_elsewhere(self._take_completed())
            while link.has_frame():
                self._take_one(link)
        except LinkBroken as error:
            self._mend_elsewhere(str(error))
            return
        except BaseException:
            self._give_up_reading()
            raise
        for completed in self._pass_on_reading():
            completed.complete()

    def _gathers(self, pending: Pending, until: float) -> bool:
        """Wait for this link together with all that are armed, until the call is settled or the
        time has come. False: this link is to be read alone; it is not armed any more."""
        arrivals = self.agent.arrivals
        # Who waits for a future has others, as a rule; for any other call this link is enough.
        if pending.completion and arrivals.begin(self._descriptor):
            others: list[Pending] = []
            try:
                if self._gather(pending, until, others):
                    return True
            finally:
                arrivals.end()
                self.agent.complete_elsewhere(others)
        self._disarm()
        return False

    def _gather(self, pending: Pending, until: float, others: list[Pending]) -> bool:
        """As `_gathers`, with the right to do so. False: what is to come tells nobody. `others` are
        calls of other links that are still to be completed."""
        agent, link, awaited = self.agent, self.link, kind_of(pending.target)
        if link.has_bytes():
            self._take_up()
        kept_since = math.inf
        while not pending.done:
            if link.is_halfway:
                return False
            if self._served:
                self._wake_next()
            patience = MAY_WAIT if self._completed or others else RECEIVE_TIMEOUT
            for each in agent.arrivals.wait(awaited, patience):
                if each is self:
                    self._take_up()
                    continue
                completed = each.read_in_passing()
                if are_pressing(completed):
                    agent.complete_elsewhere(completed)
                else:
                    others += completed
            if pending.done:
                break
            time_is = agent.node.runtime.now()
            if pending.deadline <= time_is:
                agent.node.calls.expire_one(pending)
            elif until <= time_is or interrupts.has_put_off():
                break
            elif self._completed or others:
                kept_since = min(kept_since, time_is)
                kept = self._completed + others
                if time_is - kept_since >= MAY_WAIT or are_pressing(kept):
                    self._take_completed()
                    others.clear()
                    agent.complete_elsewhere(kept)
                    kept_since = math.inf
        return True

    def read_in_passing(self) -> Sequence[Pending]:
        """Read what is here, on a thread that waits for several links: it may wait for none of
        them. The calls that are to be completed."""
        with self._roles:
            if self._reading:
                self._disarm()
                return ()
            self._reader = get_ident()
            self._reading = self._in_passing = True
        try:
            if self.gone:
                self.agent.arrivals.forget(self, self._descriptor)
            else:
                self._take_up()
        except LinkBroken as error:
            self._in_passing = False
            self._mend_elsewhere(str(error))
            return ()
        except BaseException:
            self._in_passing = False
            self.agent.complete_elsewhere(self._pass_on_reading())
            raise
        # While the role is still ours: the next one may be in passing as well.
        self._in_passing = False
        part, self._parting = self._parting, None
        if part is not None:
            self._part_elsewhere(part)
            return ()
        return self._pass_on_reading()

    def _part(self, part: Callable[[], None]) -> None:
        """This is the end of the link. What is done then takes its time."""
        if self._in_passing:
            self._parting = part
        else:
            part()

    def _part_elsewhere(self, part: Callable[[], None]) -> None:
        """Leave it, and the role, to another thread."""

        def leave() -> None:
            try:
                part()
            finally:
                self._give_up_reading()

        self._reader = 0
        self._disarm()
        self.agent.threads.run(leave)

    def _mend_elsewhere(self, reason: str) -> None:
        """Leave the broken link, and the role, to another thread: this one has a deadline."""

        def mend() -> None:
            try:
                self.agent.mend(self, reason)
            finally:
                self._give_up_reading()

        self._reader = 0
        if self._armed:
            self._disarm()
        self._wake_next()
        self.agent.threads.run(mend)

    def _take_completed(self) -> list[Pending]:
        completed, self._completed = self._completed, []
        return completed

    def _receive(self, link: Link) -> Frame | None:
        """Take one frame and give it to its call. The reader sees breaks, and mends them."""
        try:
            return self._take_one(link)
        except LinkBroken as error:
            self.agent.mend(self, str(error))
            return None

    def _take_one(self, link: Link, waits: bool = True) -> Frame | None:
        try:
            frame = link.receive() if waits else link.take_up()
        except CodecError as error:
            self._part(
                partial(self.agent.lose, self._worker, f"it sent what cannot be read ({error})")
            )
            link.forget_unread()
            return None
        if frame is None:
            return None
        if frame.kind == Kind.LEAVING:
            self._part(partial(self.agent.leave, self._worker, frame.call_id == 1))
            return frame
        pending = self._open.pop(frame.call_id, None)
        if pending is None:
            self.agent.threads.run(partial(self.agent.node.discard, self._worker, frame))
            return frame
        # As `Pending.store` does.
        pending.frame = frame
        pending.done = True
        if pending.latch is not None:
            if frame.call_id in self._waiters:
                self._served.append(pending)
            else:
                # Somebody may wait all the same: of two that wait for one call, the first to leave
                # takes it from the queue.
                pending.wake()
        if pending.completion:
            self._completed.append(pending)
        return frame

    def _give_up_reading(self) -> None:
        for pending in self._pass_on_reading():
            pending.complete()

    def _pass_on_reading(self) -> Sequence[Pending]:
        """Let somebody else read, and return the calls that are still to be completed."""
        with self._roles:
            completed = self._take_completed() if self._completed else ()
            heir = self._choose_heir() if self._waiters or self._served else None
            self._reading = heir is not None
            self._reader = 0
        if heir is not None or self.gone:
            return completed
        if self.link.is_halfway:
            self.agent.threads.run(self._read_for_others)
        elif self.agent.node.calls.expects(self._worker) and not self._armed:
            self.arm()
        return completed

    def _choose_heir(self) -> Pending | None:
        """Leave the reading to one of those that wait, and wake it. With the lock held."""
        heir = self._next_served()
        if heir is None:
            waiters = reversed(self._waiters.values())
            heir = next((waiter for waiter in waiters if not waiter.done), None)
        if heir is not None:
            self._heir = heir
            heir.wake()
        return heir

    def _read_while_blocked(self) -> None:
        """A writer finds the stream full: read replies, or two full streams wait for each other."""
        if not self._read_aside(self._read_or_write):
            self.link.stream.wait_writable(0.05)

    def _read_or_write(self) -> None:
        poll = select.poll()
        poll.register(self.link.stream.fileno(), select.POLLIN | select.POLLOUT)
        events = poll.poll(100)
        if self.link.has_frame() or any(event & ~select.POLLOUT for _, event in events):
            self._take_one(self.link)

    def _take_up(self) -> None:
        """Read what is here, and wait for nothing."""
        # Not all that comes: the replies of others may come without a pause.
        link = self.link
        while self._take_one(link, waits=False) is not None:
            if not (link.has_frame() or link.stream.pending()):
                return

    def _read_aside(self, read: Callable[[], None]) -> bool:
        """Read on a thread that has something else to do. False: another one reads."""
        broken = False
        try:
            if self._reading or not self._begin_to_read():
                return False
            read()
        except LinkBroken:
            # To mend a link is to wait for its writer, and that may be this thread.
            broken = True
        finally:
            if self._reader == get_ident():
                # The code of users may not run here: what it sends would wait for this thread.
                self.agent.complete_elsewhere(self._pass_on_reading())
        if broken:
            self.agent.threads.run(self._read_for_others)
        return True

    # What the watch notices.

    def tidies(self, now: float) -> float:
        """The watch looks in: have written what was left unwritten; in how many seconds to look for
        that again."""
        left = self.link.tidy_in(now)
        if not left:
            self.agent.threads.run(self._tidy)
        return left

    def _tidy(self) -> None:
        with contextlib.suppress(LinkClosed):
            self.link.tidy()

    def arm(self) -> None:
        """See to it that what comes is read, unless somebody reads and will do so."""
        with self._roles:
            if not (self._reading or self.gone):
                self._armed = True
                if not self.agent.arrivals.arm(self, self._descriptor):
                    self.agent.watch.look_for(self._descriptor, READABLE)

    def _disarm(self) -> None:
        self._armed = False
        self.agent.arrivals.disarm(self, self._descriptor)

    def _noticed(self, events: int) -> None:
        self._armed = False
        if self.gone:
            # It ended while it was being mended: the watch must not keep its descriptor open.
            self.agent.watch.forget(self._descriptor)
        else:
            self.agent.threads.run(self._read_for_others)

    def _read_for_others(self) -> None:
        """Read replies for which nobody waits, as long as they come."""
        worker = self.member.info.id
        while True:
            if self.gone or not self._begin_to_read():
                return
            self._disarm()
            self.link.stream.awaited = 0
            frame = None
            try:
                while not self.gone:
                    if self._served and not self.link.has_frame():
                        self._wake_next()
                    frame = self._receive(self.link)
                    if self.link.is_halfway and not self._completed:
                        continue
                    if (frame is None or self._completed) and not self.link.has_frame():
                        break
            finally:
                self._give_up_reading()
            if frame is None or not self.agent.node.calls.expects(worker):
                return

    # Sending.

    def call(self, pending: Pending, packed: Packed, note: bytes) -> None:
        in_flight = len(self._open)
        size = weigh(packed) if packed.buffers or len(packed.meta) >= LIGHT else 0
        if (
            in_flight > MAX_CALLS_IN_FLIGHT
            or in_flight > self._allowed
            or (size and not self._cargo.load(pending.call_id, size))
        ):
            self._await_room(pending, size)
            if pending.done:
                self.agent.node.never_left(pending)
                self.agent.complete_elsewhere([pending])
                return
        # The callee has plenty to do: let calls for which nobody waits yet leave together.
        later = in_flight > BACKLOG and bool(pending.completion)
        self.link.send(
            Kind.CALL,
            pending.call_id,
            packed.meta,
            packed.buffers,
            note,
            packed.tensors,
            later,
            pending.deadline,
            packed.untracked,
        )
        if later:
            self.agent.watch.poke()

    def post(self, packed: Packed, note: bytes) -> None:
        # It has no reply that would be waited for, and read: who only posts has to look himself for
        # the memory that is given back and what is acknowledged. While a call is under way somebody
        # reads.
        self._posts += 1
        if (
            not self._posts % LOOK_EVERY or (packed.buffers and weigh(packed) >= HEAVY)
        ) and not self.agent.node.calls.expects(self._worker):
            self._read_aside(self._take_up)
        self.link.send(
            Kind.POST,
            0,
            packed.meta,
            packed.buffers,
            note,
            packed.tensors,
            untracked=packed.untracked,
        )

    def attend(self) -> None:
        """See to it that replies are read although nobody may wait for them."""
        if not (self._armed or self._reading):
            self.arm()

    def _await_room(self, pending: Pending, size: int) -> None:
        """Back-pressure: while too much is in flight, wait until enough of it has ended.

        Any call may end first, and the oldest may wait for a later one. Threads that serve a
        request are let through: were they held up, nested calls could wait for each other.
        """
        if self.agent.serving():
            self._cargo.force(pending.call_id, size)
            return
        node = self.agent.node
        with self._room:
            self._held += 1
        enters = False
        try:
            self.link.flush(pending.deadline)
            while not (self.gone or (enters := self._enters(pending, size))):
                if pending.deadline <= node.runtime.now():
                    node.calls.expire_one(pending)
                if pending.done:
                    return
                try:
                    interrupts.run_put_off()
                except BaseException:
                    self.agent.interrupted(pending)
                    raise
                if not self._read_some():
                    time.sleep(PAUSE_FOR_ROOM)
        finally:
            if not enters:
                with self._room:
                    self._held -= 1

    def _enters(self, pending: Pending, size: int) -> bool:
        """Whether there is room for a call that waits; then it has taken its place."""
        with self._room:
            # Without those that wait: they would keep each other out, were they many.
            left = len(self._open) - self._held
            if left >= min(MAX_CALLS_IN_FLIGHT, self._allowed):
                return False
            if size and not self._cargo.load(pending.call_id, size):
                return False
            self._held -= 1
            return True

    def _read_some(self) -> bool:
        """Read what has come, if nobody else reads."""
        try:
            if not self._begin_to_read():
                return False
            if self._armed:
                self._disarm()
            self._take_one(self.link)
            while self.link.has_frame():
                self._take_one(self.link)
        except LinkBroken as error:
            self._mend_elsewhere(str(error))
            return True
        except BaseException:
            self._not_interrupted_while_reading()
            raise
        self._give_up_reading()
        return True

    # Breaking and ending.

    def resume(self, visit: Visit) -> None:
        """Go on over a new connection."""
        # While the stream that broke still has its number: another may have it soon.
        self.agent.arrivals.forget(self, self._descriptor)
        self.agent.watch.forget(self._descriptor)
        self.link.resume(visit.stream, visit.peer_has_seen, visit.group, visit.name)
        self._adopt_stream()
        self._armed = False

    def end(self) -> None:
        """For good. The calls in flight have been settled by the node."""
        self.gone = True
        self.agent.arrivals.forget(self, self._descriptor)
        self.agent.watch.forget(self._descriptor)
        self.link.close()
