"""Two ends of a handshake, joined by a link that cuts what it carries as it likes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.wire import handshake
from telegrad.wire.handshake import (
    MAX_BODY,
    Answer,
    ClientHandshake,
    HandshakeError,
    Hello,
    Refuse,
    ServerHandshake,
    refuse_other_build,
)

KEY = b"0123456789abcdef0123456789abcdef"
OTHER_KEY = b"another key, just as long as it."
HELLO = Hello("alice", 1, 7, "job", "bob", "session", 12, "2.13.0+cpu", 3, "calls", 1)
ANSWER = Answer("bob", 2, 9, "session", 34, "2.13.0", 3)
OPENING, HEAD = 42, 35
LENGTH = range(OPENING + HEAD - 2, OPENING + HEAD)

End = ClientHandshake | ServerHandshake


def accept(hello: Hello) -> Answer | Refuse:
    return ANSWER


def ends(
    client_key: bytes = KEY,
    server_key: bytes = KEY,
    make_answer: Callable[[Hello], Answer | Refuse] = accept,
    hello: Hello = HELLO,
) -> tuple[ClientHandshake, ServerHandshake]:
    client = ClientHandshake(client_key, hello, "the worker at unix:///bob")
    return client, ServerHandshake(server_key, make_answer)


class Link:
    """Carries bytes between two ends until both rest, and keeps a record of them."""

    def __init__(self, client: ClientHandshake, server: ServerHandshake, chunk: int = 1 << 20):
        self.ends: dict[str, End] = {"client": client, "server": server}
        self.chunk = chunk
        self.inbox = {"client": b"", "server": client.opening}
        self.sent = {"client": [client.opening], "server": []}
        self.errors: dict[str, HandshakeError] = {}

    def run(self) -> Link:
        while any(self.step(name) for name in ("server", "client")):
            pass
        return self

    def step(self, name: str) -> bool:
        end, other = self.ends[name], "client" if name == "server" else "server"
        if end.done or name in self.errors:
            return False
        if not self.inbox[name] and other not in self.errors:
            return False
        data = self.inbox[name][: min(end.needed, self.chunk)]
        self.inbox[name] = self.inbox[name][len(data) :]
        try:
            reply = end.receive(data)
        except HandshakeError as error:
            self.errors[name] = error
            reply = error.last_words
        if reply:
            self.sent[name].append(reply)
            self.inbox[other] += reply
        return True


def deliver(end: End, data: bytes) -> bytes:
    """Give all of `data` to an end; return all it sends."""
    replies = b""
    while data and not end.done:
        size = end.needed
        replies += end.receive(data[:size]) or b""
        data = data[size:]
    return replies


@given(chunk=st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_both_ends_learn_of_each_other_in_any_chunking(chunk: int) -> None:
    client, server = ends()
    link = Link(client, server, chunk).run()
    assert not link.errors
    assert client.done
    assert server.done
    assert client.peer == ANSWER
    assert server.peer == HELLO


def test_neither_end_reads_past_the_handshake() -> None:
    client, server = ends()
    link = Link(client, server)
    link.run()
    assert client.needed == server.needed == 0
    assert link.inbox == {"client": b"", "server": b""}


def test_more_bytes_than_needed_are_a_mistake_of_the_driver() -> None:
    _, server = ends()
    with pytest.raises(ValueError, match="needs 42 bytes"):
        server.receive(b"x" * 43)


def test_a_client_with_another_key_meets_silence_and_is_told_by_its_own_side() -> None:
    client, server = ends(client_key=OTHER_KEY)
    link = Link(client, server).run()
    assert [len(said) for said in link.sent["server"]] == [OPENING]
    assert link.errors["server"].last_words == b""
    assert "unix:///bob refused the handshake" in str(link.errors["client"])
    assert "key differs" in str(link.errors["client"])


def test_an_unproven_hello_is_never_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(data: bytes) -> object:
        raise AssertionError("parsed before it was proven")

    monkeypatch.setattr(handshake.json, "loads", parse)
    client, server = ends(client_key=OTHER_KEY, make_answer=parse)  # type: ignore[arg-type]
    assert "did not prove" in str(Link(client, server).run().errors["server"])


def test_a_server_that_does_not_hold_the_key_is_an_impostor() -> None:
    client, _ = ends()
    impostor = ServerHandshake(OTHER_KEY, accept)
    hello = deliver(client, deliver(impostor, client.opening))
    impostor._proof = hello[:32]
    with pytest.raises(HandshakeError, match="did not prove the job's key"):
        deliver(client, impostor._proven(2, json.dumps(asdict(ANSWER)).encode()))
    assert not client.done


def test_a_recorded_client_cannot_be_replayed() -> None:
    client, server = ends()
    recorded = b"".join(Link(client, server).run().sent["client"])
    _, again = ends()
    with pytest.raises(HandshakeError, match="did not prove"):
        deliver(again, recorded)
    assert again.peer is None


def test_a_recorded_server_cannot_be_replayed() -> None:
    client, server = ends()
    recorded = b"".join(Link(client, server).run().sent["server"])
    again, _ = ends()
    with pytest.raises(HandshakeError, match="did not prove"):
        deliver(again, recorded)
    assert again.peer is None


def test_a_client_that_hears_its_own_opening_stops() -> None:
    client, _ = ends()
    with pytest.raises(HandshakeError, match="own words back"):
        deliver(client, client.opening)


def test_a_clients_proof_does_not_serve_as_a_servers() -> None:
    """Two clients of the same job, each fed the other's words."""
    first, second = ClientHandshake(KEY, HELLO), ClientHandshake(KEY, HELLO)
    proof_of_first = deliver(first, second.opening)
    proof_of_second = deliver(second, first.opening)
    for end, words in ((first, proof_of_second), (second, proof_of_first)):
        with pytest.raises(HandshakeError, match="did not prove"):
            deliver(end, words)


@pytest.mark.parametrize("victim", ["client", "server"])
def test_every_changed_bit_is_noticed(victim: str) -> None:
    client, server = ends()
    lengths = [len(said) for said in Link(client, server).run().sent["client"]]
    size = sum(lengths) if victim == "server" else OPENING + HEAD
    for position in range(0, size, 3):
        client, server = ends()
        link = Link(client, server)
        damage(link, victim, position)
        link.run()
        # More than there is may be waited for: then the driver's time ends it.
        waits = position in LENGTH and link.ends[victim].needed > 0
        assert link.errors or waits, f"byte {position} to the {victim} was changed unnoticed"
        assert not link.ends[victim].done


def damage(link: Link, victim: str, position: int) -> None:
    end = link.ends[victim]
    receive, seen = end.receive, 0

    def receive_damaged(data: bytes) -> bytes | None:
        nonlocal seen
        at = position - seen
        seen += len(data)
        if 0 <= at < len(data):
            data = data[:at] + bytes((data[at] ^ 4,)) + data[at + 1 :]
        return receive(data)

    end.receive = receive_damaged  # type: ignore[method-assign]


def test_a_proven_client_can_be_refused_with_a_sentence() -> None:
    client, server = ends(make_answer=lambda hello: Refuse(f"no session {hello.session!r} here"))
    link = Link(client, server).run()
    assert "refused the connection: no session 'session' here" in str(link.errors["client"])
    assert "'alice', was refused" in str(link.errors["server"])
    assert not client.done
    assert not server.done


def test_a_refusal_longer_than_a_body_is_shortened() -> None:
    client, server = ends(make_answer=lambda hello: Refuse("\N{GRINNING FACE}" * 9999))
    link = Link(client, server).run()
    assert "refused the connection: \N{GRINNING FACE}" in str(link.errors["client"])


def test_a_refusal_cannot_be_forged_without_the_key() -> None:
    client, server = ends()
    deliver(client, deliver(server, client.opening))
    body = json.dumps({"reason": "go away"}).encode()
    with pytest.raises(HandshakeError, match="did not prove"):
        deliver(client, bytes(32) + bytes((3, len(body), 0)) + body)


def test_a_refusal_cannot_be_turned_into_an_answer() -> None:
    client, server = ends(make_answer=lambda hello: Refuse("no"))
    hello = deliver(client, deliver(server, client.opening))
    with pytest.raises(HandshakeError) as caught:
        deliver(server, hello)
    words = bytearray(caught.value.last_words)
    words[32] = 2
    with pytest.raises(HandshakeError, match="did not prove"):
        deliver(client, bytes(words))


def test_a_client_that_reaches_another_worker_says_so() -> None:
    client, server = ends(make_answer=lambda hello: replace(ANSWER, worker="carol"))
    assert "is worker 'carol', not 'bob'" in str(Link(client, server).run().errors["client"])


def test_a_client_may_accept_any_worker() -> None:
    client, server = ends(hello=replace(HELLO, to=""))
    Link(client, server).run()
    assert client.peer == ANSWER


def test_both_ends_name_a_version_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = ends()
    monkeypatch.setattr(handshake, "VERSION", 2)
    _, server = ends()
    with pytest.raises(HandshakeError, match="version 1 of the telegrad handshake") as caught:
        deliver(server, client.opening)
    monkeypatch.setattr(handshake, "VERSION", 1)
    with pytest.raises(HandshakeError, match="version 2 of the telegrad handshake"):
        deliver(client, caught.value.last_words)


def test_another_build_is_refused_and_another_device_is_not() -> None:
    assert refuse_other_build(HELLO, protocol=3, torch="2.13.0+cu130") is None
    other_torch = refuse_other_build(HELLO, protocol=3, torch="2.12.1")
    assert other_torch is not None
    assert "torch 2.13.0+cpu" in other_torch.reason
    other_protocol = refuse_other_build(HELLO, protocol=4, torch="2.13.0")
    assert other_protocol is not None
    assert "protocol 3" in other_protocol.reason


@pytest.mark.parametrize(
    "body",
    [b"[]", b"7", b"{", b"\xff", b"[" * 4000, b'{"worker": "alice"}', b'{"worker": 3}'],
)
def test_a_proven_hello_that_makes_no_sense_is_refused_with_a_sentence(body: bytes) -> None:
    client, server = ends()
    client._body = body
    link = Link(client, server).run()
    assert "refused the connection: the peer's Hello" in str(link.errors["client"])


def test_fields_of_a_later_version_are_passed_over() -> None:
    client, server = ends()
    client._body = client._body[:-1] + b',"later":[1]}'
    Link(client, server).run()
    assert server.peer == HELLO


@pytest.mark.parametrize("field", [{"worker_id": -1}, {"worker_id": True}, {"resume_at": 1 << 64}])
def test_numbers_out_of_bounds_are_refused(field: dict[str, int]) -> None:
    client, server = ends(hello=replace(HELLO, **field))  # type: ignore[arg-type]
    assert next(iter(field)) in str(Link(client, server).run().errors["client"])


def test_a_body_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        ClientHandshake(KEY, replace(HELLO, purpose="x" * MAX_BODY))
    client, server = ends()
    deliver(server, client.opening)
    with pytest.raises(HandshakeError, match="announced a body of 4097 bytes"):
        deliver(server, bytes(32) + b"\1" + (MAX_BODY + 1).to_bytes(2, "little"))


@pytest.mark.parametrize("name", ["client", "server"])
def test_an_end_that_is_cut_off_anywhere_fails(name: str) -> None:
    client, server = ends()
    other = "server" if name == "client" else "client"
    whole = b"".join(Link(client, server).run().sent[other])
    for cut in range(OPENING + 2):
        end = ends()[name == "server"]
        if cut:
            end.receive(whole[:cut][:OPENING])
        with pytest.raises(HandshakeError, match=r"closed the connection|refused|left before"):
            end.receive(b"")


def test_a_failed_handshake_stays_failed() -> None:
    client, server = ends()
    with pytest.raises(HandshakeError):
        server.receive(b"")
    with pytest.raises(HandshakeError, match="closed the connection"):
        server.receive(client.opening)


def test_a_stranger_is_told_by_its_first_bytes() -> None:
    client, server = ends()
    with pytest.raises(HandshakeError, match=r"does not speak telegrad.*HTTP") as caught:
        client.receive(b"HTTP/1.1")
    assert caught.value.last_words == b""
    with pytest.raises(HandshakeError, match="does not speak telegrad"):
        server.receive(b"GET")


@given(garbage=st.binary(min_size=1, max_size=300), keep=st.integers(0, 120), which=st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_bytes_do_nothing_but_fail(garbage: bytes, keep: int, which: bool) -> None:
    client, server = ends()
    end: End = client if which else server
    start = b"telegrad\1\0" + bytes(32) + bytes(32) + b"\1\40\0"
    try:
        deliver(end, start[:keep] + garbage)
        end.receive(b"")
    except HandshakeError as error:
        assert error.last_words in (b"", server._mine)  # noqa: PT017
    assert not end.done
    assert end.peer is None
