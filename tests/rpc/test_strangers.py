"""Who has not proved the key gets nothing, and nobody is disturbed by him."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import meeting, reception
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.wire.address import TcpAddress, UnixAddress, parse_address
from telegrad.wire.frames import HEADER, Kind
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.inside import call
from tests.rpc.strangers import processor_time_of

MakeJob = Callable[..., Job]
UNIX: dict[str, Any] = {}
TCP: dict[str, Any] = {"host": "127.0.0.1", "transports": ("tcp",)}
TRANSPORTS = [pytest.param(UNIX, id="unix"), pytest.param(TCP, id="tcp")]
SEED = 20261116


def addresses() -> list[str]:
    agent = current_node().transport
    assert isinstance(agent, Agent)
    return [str(address) for address in agent._meeting.addresses]


def visit(address: str) -> socket.socket:
    where = parse_address(address)
    if isinstance(where, UnixAddress):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where.path)
    else:
        assert isinstance(where, TcpAddress)
        sock = socket.create_connection((where.host, where.port))
    sock.settimeout(20)
    return sock


def answer_to(address: str, data: bytes) -> bytes:
    """Everything that a worker says to a stranger before it hangs up."""
    with visit(address) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            said = b""
            while chunk := sock.recv(4096):
                said += chunk
            return said
        except OSError:
            return b""


@pytest.mark.parametrize("options", TRANSPORTS)
def test_garbage_is_answered_by_nothing_that_a_stranger_can_use(
    make_job: MakeJob, options: dict[str, Any]
) -> None:
    print(f"seed {SEED}")
    job = make_job("a", "b", **options)
    [address] = job["b"].do(addresses)
    numbers = random.Random(SEED)
    frame = HEADER.pack(Kind.CALL, 0, 0, 0, 0, 4, 4, 1, 0, 1) + b"evil"
    huge = HEADER.pack(Kind.CALL, 0, 0, 1 << 31, 0, 1 << 31, 1 << 60, 1, 0, 1)
    samples = [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10_000, b"\xff" * 10_000, frame, huge]
    samples += [numbers.randbytes(numbers.randrange(1, 5000)) for _ in range(30)]
    for sample in samples:
        assert len(answer_to(address, sample)) <= 256
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    assert job["b"].do(rpc.debug_info)["lost workers"] == {}
    assert "Traceback" not in job["b"].errors


@pytest.mark.parametrize("options", TRANSPORTS)
def test_many_silent_strangers_hold_up_no_call(make_job: MakeJob, options: dict[str, Any]) -> None:
    job = make_job("a", "b", "c", **options)
    job["b"].do(lose_patience_after, 1000.0)
    [address] = job["b"].do(addresses)
    strangers = [visit(address) for _ in range(100)]
    try:
        started = time.monotonic()
        for n in range(200):
            assert job["a"].do(call, "b", functions.echo, n) == n
        x = torch.ones(500_000)
        assert torch.equal(job["c"].do(call, "b", functions.echo, x), x)
        assert time.monotonic() - started < 60
    finally:
        for stranger in strangers:
            stranger.close()


def test_more_strangers_than_there_is_room_for_do_not_make_a_worker_unreachable(
    make_job: MakeJob,
) -> None:
    """Who has stood at the door for longest has to go, long before his time is up."""
    job = make_job("a", "b", host="127.0.0.1", transports=("tcp",))
    job["b"].do(lose_patience_after, 1000.0)
    [address] = job["b"].do(addresses)
    strangers = [visit(address) for _ in range(400)]
    try:
        assert job["a"].do(call, "b", functions.who_am_i) == "b"
    finally:
        for stranger in strangers:
            stranger.close()


def lose_patience_after(seconds: float) -> None:
    meeting.PATIENCE = seconds


def test_a_stranger_that_drips_is_dropped(make_job: MakeJob) -> None:
    job = make_job("a", "b", host="127.0.0.1", transports=("tcp",))
    job["b"].do(lose_patience_after, 1.0)
    [address] = job["b"].do(addresses)
    with visit(address) as stranger:
        stranger.settimeout(0.1)
        started = time.monotonic()
        # The first bytes of an opening, one at a time, each well within any limit for one read.
        for byte in b"telegrad" * 20:
            try:
                stranger.sendall(bytes([byte]))
                if stranger.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - started < 12
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


def exhaust_descriptors() -> None:
    """Leave this process no descriptor for another connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, most))


def allow_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_without_a_descriptor_left_a_worker_neither_spins_nor_dies(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c", **TCP)
    [address] = job["b"].do(addresses)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    job["b"].do(exhaust_descriptors)
    strangers = [visit(address) for _ in range(30)]
    try:
        assert job["b"].do(processor_time_of, 1.0) < 0.5
        assert job["a"].do(call, "b", functions.who_am_i) == "b"
        late = job["c"].begin(call, "b", functions.who_am_i)
        job["b"].do(allow_descriptors)
        assert late.result(30) == "b"
    finally:
        for stranger in strangers:
            stranger.close()
    assert "Traceback" not in job["b"].errors


def test_a_flood_of_visitors_is_let_in_at_a_bounded_rate(make_job: MakeJob) -> None:
    job = make_job("a", "b", **TCP)
    [address] = job["b"].do(addresses)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    job["b"].do(count_greetings)
    for _ in range(reception.BURST + 500):
        visit(address).close()
    let_in, seconds = job["b"].do(greetings_counted)
    assert let_in <= reception.BURST + reception.PER_SECOND * seconds + 1
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


greeted: list[float] = []


def count_greetings() -> None:
    agent = current_node().transport
    assert isinstance(agent, Agent)
    greet = agent.visitors.reception._greet

    def counted(connection: socket.socket, listener: socket.socket) -> None:
        greeted.append(time.monotonic())
        greet(connection, listener)

    agent.visitors.reception._greet = counted
    greeted.append(time.monotonic())


def greetings_counted() -> tuple[int, float]:
    return len(greeted) - 1, time.monotonic() - greeted[0]


def test_the_socket_of_a_worker_is_in_a_directory_that_only_its_owner_can_enter(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b")
    [address] = job["a"].do(addresses)
    where = parse_address(address)
    assert isinstance(where, UnixAddress)
    assert os.stat(os.path.dirname(where.path)).st_mode & 0o777 == 0o700


def poison(to: int, data: bytes) -> None:
    """As a member that has proved the key, but whose memory is broken: write bytes to a link."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    outgoing = agent._outgoing[to]
    outgoing.link.stream.try_send([data])  # type: ignore[union-attr]


BAD_FRAMES = {
    "unknown kind": HEADER.pack(99, 0, 0, 0, 0, 0, 0, 1, 0, 1),
    "oversized": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 1 << 62, 2, 0, 1),
    "parts longer than the frame": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 100, 50, 2, 0, 1) + b"x" * 50,
    "a gap in the numbers": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 0, 999, 0, 1),
    "an acknowledgement of what never was": HEADER.pack(Kind.CALL, 0, 0, 0, 0, 0, 0, 2, 999, 1),
    "noise": bytes(range(256)) * 40,
}


@pytest.mark.parametrize(
    ("name", "options"), [(name, (UNIX, TCP)[n % 2]) for n, name in enumerate(BAD_FRAMES)]
)
def test_a_member_that_sends_what_cannot_be_read_is_cut_off_and_nobody_else(
    make_job: MakeJob, options: dict[str, Any], name: str
) -> None:
    job = make_job("a", "b", "c", **options)
    job["a"].do(call, "b", functions.nothing)
    job["c"].do(call, "b", functions.nothing)
    job["a"].do(poison, 1, BAD_FRAMES[name])
    until = time.monotonic() + 10
    while not (lost := job["b"].do(rpc.debug_info)["lost workers"]):
        assert time.monotonic() < until
    assert "it sent what cannot be read" in lost["a"]
    assert job["c"].do(call, "b", functions.who_am_i) == "b"
    with pytest.raises(rpc.WorkerLost, match="'b' is gone"):
        job["a"].do(call, "b", functions.nothing)


def poison_meta(to: str) -> str:
    """A whole frame whose contents are no message."""
    agent = current_node().transport
    assert isinstance(agent, Agent)
    node = current_node()
    pending = node.calls.begin(node.members.find(to), functions.nothing, 10, node.runtime.now())
    link = agent._outgoing[node.members.find(to).id].link  # type: ignore[union-attr]
    link.send(Kind.CALL, pending.call_id, b"\x7f garbage \xff" * 3)
    try:
        node.wait(pending)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "answered"


def test_a_message_that_cannot_be_decoded_fails_its_call_alone(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(call, "b", functions.nothing)
    assert "CodecError" in job["a"].do(poison_meta, "b")
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
