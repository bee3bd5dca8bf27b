"""Links that nobody reads wait together: none is forgotten, and none is read by two."""

from __future__ import annotations

import errno
import gc
import math
import os
import select
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telegrad import rpc
from telegrad.rpc import lobby as lobby_module
from telegrad.rpc.incoming import Aside, Incoming
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.link import Link
from telegrad.wire.lookout import Lookout
from tests.rpc import functions, inside
from tests.rpc.fleet import Job, Process, client_of, results, serve_store
from tests.rpc.inside import call, when_settled
from tests.rpc.test_incoming import Callee
from tests.wire.test_link import streams

MakeJob = Callable[..., Job]


class Hub(Callee):
    """A worker that several others call."""

    def __init__(self) -> None:
        super().__init__()
        self.callers = [self.caller]
        self.links = [self.incoming]
        self.begun: list[tuple[int, int]] = []

    def _serve(self, worker: int, frame: Frame) -> None:
        self.begun.append((worker, frame.call_id))
        super()._serve(worker, frame)

    def welcome(self, count: int) -> None:
        """So many more come."""
        for _ in range(count):
            here, there = streams()
            member: Any = type(self.incoming.member)(info=WorkerInfo("caller", len(self.links)))
            me: Any = self
            incoming = Incoming(me, member, "session", Link(here), Aside(1 << 30))
            self.callers.append(Link(there))
            self.links.append(incoming)
            incoming.start()

    def await_rest(self) -> None:
        """Until nobody leads and nobody hosts."""
        assert when_settled(lambda: not self.threads._busy and not self.lobby._hosted)

    def close(self) -> None:
        for incoming, caller in zip(self.links, self.callers, strict=True):
            incoming.end()
            caller.close()
        if not self.lobby._closed:
            super().close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


def test_whoever_sends_is_read_whether_somebody_hosts_or_only_the_watch_looks(hub: Hub) -> None:
    hub.incoming.start()
    hub.welcome(4)
    for number in range(1, 4):
        for caller in hub.callers:
            caller.send(Kind.POST, number)
        assert hub.has_served(5 * number)
        hub.await_rest()
    assert all(incoming._leader is None for incoming in hub.links)


def test_requests_of_different_links_run_at_the_same_time(hub: Hub) -> None:
    together = threading.Barrier(6)
    hub.serve = lambda frame: together.wait(30) and None  # type: ignore[func-returns-value]
    hub.incoming.start()
    hub.welcome(5)
    for number in (1, 2):
        for caller in hub.callers:
            caller.send(Kind.POST, number)
        assert hub.has_served(6 * number)
    assert not together.broken


def test_requests_of_each_link_are_served_in_order(hub: Hub) -> None:
    hub.incoming.start()
    hub.welcome(3)
    for number in range(1, 101):
        for caller in hub.callers:
            caller.send(Kind.POST, number, later=number % 3 == 0)
    for caller in hub.callers:
        caller.flush()
    assert hub.has_served(400)
    for worker in range(4):
        assert [number for who, number in hub.begun if who == worker] == list(range(1, 101))


def test_one_thread_serves_those_who_take_turns(hub: Hub) -> None:
    hub.incoming.start()
    hub.welcome(3)
    served_by: Counter[int] = Counter()
    hub.serve = lambda frame: served_by.update([threading.get_ident()])
    for number in range(1, 51):
        for caller in hub.callers:
            # Nobody hosts if the test was kept from its core for as long as a host waits.
            assert when_settled(lambda: hub.lobby._hosted or not hub.threads._busy)
            expected = len(hub.served) + 1
            caller.send(Kind.POST, number)
            assert hub.has_served(expected)
    assert served_by.most_common(1)[0][1] > 100


def test_bytes_that_a_host_does_not_see_before_it_leaves_are_noticed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.incoming.start()
    hub.welcome(1)
    hub.await_rest()
    sent = threading.Event()

    def leave_too_soon() -> list[tuple[int, int]]:
        monkeypatch.undo()
        hub.callers[0].send(Kind.POST, 1)
        hub.callers[1].send(Kind.POST, 1)
        sent.set()
        return []

    monkeypatch.setattr(Lookout, "_resting_until", math.inf)
    monkeypatch.setattr(hub.lobby, "_sleep", leave_too_soon)
    hub.threads.run(hub.lobby.host)
    assert sent.wait(30)
    assert hub.has_served(2)


def test_a_link_is_admitted_just_when_the_host_leaves_and_is_noticed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are there, and who admits it finds that somebody hosts."""
    incoming, caller = hub.incoming, hub.caller
    fileno = incoming.link.stream.fileno()

    def admitted_at_the_last_moment() -> list[tuple[int, int]]:
        monkeypatch.undo()
        caller.send(Kind.POST, 1)
        hub.lobby.admit(incoming, fileno)
        return []

    monkeypatch.setattr(Lookout, "_resting_until", math.inf)
    monkeypatch.setattr(hub.lobby, "_sleep", admitted_at_the_last_moment)
    hub.threads.run(hub.lobby.host)
    assert hub.has_served(1)


def test_a_handler_that_waits_leaves_its_link_to_the_lobby(hub: Hub) -> None:
    second = threading.Event()

    def serve(frame: Frame) -> None:
        if frame.call_id == 1:
            hub.incoming.about_to_block(hub.local.token)
            assert second.wait(30)
        else:
            second.set()

    hub.serve = serve
    hub.incoming.start()
    hub.caller.send(Kind.POST, 1)
    assert when_settled(lambda: len(hub.begun) == 1)
    hub.caller.send(Kind.POST, 2)
    assert hub.has_served(2)
    assert sorted(hub.served) == [1, 2]  # The first waits for the second, and may end first.
    assert when_settled(lambda: hub.incoming._aside.count == 0)


def test_who_is_given_a_link_too_late_does_not_read_while_it_is_mended(hub: Hub) -> None:
    """It would serve what is in the buffer while that is emptied."""
    begun, go_on = threading.Event(), threading.Event()

    def serve(frame: Frame) -> None:
        if frame.call_id == 1:
            begun.set()
            assert go_on.wait(30)

    hub.serve = serve
    for number in (1, 2, 3):
        hub.caller.send(Kind.POST, number, later=number < 3)
    hub.incoming.start()
    assert begun.wait(30)
    hub.incoming.await_silence()
    hub.incoming.lead()
    assert hub.served == []
    go_on.set()
    hub._go_on()
    assert hub.has_served(3)
    assert sorted(hub.served) == [1, 2, 3]  # Each once. The first may end last.


def test_who_is_given_a_link_too_late_does_not_admit_it_by_a_number_that_is_not_its_own(
    hub: Hub,
) -> None:
    """Between the mending of a link and the word that it is mended, another link may have got the
    number of the stream that broke, and would never be read."""
    hub.incoming.start()
    hub.caller.send(Kind.POST, 1)
    assert hub.has_served(1)
    hub.await_rest()
    hub.caller.mark_broken()
    hub.incoming.await_silence()
    here, there = streams()
    seen = hub.incoming.link.session.seen
    hub.incoming.link.resume(here, hub.caller.session.seen)
    hub.caller.resume(there, seen)
    hub.incoming.lead()
    assert hub.incoming not in hub.lobby._links.values()
    hub.incoming.resumed()
    hub.caller.send(Kind.POST, 2)
    assert hub.has_served(2)


def test_a_link_that_ends_does_not_take_another_along_that_got_its_number(hub: Hub) -> None:
    hub.welcome(1)
    hub.await_rest()
    of_second = hub.links[1]._descriptor
    hub.lobby.forget(hub.incoming, of_second)
    hub.callers[1].send(Kind.POST, 1)
    assert hub.has_served(1)


class Snatched(dict[int, Incoming]):
    """Another thread takes out what one has just found."""

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        self.clear()
        return found


def test_a_link_that_ends_while_it_is_mended_is_forgotten_once(hub: Hub) -> None:
    hub.welcome(1)
    hub.await_rest()
    hub.lobby._links = Snatched(hub.lobby._links)
    hub.links[1].end()
    assert hub.links[1].link.closed


def test_a_number_that_another_link_had_is_the_new_ones(hub: Hub) -> None:
    """If nobody said that the other is over."""
    hub.incoming.start()
    hub.welcome(1)
    hub.await_rest()
    old = hub.links[1]
    number = old._descriptor
    here, there = socket.socketpair()
    os.dup2(here.fileno(), number)
    here.close()
    hub.lobby.admit(hub.incoming, number)
    assert hub.lobby._links[number] is hub.incoming
    hub.lobby.forget(hub.incoming, number)
    there.close()


class Full:
    """An epoll that takes in nothing more, as the system has it that limits them."""

    def __init__(self, epoll: select.epoll) -> None:
        self.epoll = epoll
        self.refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.epoll, name)

    def modify(self, descriptor: int, events: int) -> None:
        self.refused += 1
        raise OSError(errno.ENOMEM, "there is no memory")

    def register(self, descriptor: int, events: int) -> None:
        self.refused += 1
        raise OSError(errno.ENOSPC, "there is no space")


def test_a_link_for_which_the_lobby_has_no_room_is_read_all_the_same(hub: Hub) -> None:
    epoll = hub.lobby._epoll
    full: Any = Full(epoll)
    hub.lobby._epoll = full
    waits = threading.Event()

    def serve(frame: Frame) -> None:
        if frame.call_id == 2:
            hub.links[frame.meta[0]].about_to_block(hub.local.token)
            assert waits.wait(30)

    hub.serve = serve
    hub.incoming.start()
    hub.welcome(1)
    for number in (1, 2, 3):
        for index, caller in enumerate(hub.callers):
            caller.send(Kind.POST, number, bytes([index]))
    assert when_settled(lambda: len(hub.begun) == 6)
    assert full.refused
    waits.set()
    assert hub.has_served(6)
    # They wait there as soon as they can.
    hub.lobby._epoll = epoll
    hub.await_rest()
    assert sorted(hub.lobby._links) == sorted(link._descriptor for link in hub.links)
    for caller in hub.callers:
        caller.send(Kind.POST, 4)
    assert hub.has_served(8)


def test_a_request_that_ends_in_disorder_does_not_end_the_reading(
    hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    def serve(frame: Frame) -> None:
        if frame.call_id == 2:
            raise SystemExit("for a test")

    hub.serve = serve
    hub.incoming.start()
    hub.welcome(1)
    for number in (1, 2, 3):
        for caller in hub.callers:
            caller.send(Kind.POST, number)
    assert hub.has_served(4)
    assert "a request of worker 'caller'" in capfd.readouterr().err


def test_a_link_that_is_closed_in_one_direction_is_given_up_once(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.welcome(1)
    hub.await_rest()
    led = []
    lead = Incoming.lead

    def count(incoming: Incoming) -> None:
        led.append(incoming)
        lead(incoming)

    monkeypatch.setattr(Incoming, "lead", count)
    hub.callers[1].stream._socket.shutdown(socket.SHUT_WR)  # type: ignore[attr-defined]
    assert when_settled(lambda: bool(hub.awaited))
    hub.incoming.start()
    for number in (1, 2, 3):
        hub.caller.send(Kind.POST, number)
        assert hub.has_served(number)
        hub.await_rest()
    assert led.count(hub.links[1]) == 1


def test_links_that_are_over_are_not_kept(hub: Hub) -> None:
    hub.welcome(3)
    for caller in hub.callers[1:]:
        caller.send(Kind.POST, 1)
    assert hub.has_served(3)
    hub.await_rest()
    gone = []
    while len(hub.links) > 1:
        link = hub.links.pop()
        gone += [weakref.ref(link), weakref.ref(link.link.stream)]
        link.end()
        hub.callers.pop().close()
        del link
    gc.collect()
    assert when_settled(lambda: [each() for each in gone] == [None] * 6)
    assert hub.lobby._links == {}


def test_a_host_that_sleeps_leaves_when_the_lobby_closes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby_module, "IDLE_TIMEOUT", 3600.0)
    hub.incoming.start()
    hub.welcome(1)
    assert when_settled(lambda: hub.lobby._hosted)
    hub.watch.close()
    hub.lobby.close()
    assert when_settled(lambda: not hub.threads._busy)
    hub.lobby.host()
    assert not hub.lobby._hosted


def test_a_lobby_closes_without_room_for_another_descriptor(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    hub.incoming.start()
    assert when_settled(lambda: hub.lobby._hosted)
    monkeypatch.setattr(os, "eventfd", no_room)
    hub.watch.close()
    hub.lobby.close()
    assert when_settled(lambda: not hub.threads._busy)
    assert hub.lobby._epoll.closed


# Jobs.


def meet_there(number: int, of: int) -> int:
    """Wait until so many have come, in a way that nobody is told of."""
    functions.set_event(f"here {number}")
    for other in range(of):
        functions.wait_event(f"here {other}")
    return number


def test_many_workers_call_one_and_are_served_at_the_same_time(make_job: MakeJob) -> None:
    names = [f"caller{number}" for number in range(16)]
    job = make_job("hub", *names)
    assert results([job[name].begin(call, "hub", functions.who_am_i) for name in names]) == [
        "hub"
    ] * len(names)
    meeting = [
        job[name].begin(call, "hub", meet_there, number, len(names))
        for number, name in enumerate(names)
    ]
    assert results(meeting) == list(range(len(names)))
    assert len(job["hub"].do(lobby_links)) == len(names)


def lobby_links() -> list[str]:
    """Who waits here, once all do."""
    lobby, agent = inside.agent().lobby, inside.agent()
    assert when_settled(lambda: all(link._leader is None for link in agent._incoming.values()))
    return sorted(link.member.info.name for link in lobby._links.values())


@pytest.mark.parametrize("path", [["a", "b"], ["a", "b", "c"]])
def test_deep_recursion_between_workers_that_all_wait_in_their_lobbies(
    make_job: MakeJob, path: list[str]
) -> None:
    job = make_job("a", "b", "c")
    assert job["a"].do(functions.bounce, 150, path) == 150


def take_turns(to: str, times: int) -> None:
    for number in range(times):
        assert rpc.rpc_sync(to, functions.echo, args=(number,)) == number


def threads_now() -> int:
    return threading.active_count()


def cpu_seconds_of_idleness(seconds: float) -> float:
    started = time.process_time()
    time.sleep(seconds)
    return time.process_time() - started


def test_threads_do_not_grow_with_calls_and_an_idle_worker_does_not_work(make_job: MakeJob) -> None:
    job = make_job("hub", "a", "b", "c")
    results([job[name].begin(take_turns, "hub", 20) for name in "abc"])
    before = job["hub"].do(threads_now)
    results([job[name].begin(take_turns, "hub", 200) for name in "abc"])
    # On a machine that is busy a call takes long, and another thread reads on meanwhile.
    assert job["hub"].do(threads_now) <= before + 12
    assert job["hub"].do(lobby_links) == ["a", "b", "c"]
    assert job["hub"].do(cpu_seconds_of_idleness, 1.0) < 0.2


def sever_all() -> None:
    for worker in list(inside.agent()._incoming):
        inside.agent().sever(worker)


def test_links_that_break_in_the_lobby_are_mended_and_wait_there_again(make_job: MakeJob) -> None:
    job = make_job("hub", "a", "b", "c", liveness=20.0)
    results([job[name].begin(take_turns, "hub", 3) for name in "abc"])
    before = job["hub"].do(inside.descriptors)
    for _ in range(10):
        job["hub"].do(sever_all)
        results([job[name].begin(take_turns, "hub", 3) for name in "abc"])
    assert job["hub"].do(lobby_links) == ["a", "b", "c"]
    assert job["hub"].do(descriptors_settle, before + 1)
    assert job["hub"].do(rpc.debug_info)["lost workers"] == {}


def descriptors_settle(most: int) -> bool:
    return when_settled(lambda: inside.descriptors() <= most)


def fork_and_exit() -> int:
    """A child that has all descriptors of this process, for as long as that one lives."""
    child = os.fork()
    if not child:
        time.sleep(3600)
        os._exit(0)
    functions.kept = child
    return child


def end_child() -> None:
    os.kill(functions.kept, 9)
    os.waitpid(functions.kept, 0)


def test_links_are_read_while_a_forked_child_has_their_descriptors_too(make_job: MakeJob) -> None:
    """The kernel does not forget a descriptor that is closed here while the child has it open."""
    job = make_job("hub", "a", "b", "c", liveness=20.0)
    results([job[name].begin(take_turns, "hub", 3) for name in "abc"])
    job["hub"].do(fork_and_exit)
    for _ in range(3):
        job["hub"].do(sever_all)
        results([job[name].begin(take_turns, "hub", 10) for name in "abc"])
    job["c"].kill()
    results([job[name].begin(take_turns, "hub", 10) for name in "ab"])
    assert job["hub"].do(only_these_are_left, ["a", "b"])
    assert job["hub"].do(cpu_seconds_of_idleness, 1.0) < 0.2
    job["hub"].do(end_child)


def only_these_are_left(names: list[str]) -> bool:
    return when_settled(lambda: lobby_links() == names)


def shut_down_and_look() -> tuple[list[str], bool]:
    """What a worker leaves behind that has left: files that wait for others, and itself."""
    agent = weakref.ref(inside.agent())
    rpc.shutdown()
    waits = [file for file in inside.open_files() if "event" in file]
    return waits, when_settled(lambda: bool(gc.collect()) or agent() is None)


def test_a_worker_that_has_left_leaves_nothing_of_its_lobby(make_job: MakeJob) -> None:
    job = make_job("hub", "a", "b")
    results([job[name].begin(take_turns, "hub", 20) for name in "ab"])
    results([job[name].begin(call, "a", functions.nothing) for name in ("hub", "b")])
    leaving = {name: job[name].begin(shut_down_and_look) for name in ("hub", "a", "b")}
    for each in leaving.values():
        assert each.result(30) == ([], True)


def join_without_room() -> list[str]:
    """What is left open by a worker for whose lobby there was no descriptor."""

    store = serve_store()
    client = client_of(store.port)
    before = inside.open_files()
    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "epoll", no_room_after_the_first())
        with pytest.raises(rpc.NoRoom, match="cannot join a job"):
            rpc.init_rpc("worker", store=client)
    after = inside.open_files()
    for file in before:
        after.remove(file)
    rpc.init_rpc("worker", store=client)
    rpc.shutdown()
    return after


def no_room_after_the_first() -> Callable[[], select.epoll]:
    """The watch has one, and the lobby finds none."""
    real, made = select.epoll, []

    def epoll() -> select.epoll:
        if made:
            raise OSError(errno.EMFILE, "too many open files")
        made.append(True)
        return real()

    return epoll


def test_a_worker_that_has_no_room_for_a_lobby_leaves_nothing_open(
    start: Callable[[], Process],
) -> None:
    assert start().do(join_without_room) == []
