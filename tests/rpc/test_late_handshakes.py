"""What a network delivers late, or swallows, while two workers connect: it does not count.

Between the two is a network that holds back the last words of a handshake, as one may that was slow
or is hostile, and delivers them when its caller has long come by another connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import meeting
from telegrad.wire.address import TcpAddress
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import agent, call

MakeJob = Callable[..., Job]
TCP: dict[str, Any] = {"host": "127.0.0.1", "transports": ("tcp",)}
MORE_THAN_AN_OPENING = 100
_network: list[Network] = []


class Network:
    """Passes on what is sent, but for one connection: `holds` of its last words, or `swallows`."""

    def __init__(self, holds: int = 0, swallows: int = 0) -> None:
        self._holds, self._swallows = holds, swallows
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._target = ("", 0)
        self._open: list[socket.socket] = []
        self.held = threading.Event()
        self.delivers = threading.Event()
        self.delivered = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def connect_by(self, connect: Any) -> Any:
        def connect_here(address: TcpAddress, *args: Any, **options: Any) -> socket.socket:
            self._target = (address.host, address.port)
            port = self._listener.getsockname()[1]
            connected: socket.socket = connect(TcpAddress(address.host, port), *args, **options)
            return connected

        return connect_here

    def cut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        number = 0
        while True:
            caller, _ = self._listener.accept()
            number += 1
            self._open.append(caller)
            if number == self._swallows:
                continue
            callee = socket.create_connection(self._target)
            self._open.append(callee)
            up = self._hold if number == self._holds else _pass_on
            for work, ends in ((up, (caller, callee)), (_pass_on, (callee, caller))):
                threading.Thread(target=work, args=ends, daemon=True).start()

    def _hold(self, caller: socket.socket, callee: socket.socket) -> None:
        while len(said := caller.recv(1 << 16)) < MORE_THAN_AN_OPENING:
            callee.sendall(said)
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.shutdown(socket.SHUT_RDWR)
        self.held.set()
        self.delivers.wait(30)
        callee.sendall(said)
        # The callee has dealt with them when it hangs up, or says something.
        callee.settimeout(5)
        with contextlib.suppress(OSError):
            callee.recv(1)
        self.delivered.set()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while said := source.recv(1 << 16):
            target.sendall(said)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def have_network(**options: int) -> None:
    network = Network(**options)
    _network.append(network)
    meeting.connect = network.connect_by(meeting.connect)


def deliver_late() -> bool:
    [network] = _network
    assert network.held.wait(20)
    network.delivers.set()
    return network.delivered.wait(20)


def begin_in_the_meantime(to: str) -> None:
    functions.kept = rpc.rpc_async(to, run_once)


def run_once() -> int:
    times = functions.record("run")
    functions.announce_and_wait("runs", "may end")
    return times


def outcome() -> Any:
    return functions.kept.wait()


def test_a_handshake_that_arrives_late_has_no_call_run_twice(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", **TCP)
    job["a"].do(have_network, holds=1)
    job["a"].do(begin_in_the_meantime, "b")
    job["c"].do(call, "b", functions.wait_event, "runs")
    assert job["a"].do(deliver_late)
    job["c"].do(call, "b", functions.set_event, "may end")
    assert job["a"].do(outcome) == 1
    assert job["a"].do(call, "b", functions.take_recorded) == ["run"]


def break_link(to: str) -> None:
    agent().sever(rpc.get_worker_info(to).id)


def test_an_attempt_to_mend_that_arrives_late_leaves_what_was_mended(make_job: MakeJob) -> None:
    job = make_job("a", "b", **TCP, liveness=20.0)
    job["a"].do(have_network, holds=2)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    job["a"].do(break_link, "b")
    for _ in range(5):
        assert job["a"].do(call, "b", functions.who_am_i) == "b"
    assert job["a"].do(deliver_late)
    for _ in range(5):
        assert job["a"].do(call, "b", functions.who_am_i) == "b"
    for name in "ab":
        assert job[name].do(rpc.debug_info)["lost workers"] == {}


def cut_network() -> None:
    _network[0].cut()


def test_an_attempt_to_mend_that_meets_silence_leaves_time_for_another(make_job: MakeJob) -> None:
    job = make_job("a", "b", **TCP, liveness=3.0)
    job["a"].do(have_network, swallows=2)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    job["a"].do(cut_network)
    assert job["a"].do(call, "b", functions.who_am_i, timeout=0) == "b"
    for name in "ab":
        assert job[name].do(rpc.debug_info)["lost workers"] == {}


def compute_in_c(seconds: int) -> None:
    functions.set_event("computes")
    ctypes.PyDLL(None).sleep(seconds)


def begin_to_compute(to: str, seconds: int) -> None:
    functions.kept = rpc.rpc_async(to, compute_in_c, args=(seconds,), timeout=0)


def same_connection(worker: str) -> bool:
    """Whether calls to that worker go by the connection that was there at the first look."""
    stream = agent()._outgoing[rpc.get_worker_info(worker).id].link.stream  # type: ignore[union-attr]
    return functions.shelf.setdefault("connection", stream) is stream


def add_up_there(to: str, size: int) -> float:
    return float(call(to, torch.sum, torch.ones(size), timeout=0))


def test_a_worker_that_computes_in_c_while_much_is_sent_to_it_is_not_lost(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", **TCP, liveness=1.0)
    job["a"].do(begin_to_compute, "b", 6)
    assert job["a"].do(same_connection, "b")
    size = 25 << 20
    assert job["a"].begin(add_up_there, "b", size).result(60) == size
    assert job["a"].do(same_connection, "b"), "it broke, and was mended"
    for name in "ab":
        assert job[name].do(rpc.debug_info)["lost workers"] == {}


@pytest.mark.slow
def test_a_worker_that_computes_in_c_for_minutes_can_be_met(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", liveness=1.0)
    job["c"].do(begin_to_compute, "b", 75)
    assert job["a"].begin(add_up_there, "b", 3).result(120) == 3
    for name in "abc":
        assert job[name].do(rpc.debug_info)["lost workers"] == {}
