"""Who may speak to a worker: each promise of docs/security.md, over real sockets."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc import meeting, rendezvous
from telegrad.rpc.current import current_node
from telegrad.wire.address import TcpAddress, is_loopback, parse_address
from telegrad.wire.handshake import MAGIC, VERSION
from telegrad.wire.keys import new_key, tls_contexts
from telegrad.wire.tls import TlsError, TlsStream
from tests.rpc import functions
from tests.rpc.fleet import Job, Process, client_of, join, serve_store
from tests.rpc.inside import agent, call

MakeJob = Callable[..., Job]
Start = Callable[[], Process]
TCP: dict[str, Any] = {"host": "127.0.0.1", "transports": ("tcp",)}
PATIENCE = 20


def addresses() -> list[str]:
    return [str(address) for address in agent()._meeting.addresses]


def port_of(process: Process) -> int:
    [text] = process.do(addresses)
    address = parse_address(text)
    assert isinstance(address, TcpAddress)
    return address.port


def visit(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(PATIENCE)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    """Everything until the other end hangs up."""
    said = b""
    try:
        while chunk := sock.recv(4096):
            said += chunk
    except ConnectionError:
        pass
    return said


def read(sock: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        chunk = sock.recv(count - len(said))
        assert chunk, "the other end hung up"
        said += chunk
    return said


# The key.


def set_environment(**variables: str) -> None:
    os.environ.update(variables)


def test_a_key_comes_by_file_or_environment_and_both_are_the_same_key(
    start: Start, tmp_path: Path
) -> None:
    secret = secrets.token_hex(32)
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(secret + "\n")
    store = serve_store()
    a, b = start(), start()
    a.do(set_environment, TELEGRAD_KEY_FILE=str(path))
    b.do(set_environment, TELEGRAD_KEY=secret)
    joining = [p.begin(join, n, r, 2, store.port) for r, (n, p) in enumerate([("a", a), ("b", b)])]
    for each in joining:
        each.result(40)
    assert a.do(call, "b", functions.who_am_i) == "b"
    for process in (a, b):
        process.do(rpc.debug_info)
        assert secret not in process.do(command_line)
        process.kill()
        assert secret not in process.errors


def command_line() -> str:
    return Path("/proc/self/cmdline").read_text()


def own_key() -> str:
    return agent()._meeting.key.hex()


def test_a_job_that_was_given_no_key_makes_one_that_others_cannot_read(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    secret = job["a"].do(own_key)
    assert secret == job["b"].do(own_key)
    assert len(secret) == 64
    directory = Path(job["a"].do(own_directory))
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "key").stat().st_mode & 0o777 == 0o600
    assert make_job("a", "b")["a"].do(own_key) != secret
    for name in ("a", "b"):
        assert secret not in str(job[name].do(rpc.debug_info))
        assert secret not in job[name].do(command_line)


def own_directory() -> str:
    return str(agent()._meeting.directory)


def store_contents(port: int) -> str:
    """What a stranger can read: the entries that every job has."""
    store = client_of(port)
    texts = [store.get(f"telegrad/1/{key}").decode() for key in ("job", "members", "worker 0")]
    return "\n".join(texts)


def test_the_store_holds_no_key(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    assert job["a"].do(own_key) not in store_contents(job.store.port)


# Files and memory.


def file_modes() -> tuple[int, int, int]:
    """Of the socket, its directory, and shared memory."""
    [text] = addresses()
    path = text.removeprefix("unix://")
    outgoing: Any = agent()._outgoing[1]
    shared = os.fstat(outgoing.link._arena.fd).st_mode
    return os.stat(path).st_mode & 0o777, os.stat(os.path.dirname(path)).st_mode & 0o777, shared


def test_sockets_and_shared_memory_are_their_owners_alone(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(call, "b", functions.nothing)
    sock, directory, shared = job["a"].do(file_modes)
    assert (sock, directory, shared & 0o777) == (0o600, 0o700, 0o600)


def shares_memory() -> bool:
    outgoing: Any = agent()._outgoing[1]
    return outgoing.link._arena is not None or outgoing.link._view is not None


def test_who_takes_data_only_shares_no_memory(make_job: MakeJob) -> None:
    """Its peer could change indices after they were checked."""
    job = make_job("a", "b", trust="data")
    with pytest.raises(Exception, match="not exported"):
        job["a"].do(call, "b", functions.nothing)
    job["a"].do(reach, 1)
    assert not job["a"].do(shares_memory)


def reach(worker: int) -> None:
    agent()._reach(worker)


# TLS.


def count_as_another_host() -> None:
    """For this process, loopback is as far away as any other network."""
    rendezvous.is_loopback = meeting.is_loopback = lambda host: False


@pytest.fixture
def between_hosts(start: Start) -> Callable[..., dict[str, Process]]:
    def make(*options: dict[str, Any]) -> dict[str, Process]:
        store = serve_store()
        key = secrets.token_bytes(32)
        processes = {"a": start(), "b": start()}
        joining = []
        for rank, (name, process) in enumerate(processes.items()):
            process.do(count_as_another_host)
            joining.append(
                process.begin(join, name, rank, 2, store.port, key=key, **TCP, **options[rank])
            )
        for each in joining:
            each.result(40)
        stores.append(store)
        return processes

    stores: list[Any] = []
    return make


def test_the_address_of_a_worker_may_come_from_its_environment(start: Start) -> None:
    store = serve_store()
    a = start()
    a.do(set_environment, TELEGRAD_HOST="127.0.0.1")
    a.do(join, "a", 0, 1, store.port)
    assert [text.partition(":")[0] for text in a.do(addresses)] == ["unix", "tcp"]


def stream_kind() -> str:
    outgoing: Any = agent()._outgoing[1]
    stream = outgoing.link.stream
    version = stream._tls.version() if isinstance(stream, TlsStream) else ""
    return f"{type(stream).__name__} {version}".strip()


def test_between_hosts_tls_1_3_is_the_default(between_hosts: Any) -> None:
    job = between_hosts({}, {})
    [address] = job["b"].do(addresses)
    assert address.startswith("tls://")
    x = torch.arange(100_000.0)
    assert torch.equal(job["a"].do(call, "b", functions.echo, x), x)
    assert job["a"].do(stream_kind) == "TlsStream TLSv1.3"


def test_plaintext_beyond_loopback_must_be_asked_for_by_name(between_hosts: Any) -> None:
    job = between_hosts({"plaintext": True}, {"plaintext": True})
    [address] = job["b"].do(addresses)
    assert address.startswith("tcp://")
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    assert job["a"].do(stream_kind) == "PlainStream"


def test_plaintext_must_be_asked_for_by_both(between_hosts: Any) -> None:
    job = between_hosts({}, {"plaintext": True})
    with pytest.raises(rpc.WorkerLost, match="give plaintext=True to both, or to neither"):
        job["a"].do(call, "b", functions.who_am_i)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("127.example.org", False),
        ("localhost.example.org", False),
        ("::1234", False),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.7", False),
        ("worker", False),
    ],
)
def test_what_only_looks_like_loopback_is_not(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_stranger_with_a_certificate_of_his_own_is_refused(between_hosts: Any) -> None:
    job = between_hosts({}, {})
    _, stranger = tls_contexts(new_key())
    with pytest.raises(TlsError, match="did not accept each other"):
        TlsStream(visit(port_of(job["b"])), stranger, server_side=False, timeout=PATIENCE)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


def test_a_worker_behind_tls_says_nothing_in_the_clear(between_hosts: Any) -> None:
    job = between_hosts({}, {})
    with visit(port_of(job["b"])) as sock:
        sock.sendall(MAGIC + VERSION.to_bytes(2, "little") + bytes(32))
        assert MAGIC not in rest_of(sock)


# The handshake.


class Relay:
    """A stranger between two workers: passes everything on, and remembers it."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.said: list[bytes] = []
        self.heard = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        server = visit(self._target)
        threading.Thread(target=self._carry, args=(server, client, []), daemon=True).start()
        self._carry(client, server, self.said)

    def _carry(self, source: socket.socket, target: socket.socket, said: list[bytes]) -> None:
        while chunk := source.recv(1 << 16):
            said.append(chunk)
            target.sendall(chunk)


def go_through(port: int) -> None:
    """Take another way to worker 1."""
    members = current_node().members
    members.add(replace(members.member(1), addresses=(f"tcp://127.0.0.1:{port}",)))


def incoming_links() -> int:
    return len(agent()._incoming)


def test_a_recorded_conversation_cannot_be_replayed(make_job: MakeJob) -> None:
    job = make_job("a", "b", **TCP)
    port = port_of(job["b"])
    relay = Relay(port)
    job["a"].do(go_through, relay.port)
    assert job["a"].do(call, "b", functions.who_am_i) == "b"
    recorded = b"".join(relay.said)
    before = job["b"].do(functions.calls_of_who_am_i)
    for _ in range(3):
        with visit(port) as sock:
            sock.sendall(recorded)
            # The worker's own opening, with a nonce that the recording cannot have foreseen.
            assert len(rest_of(sock)) == 42
    assert job["b"].do(incoming_links) == 1
    assert job["b"].do(functions.calls_of_who_am_i) == before
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


def test_a_workers_own_words_are_no_proof(make_job: MakeJob) -> None:
    """A stranger who asks one connection for what the other wants to hear gets nothing."""
    job = make_job("a", "b", **TCP)
    port = port_of(job["b"])
    with visit(port) as first, visit(port) as second:
        first.sendall(MAGIC + VERSION.to_bytes(2, "little") + secrets.token_bytes(32))
        said = read(first, 42)
        second.sendall(said)
        answer = read(second, 42)
        assert answer != said
        # It signs nothing for who has proved nothing, so there is nothing to hand on.
        first.sendall(answer)
        assert rest_of(first) == b""


def test_the_key_of_another_job_opens_nothing(make_job: MakeJob) -> None:
    job = make_job("a", "b", key=secrets.token_bytes(32), **TCP)
    other = make_job("x", "b", key=secrets.token_bytes(32), **TCP)
    other["x"].do(go_through, port_of(job["b"]))
    with pytest.raises(rpc.WorkerLost, match="the job's key differs"):
        other["x"].do(call, "b", functions.who_am_i)
    assert job["b"].do(incoming_links) == 0
    assert job["a"].do(call, "b", functions.who_am_i) == "b"


def test_one_key_for_two_jobs_is_told_apart(make_job: MakeJob) -> None:
    key = secrets.token_bytes(32)
    job = make_job("a", "b", key=key, **TCP)
    other = make_job("x", "b", key=key, **TCP)
    other["x"].do(go_through, port_of(job["b"]))
    with pytest.raises(rpc.WorkerLost, match="belongs to another job"):
        other["x"].do(call, "b", functions.who_am_i)


def pretend_torch(version: str) -> None:
    torch.__version__ = version  # type: ignore[assignment]


def pretend_protocol(number: int) -> None:
    meeting.PROTOCOL = number


def test_another_torch_is_refused_with_a_sentence(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(pretend_torch, "1.13.0")
    with pytest.raises(rpc.WorkerLost, match=r"runs torch 1\.13\.0 and this worker torch .* same"):
        job["a"].do(call, "b", functions.who_am_i)


def test_another_telegrad_is_refused_with_a_sentence(make_job: MakeJob) -> None:
    job = make_job("a", "b")
    job["a"].do(pretend_protocol, 99)
    with pytest.raises(rpc.WorkerLost, match=r"speaks telegrad protocol 99 .* same telegrad"):
        job["a"].do(call, "b", functions.who_am_i)


# The store, to which anyone may write who reaches it.


def join_open(process: Process, name: str, port: int) -> None:
    process.do(join, name, None, None, port, **TCP)


def forge(port: int, entry: str, **changes: Any) -> None:
    store = client_of(port)
    known = json.loads(store.get(f"telegrad/{entry}"))
    store.set(f"telegrad/{entry}", json.dumps({**known, **changes}))


FORGERIES: dict[str, dict[str, Any]] = {
    "the address": {"addresses": ["tcp://127.0.0.1:9"]},
    "the name": {"name": "c"},
    "the process": {"process": {"pid": 1, "born": 0, "namespace": ""}},
    "the incarnation": {"incarnation": 1},
    "the seal": {"seal": "0" * 64},
    "the seal's type": {"seal": 5},
}


@pytest.mark.parametrize("what", list(FORGERIES))
def test_a_stranger_who_writes_to_the_store_leads_nobody_astray(start: Start, what: str) -> None:
    store = serve_store()
    a, b = start(), start()
    join_open(a, "a", store.port)
    join_open(b, "b", store.port)
    forge(store.port, "worker 1", **FORGERIES[what])
    with pytest.raises(rpc.RendezvousError, match="no worker of this job wrote"):
        a.do(call, "b", functions.who_am_i)
    assert a.do(incoming_links) == 0


def test_a_name_does_not_lead_to_another_worker(start: Start) -> None:
    store = serve_store()
    a, b, c = start(), start(), start()
    for name, process in (("a", a), ("b", b), ("c", c)):
        join_open(process, name, store.port)
    client_of(store.port).set("telegrad/name b", "2 0")
    with pytest.raises(rpc.RendezvousError, match="has worker 'c' in place of 'b'"):
        a.do(call, "b", functions.who_am_i)


RUBBISH = ["", "{", "[" * 100_000, "null", "[]", '{"job": 5}', '{"job": "x", "world size": 2}']


@pytest.mark.parametrize("text", RUBBISH, ids=range(len(RUBBISH)))
@pytest.mark.parametrize("entry", ["job", "members"])
def test_rubbish_in_the_store_is_named(start: Start, text: str, entry: str) -> None:
    store = serve_store()
    client = client_of(store.port)
    if entry == "job":
        client.set("telegrad/1/job", text)
    b = start()
    if entry == "members":
        # A founder that is no worker: the job is there, and then comes rubbish.
        a = start()
        a.begin(join, "a", 0, 3, store.port)
        client.get("telegrad/1/job")
        client.set("telegrad/1/members", text)
    with pytest.raises(rpc.RendezvousError, match="no worker wrote"):
        b.do(join, "b", 1, 3, store.port)
