"""Who reads a link: always one thread. And for whom answers are kept."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad import rpc
from telegrad.rpc import agent as agent_module
from telegrad.rpc import incoming
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.rpc.incoming import Aside, Incoming
from telegrad.rpc.limits import default_limits
from telegrad.rpc.lobby import Lobby
from telegrad.rpc.meeting import CutShort
from telegrad.rpc.runtime import Threads
from telegrad.rpc.slow import SlowFunctions
from telegrad.rpc.watch import Watch
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire import sending
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.link import Link
from telegrad.wire.session import Session
from telegrad.wire.trust import Trust
from tests.rpc import functions, inside
from tests.rpc.fleet import Job, Process
from tests.wire.test_link import streams


def hand_over_for_a_turn_that_is_over() -> tuple[bool, bool]:
    """Do what the watch does when it saw a request run that has ended meanwhile."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    of_main = agent._incoming[0]
    leader = of_main._leader
    handed_over = of_main._hand_over(leader, of_main._turn - 2)
    return handed_over, of_main._leader is leader


def test_a_leader_that_has_ended_its_turn_keeps_reading(workers: dict[str, Process]) -> None:
    assert rpc.rpc_sync("worker1", hand_over_for_a_turn_that_is_over) == (False, True)


def never_acknowledge() -> None:
    sending.depart = lambda *_: None
    Session.stamp = _stamped_without_acknowledgement
    Session.acknowledge = lambda session: 0


def _stamped_without_acknowledgement(session: Session[Any]) -> tuple[int, int]:
    session._sent += 1
    return session._sent, 0


def keep_few_answers() -> None:
    incoming.MOST_ANSWERS = incoming.FEW_ANSWERS + 36


def call_often(to: str, times: int) -> str:
    for number in range(times):
        try:
            rpc.rpc_sync(to, functions.nothing, timeout=20)
        except rpc.WorkerLost:
            return f"lost at call {number}"
    return "never lost"


def test_a_caller_that_never_acknowledges_is_sent_away(make_job: Callable[..., Job]) -> None:
    job = make_job("a", "b", "c")
    job["b"].do(keep_few_answers)
    job["a"].do(never_acknowledge)
    assert job["a"].do(call_often, "b", 300) == "lost at call 101"
    assert job["c"].do(call_often, "b", 300) == "never lost"


class Callee:
    """What an `Incoming` knows of its worker, and the other end of its link."""

    def __init__(self) -> None:
        self.served: list[int] = []
        self.serve: Callable[[Frame], None] = lambda frame: None
        self.threads = Threads()
        self.watch = Watch(lambda now: 0.0, lambda: math.inf, self.threads.run)
        self.watch.start()
        self.lobby = Lobby(self.watch, self.threads.run, self.about_to_sleep)
        self.local = threading.local()
        self.silence: Any = threading.Condition()
        self.slow_functions = SlowFunctions()
        self.awaited: list[str] = []
        self.lost: list[str] = []
        limits = default_limits(Trust.CODE)
        self.node = SimpleNamespace(
            limits=limits, serve_call=self._serve, serve_post=self._serve, served=0
        )
        here, there = streams()
        self.caller = Link(there)
        member: Any = SimpleNamespace(info=WorkerInfo("caller", 0))
        me: Any = self
        self.incoming = Incoming(me, member, "session", Link(here), Aside(1 << 30))

    def _serve(self, worker: int, frame: Frame) -> None:
        self.serve(frame)
        self.served.append(frame.call_id)

    def about_to_sleep(self) -> None:
        self.watch.turn_off(lambda: self.incoming.runs)

    def incoming_broke(self, incoming: Incoming, reason: str) -> None:
        self.awaited.append(reason)

    def await_return(self, incoming: Incoming, broken: object, reason: str) -> None:
        self.awaited.append(reason)

    def lose(self, worker: int, reason: str) -> None:
        self.lost.append(reason)

    def come_back(self) -> None:
        """The caller goes on over another connection, as visitors.py has it do."""
        self.caller.mark_broken()
        self.incoming.await_silence()
        self._go_on()

    def _go_on(self) -> None:
        self.caller.mark_broken()
        here, there = streams()
        seen = self.incoming.link.session.seen
        self.incoming.link.resume(here, self.caller.session.seen)
        self.caller.resume(there, seen)
        self.incoming.resumed()
        self.caller.flush()

    def has_served(self, count: int) -> bool:
        return inside.when_settled(lambda: len(self.served) == count)

    def close(self) -> None:
        self.incoming.end()
        self.caller.close()
        self.watch.close()
        self.lobby.close()
        self.threads.close()


@pytest.fixture
def callee() -> Any:
    made = Callee()
    yield made
    made.close()


def test_a_link_that_is_mended_while_its_leader_gives_up_is_read(callee: Callee) -> None:
    """Who mends it finds that somebody leads; and who leads has just seen it broken."""
    plain, incoming = callee.silence, callee.incoming

    class Mending:
        """Taken by a leader that gives up: the link is mended at that moment."""

        def __enter__(self) -> None:
            callee.silence = plain
            callee._go_on()
            plain.acquire()

        def __exit__(self, *exc: object) -> None:
            plain.release()

        notify_all = plain.notify_all

    callee.silence = Mending()
    incoming.link.mark_broken()
    incoming.start()
    assert inside.when_settled(lambda: callee.silence is plain)
    callee.caller.send(Kind.POST, 1)
    assert callee.has_served(1)
    assert callee.awaited == []


@pytest.mark.parametrize("kind", [Kind.REPLY, Kind.ERROR])
def test_what_is_no_request_is_not_served(callee: Callee, kind: Kind) -> None:
    """It would be a call that no limit counts."""
    callee.incoming.start()
    callee.caller.send(Kind.CALL, 1)
    callee.caller.send(kind, 2)
    assert inside.when_settled(lambda: callee.lost == ["it sent an answer where requests come"])
    assert callee.served == [1]


def test_who_runs_a_request_while_its_link_is_mended_reads_there_no_more(callee: Callee) -> None:
    """It would take from the read buffer while that is emptied, and tear frames apart."""
    begun, go_on = threading.Event(), threading.Event()

    def serve(frame: Frame) -> None:
        if frame.call_id == 1:
            begun.set()
            assert go_on.wait(30)

    callee.serve = serve
    for number in (1, 2, 3):
        callee.caller.send(Kind.POST, number, later=number < 3)
    callee.incoming.start()
    assert begun.wait(30)
    reading = callee.incoming._leader
    callee.incoming.await_silence()
    assert callee.incoming._leader is not reading
    assert callee.awaited == ["the connection broke"]
    go_on.set()
    # What is in the read buffer is left alone until another connection is there.
    assert callee.has_served(1)
    assert inside.when_settled(lambda: not callee.threads._busy)
    callee._go_on()
    assert callee.has_served(3)
    assert callee.served == [1, 2, 3]
    assert inside.when_settled(lambda: callee.incoming._aside.count == 0)


def lose_after_a_break(name: str) -> bool:
    """Whether the descriptor of a link is free soon after its worker is lost, although its break
    was noticed before, and it was to be seen whether it comes back."""
    gc.disable()
    agent = inside.agent()
    worker = rpc.get_worker_info(name).id
    stream = weakref.ref(agent._incoming[worker].link.stream)

    def cut_short(*args: object) -> None:
        raise CutShort("it may come back")

    agent_module.meet = cut_short  # type: ignore[assignment]
    agent.incoming_broke(agent._incoming[worker], "the connection broke")
    agent.lose(worker, "for a test")
    return inside.when_settled(lambda: stream() is None)


def test_a_link_that_may_come_back_is_not_kept_when_its_worker_is_lost(
    make_job: Callable[..., Job],
) -> None:
    job = make_job("a", "b", liveness=60.0)
    job["b"].do(inside.call, "a", functions.nothing)
    assert job["a"].do(lose_after_a_break, "b")
