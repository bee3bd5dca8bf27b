"""Looks after the other workers of a job: who is stopped, who has fallen silent, who has to go.

Processes of this host are looked at in /proc (`vitals.py`), those of other hosts through their
companions (`heartbeat.py`). What is certain is acted upon at once. Who is only silent may be well,
and the way there cut: then those who are heard are asked, and `agreement.py` decides.

So that the others can see how this worker is, its own companion is started anew if it was killed.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING

from telegrad.rpc.agreement import Verdict, judge
from telegrad.rpc.calls import Pending
from telegrad.rpc.errors import in_few_words
from telegrad.rpc.failures import report_background_error
from telegrad.rpc.heartbeat import Heartbeat, is_asked
from telegrad.rpc.meeting import PULSE_KEY, Meeting
from telegrad.rpc.members import Member
from telegrad.rpc.silence import GiveUp
from telegrad.rpc.vitals import Vital
from telegrad.rpc.worker import is_worker_id
from telegrad.wire.warm import warm

if TYPE_CHECKING:
    from telegrad.rpc.agent import Agent

HEARS, EXPELLED = "hears", "expelled"
UNMET_PER_LOOK = 4
TRIM_EVERY = 10.0


class Lookout:
    """One worker's view of how the others are."""

    def __init__(self, agent: Agent, meeting: Meeting, liveness: float) -> None:
        self._agent = agent
        self._meeting = meeting
        self._node = agent.node
        self._liveness = liveness
        self._interval = min(0.5, liveness / 10)
        self._inquiry = min(1.0, liveness / 5)
        self._turn = agent.node.info.id * UNMET_PER_LOOK
        self._next_trim = 0.0
        self._stopped_since: dict[int, float] = {}
        self._last_look = 0.0
        self._received: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._suspects: set[int] = set()
        self._heartbeat = Heartbeat(
            meeting.key.derive(PULSE_KEY), liveness, self._interval, self._inquiry, self._given_up
        )
        self._node.on_operation(HEARS, lambda sender, worker: self.hears(int(worker)))
        self._node.on_post(EXPELLED, self._told_to_expel)

    def start(self) -> None:
        self._agent.watch.call_later(self._interval, self._look)

    def close(self) -> None:
        self._heartbeat.close()

    def _look(self) -> None:
        if self._agent.closed:
            return
        try:
            self._look_at_processes()
            self._look_at_connections()
            self._listen_for_signs()
        except Exception:
            report_background_error("the look after other workers")
        if self._meeting.lacks_company:
            self._agent.threads.run(self._restore_company)
        if self._node.runtime.now() >= self._next_trim:
            self._next_trim = self._node.runtime.now() + TRIM_EVERY
            self._agent.threads.run(self._trim)
        self._agent.watch.call_later(self._interval, self._look)

    def _restore_company(self) -> None:
        """The others would take this worker for gone. At most once for each look: whatever kills
        one companion may kill the next."""
        with contextlib.suppress(OSError):  # No room for a process: the next look tries again.
            self._meeting.restore_company()

    def _trim(self) -> None:
        """Let go of memory that large tensors left warm, if none came since the last time."""
        for end in self._agent.ends():
            with contextlib.suppress(OSError):
                end.link.trim()
        warm.trim()

    def _look_at_processes(self) -> None:
        """Look whether the processes of the others are there and run.

        A killed one breaks its links and is noticed by that; a stopped one keeps them, and those
        that we never met have none.

        Who was stopped together with this process is to be judged by the time since it goes on: a
        job that is stopped in a shell and continued there is continued one process after the other.
        """
        now = self._node.runtime.now()
        if now - self._last_look > 2 * self._interval:
            self._stopped_since.clear()
        self._last_look = now
        lose = self._agent.lose
        for member in self._due():
            worker, vital = member.info.id, _vital(member)
            if vital is Vital.DEAD:
                lose(worker, "its process has ended")
            elif vital is not Vital.STOPPED:
                self._stopped_since.pop(worker, None)
            elif (
                now - self._stopped_since.setdefault(worker, now) >= self._liveness - self._interval
            ):
                self._expel(worker, f"its process has been stopped for {self._liveness:g} s")

    def _look_at_connections(self) -> None:
        """Give up those whose other host does not even acknowledge what it is sent. Whether its
        worker is lost turns out when they are mended."""
        for end in self._agent.ends():
            if end.link.unheard() > self._liveness:
                end.link.mark_broken()

    def _due(self) -> list[Member]:
        """Those that we are linked with, that seem to be gone or stopped, and some in turn.

        Each begins with others, so all together look at all of them, and who finds one that has
        been stopped for too long tells everyone. To look closely at all of them would be work that
        grows with the square of the workers of one host.
        """
        due = {end.member.info.id: end.member for end in self._agent.ends()}
        rest = [member for member in self._others() if member.info.id not in due]
        first = self._turn % len(rest) if rest else 0
        self._turn += UNMET_PER_LOOK
        in_turn = (rest[first:] + rest[:first])[:UNMET_PER_LOOK]
        seem_to_be_gone = [
            member
            for member in rest
            if member.info.id in self._stopped_since
            or (member.process is not None and member.process.is_gone())
        ]
        due.update((member.info.id, member) for member in [*in_turn, *seem_to_be_gone])
        return list(due.values())

    def _listen_for_signs(self) -> None:
        """Of workers that only their companions can tell of; what they send is a sign, too."""
        for end in self._agent.ends():
            if self._received.get(end) != end.link.received_bytes:
                self._received[end] = end.link.received_bytes
                self._heartbeat.heard(end.member.info.id)
        self._heartbeat.beat(self._others(), self._node.runtime.now())

    def _others(self) -> list[Member]:
        node = self._node
        return [
            member
            for member in node.members.members()
            if member.info != node.info and not node.is_lost(member.info.id)
        ]

    def hears(self, worker: int) -> bool:
        """Whether there is a sign that a worker lives, as far as this one can know."""
        if self._node.is_lost(worker):
            return False
        vital = _vital(self._node.members.member(worker))
        if vital is Vital.UNKNOWN:
            return worker == self._node.info.id or self._heartbeat.hears(worker)
        return vital is Vital.ALIVE

    def _given_up(self, silence: GiveUp) -> None:
        if silence.certain:
            self._agent.threads.run(partial(self._expel, silence.worker, silence.reason))
        else:
            self.suspect(silence.worker, silence.reason)

    def suspect(self, worker: int, reason: str) -> None:
        """Nothing comes from a worker. If it may be just the way to it, the others are asked."""
        if not is_asked(self._node.members.member(worker)):
            self._agent.lose(worker, reason)
        elif worker not in self._suspects:
            self._suspects.add(worker)
            self._agent.threads.run(partial(self._inquire, worker, reason))

    def _inquire(self, worker: int, reason: str) -> None:
        node, agent = self._node, self._agent
        others = [member.info for member in self._others() if member.info.id != worker]
        heard = {info.id for info in others if self.hears(info.id)}
        asked = [
            node.call(info, HEARS, (worker,), None, self._inquiry)
            for info in others
            if info.id in heard
        ]
        answers = [self._says_yes(pending) for pending in asked]
        silent = {w for w in self._heartbeat.silent() | self._suspects if not agent.is_ended(w)}
        match judge(node.info.id, worker, any(answers), heard, silent - heard):
            case Verdict.LOSE:
                agent.lose(worker, reason)
            case Verdict.EXPEL:
                self._expel(worker, f"{reason}, though others hear it: the way there is cut")
            case Verdict.LEAVE:
                name = node.members.name(worker)
                agent.leave_all(f"this worker is cut off from worker {name!r}: {reason}")

    def _expel(self, worker: int, reason: str) -> None:
        """Lose a worker that may still run, and have the others lose it: it is gone for all."""
        self._agent.lose(worker, reason)
        for member in self._others():
            post = partial(self._node.post, member.info.id, EXPELLED, (worker, reason))
            self._agent.threads.run(post)

    def _says_yes(self, pending: Pending) -> bool:
        try:
            return self._node.wait(pending) is True
        except Exception:
            # Whatever went wrong there: without a verdict, nothing would end that waits for the
            # one that is silent.
            return False

    def _told_to_expel(self, sender: int, payload: object) -> None:
        """Another worker found one stopped, or the way to it cut.

        Where workers do not trust each other it may have made that up. So only one that is in the
        job can be expelled, and one that seems to be well here, with the lower id of the two, is
        asked (agreement.py).
        """
        match payload:
            case (int(worker), str(reason)) if is_worker_id(worker):
                pass
            case _:
                return
        node = self._node
        if node.is_lost(worker) or worker == node.info.id:
            return
        if node.data_only:
            if not node.members.has(worker):
                return
            if sender > worker and self._seems_well(worker):
                self._agent.told_of_loss(sender, worker)
                return
        name = node.members.name(sender)
        self._agent.lose(worker, f"{in_few_words(reason)} (says worker {name!r})")

    def _seems_well(self, worker: int) -> bool:
        """As far as can be told without asking it: nothing may be known of one on another host."""
        vital = _vital(self._node.members.member(worker))
        if vital is Vital.UNKNOWN:
            return worker not in self._heartbeat.silent()
        return vital is Vital.ALIVE


def _vital(member: Member) -> Vital:
    return Vital.UNKNOWN if member.process is None else member.process.vital()
