"""How a job ends in good order: nobody leaves while a call may still come.

When all workers have called `shutdown`, calls may still be on their way, and functions that run may
make more. The workers meet in rounds at the one with the lowest id. In each round every worker says
how many calls it has made, how many it has finished for others, and how many of its own are open.
If all that were made are finished, none is open, and the sums are those of the round before, then
no message was on its way between the two rounds and nothing can start any more (the counting
argument of Mattern). A function that never returns cannot hold the job up: when no call is open
any more and only such functions run, their callers have given up, and after a while so do we.

Workers may be lost meanwhile, the one that they meet at included. The others then meet at the next,
from round 0 on. It may be that the rest has left in good order and only this worker was not told:
so it calls the roll, and does not wait for those who do not answer.

In a large job nobody looks after all others (`members.py`): a worker may have died unnoticed by the
one that they meet at. So that one, and only that one, calls those who have not come for a while.

When the job is over, some workers learn of it before others, leave, and are gone. For who does not
know yet, that looks like a loss: those who leave say that the job is over, and who misses one
without a word, and wants to leave itself, waits a moment for its own answer (`is_over`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from telegrad.rpc.errors import CallTimeout, TelegradError, WorkerLost
from telegrad.rpc.results import Finish, Later

if TYPE_CHECKING:
    from telegrad.rpc.calls import Pending
    from telegrad.rpc.node import Node

CLOSING = "closing"
PATIENCE_WITH_ABANDONED = 2.0
BETWEEN_ROUNDS = 0.002
LONGEST_PAUSE = 0.1
ROLL_CALL = -1
MISSED_AFTER = 1.0
MISSED_AGAIN_AFTER = 60.0
PATIENCE_WITH_ANSWER = 1.0
IT_IS_OVER = "it has left the job, which is over"


@dataclass(eq=False)
class _Round:
    counts: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    waiting: dict[int, Finish] = field(default_factory=dict)


class Closing:
    """One worker's part in ending the job."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._changed = node.runtime.condition()
        self._rounds: dict[int, _Round] = {}
        self._verdicts: dict[int, bool] = {}
        self._last_sums: tuple[int, int] | None = None
        self._abandoned_since: float | None = None
        self._leaves = False
        self._is_over = False
        node.on_operation(CLOSING, self._join)
        node.on_lost(lambda worker, reason: self._reconsider())

    def close(self, timeout: float) -> None:
        """Return when every worker is ready to leave. `timeout` 0 means to wait for ever."""
        self._leaves = True
        try:
            self._await_all(timeout)
            self._is_over = True
        finally:
            self._leaves = False
            with self._changed:
                self._changed.notify_all()

    def is_over(self) -> bool:
        """Whether the job has ended in good order; if this worker wants to leave, it may be told so
        any moment."""
        now = self._node.runtime.now
        until = now() + PATIENCE_WITH_ANSWER
        with self._changed:
            while self._leaves and (left := until - now()) > 0:
                self._changed.wait(left)
        return self._is_over

    def _await_all(self, timeout: float) -> None:
        node = self._node
        until = node.runtime.now() + timeout if timeout > 0 else None
        leader, number = -1, 0
        pause = BETWEEN_ROUNDS
        while True:
            lowest = node.members.lowest_live()
            if lowest != leader:
                leader, number = lowest, 0
            counts = (node.calls_made(), node.calls_finished(), node.calls.total())
            remaining = 0.0 if until is None else until - node.runtime.now()
            if until is not None and remaining <= 0:
                raise self._too_late(timeout)
            try:
                over = node.request(
                    node.members.find(leader), CLOSING, number, *counts, timeout=remaining
                )
            except WorkerLost:
                self._call_the_roll()
                continue
            except CallTimeout:
                raise self._too_late(timeout) from None
            if over:
                return
            number += 1
            with self._changed:
                self._changed.wait(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _too_late(self, timeout: float) -> CallTimeout:
        return CallTimeout(
            f"shutdown of worker {self._node.info.name!r} took longer than {timeout:g} s: not "
            "every worker has called shutdown, or calls are still running"
        )

    def _call_the_roll(self) -> None:
        """Find out who has left: a call to such a worker fails at once, and it counts as lost."""
        for member in self._node.members.members():
            self._call_to_roll(member.info.id)

    def _call_to_roll(self, worker: int) -> None:
        node = self._node
        if worker != node.info.id and not node.is_lost(worker):
            to = node.members.member(worker).info
            node.call(to, CLOSING, (ROLL_CALL, 0, 0, 0), None, 0, _nothing)

    def _miss(self, this: _Round, pause: float) -> None:
        """Call those who have not come to this round, if it is still open."""
        node = self._node
        with self._changed:
            if this not in self._rounds.values() or node.closed:
                return
            missing = node.members.live() - this.counts.keys()
        for worker in sorted(missing):
            try:
                self._call_to_roll(worker)
            except TelegradError as error:
                node.transport.lose(worker, f"it cannot be found ({error})")
        again = min(2 * pause, MISSED_AGAIN_AFTER)
        node.runtime.call_later(again, partial(self._miss, this, again))

    def _join(self, sender: int, number: int, made: int, finished: int, open_: int) -> Later:
        counts = (made, finished, open_)
        # Fewer than none, from one who lies, would hide what the others still have under way.
        if type(number) is not int or any(type(each) is not int or each < 0 for each in counts):
            raise ValueError("what came is no message of a worker that wants to leave")

        def subscribe(finish: Finish) -> None:
            if number == ROLL_CALL:
                finish(False, None)
                return
            with self._changed:
                this = self._rounds.get(number)
                if this is None:
                    this = self._rounds[number] = self._open_round()
                this.counts[sender] = counts
                this.waiting[sender] = finish
            self._reconsider()

        return Later(subscribe)

    def _open_round(self) -> _Round:
        this = _Round()
        if not self._node.members.knows_all:
            miss = partial(self._miss, this, MISSED_AFTER)
            self._node.runtime.call_later(MISSED_AFTER, miss)
        return this

    def _reconsider(self) -> None:
        node = self._node
        members = node.members
        answers: list[tuple[Finish, bool]] = []
        with self._changed:
            for number, this in list(self._rounds.items()):
                # Asked each time that a worker comes: to look at all of them would be n squared.
                if len(this.counts) < members.fewest_live():
                    continue
                if members.live() <= this.counts.keys():
                    over = self._judge(this)
                    # This worker leaves when it has its answer, so it gets it after all others.
                    mine = this.waiting.pop(node.info.id, None)
                    answers += [(finish, over) for finish in this.waiting.values()]
                    answers += [(mine, over)] if mine is not None else []
                    del self._rounds[number]
        for finish, over in answers:
            finish(over, None)

    def _judge(self, this: _Round) -> bool:
        made = sum(counts[0] for counts in this.counts.values())
        finished = sum(counts[1] for counts in this.counts.values())
        open_ = sum(counts[2] for counts in this.counts.values())
        unchanged = self._last_sums == (made, finished)
        self._last_sums = (made, finished)
        if open_ or not unchanged:
            self._abandoned_since = None
            return False
        if made == finished:
            return True
        now = self._node.runtime.now()
        if self._abandoned_since is None:
            self._abandoned_since = now
        return now - self._abandoned_since > PATIENCE_WITH_ABANDONED


def _nothing(pending: Pending) -> None:
    """Whether the worker is there is noticed by the transport."""
