"""Both ends of a connection prove the job's key before either parses a word of the other.

    client                                    server
      magic, version, nonce C        ->
                                     <-       magic, version, nonce S
      proof(C, S, hello), hello      ->
                                     <-       proof(C, S, client's proof, answer), answer

A proof is an HMAC-SHA256 under a key that follows from the job's. It covers a label for the
role, both openings (so magic, versions and nonces), and the body it comes with.

Rules, and why they suffice:

- The client proves first. To a client that has not, the server says its opening and nothing
  else: a wrong key, a damaged body and a length out of bounds all end in the same silence. So a
  stranger learns no more than that a telegrad listens, and cannot ask the server to sign anything.
- A body is parsed only after its proof has been verified, in constant time. Before that the only
  things read are a magic, a version and a length, each of fixed size and checked against bounds.
- Replay fails because each end chose a nonce that the proof it expects must cover. Reflection
  fails because the two roles have different labels, and a nonce that comes back is refused.
- The answer's proof covers the client's proof, so it answers this hello and no other. The hello
  names the worker it is meant for, and the client compares that name with the answer's: a
  connection that is led astray to another worker of the same job is noticed.
- What each end must be told, it is told: a client that proved the key but is not wanted receives
  a `Refuse` with a sentence, itself under proof. A client that meets silence has the wrong key, or
  is not talking to a worker, and its own error says so.

The proofs say who is there; they do not protect what follows. That is the task of the directory
that holds a Unix socket, and of TLS between hosts. The proofs let someone who listens test guesses
of the key at leisure, so the key must be random (see `keys.new_key`), not a password.

Neither end does I/O. `opening` is to be sent first; then the driver reads exactly `needed` bytes
(fewer at a time if it likes), gives them to `receive`, and sends what `receive` returns:

    send(end.opening)
    while not end.done:
        reply = end.receive(read_at_most(end.needed))      # b"" at end-of-file
        if reply: send(reply)

When `receive` raises `HandshakeError`, the driver sends the error's `last_words`, if any, and
closes. It never reads past the handshake, so the stream that follows starts clean.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

VERSION = 1
MAGIC = b"telegrad"
MAX_BODY = 4096

_OPENING = struct.Struct("<8sH32s")
_PROVEN = struct.Struct("<32sBH")

_CLIENT_LABEL = b"telegrad client\0"
_SERVER_LABEL = b"telegrad server\0"

_HELLO, _ANSWER, _REFUSAL = 1, 2, 3


class HandshakeError(ConnectionError):
    """The handshake failed; the message says why, as far as this end can know.

    `last_words` are to be sent before the connection is closed. They are empty unless the peer
    is owed an explanation: because it proved the key, or because it speaks another version.
    """

    def __init__(self, reason: str, last_words: bytes = b"") -> None:
        super().__init__(reason)
        self.last_words = last_words


@dataclass(frozen=True)
class Hello:
    """Who connects, to whom, and what for. An empty `to` accepts any worker of the job."""

    worker: str
    worker_id: int
    incarnation: int
    job: str
    to: str
    session: str
    resume_at: int
    torch: str
    protocol: int
    purpose: str
    attempt: int
    """Grows with each connection that its worker tries to make: of two, the later one counts."""


@dataclass(frozen=True)
class Answer:
    """Who was reached, and from which frame on the session continues."""

    worker: str
    worker_id: int
    incarnation: int
    session: str
    resume_at: int
    torch: str
    protocol: int


@dataclass(frozen=True)
class Refuse:
    """Why a worker that proved the key is turned away: a sentence for its user."""

    reason: str


def refuse_other_build(hello: Hello, *, protocol: int, torch: str) -> Refuse | None:
    """Refuse a worker that runs another telegrad protocol or another torch release.

    The part of a torch version behind the plus sign names the device build: workers with and
    without accelerators belong to one job.
    """
    if hello.protocol != protocol:
        return Refuse(
            f"worker {hello.worker!r} speaks telegrad protocol {hello.protocol} and this worker "
            f"{protocol}: install the same telegrad everywhere"
        )
    if _release(hello.torch) != _release(torch):
        return Refuse(
            f"worker {hello.worker!r} runs torch {hello.torch} and this worker torch {torch}: "
            "install the same torch everywhere"
        )
    return None


def _release(torch: str) -> str:
    return torch.partition("+")[0]


_Body = TypeVar("_Body", Hello, Answer, Refuse)


def _encode(body: Hello | Answer | Refuse) -> bytes:
    data = json.dumps(asdict(body), separators=(",", ":")).encode()
    if len(data) > MAX_BODY:
        raise ValueError(
            f"a {type(body).__name__} of {len(data)} bytes does not fit a handshake, which takes "
            f"{MAX_BODY}: shorten its names or its reason"
        )
    return data


def _decode(kind: type[_Body], data: bytes) -> _Body:
    """Unknown fields are passed over, so that a later version can be refused with a sentence."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HandshakeError(f"the peer's {kind.__name__} is not JSON: {error}") from None
    if type(values) is not dict:
        raise HandshakeError(f"the peer's {kind.__name__} is not a JSON object")
    chosen: dict[str, str | int] = {}
    for field in fields(kind):
        value = values.get(field.name)
        wanted = int if field.type == "int" else str
        if type(value) is not wanted or (type(value) is int and not 0 <= value < 1 << 64):
            raise HandshakeError(
                f"the peer's {kind.__name__} has no valid {field.name!r}: "
                "does it run another version of telegrad?"
            )
        chosen[field.name] = value
    return kind(**chosen)  # type: ignore[arg-type]


class _End:
    """One end: gathers what the next step needs, whatever the pieces it comes in."""

    def __init__(self, key: bytes, other: str) -> None:
        self.needed = _OPENING.size
        self.done = False
        self._key = hmac.digest(key, b"telegrad handshake 1", hashlib.sha256)
        self._other = other
        self._mine = _OPENING.pack(MAGIC, VERSION, secrets.token_bytes(32))
        self._openings = b""
        self._gathered = bytearray()
        self._step: Callable[[bytes], bytes | None] = self._on_opening
        self._silence = "closed the connection before it said anything"
        self._failure: str | None = None

    @property
    def name(self) -> str:
        """What both ends call this connection, and no other: it follows from both nonces."""
        return hashlib.sha256(b"telegrad connection\0" + self._openings).hexdigest()

    def receive(self, data: bytes) -> bytes | None:
        """Take received bytes, b"" for end-of-file; return what is to be sent, if anything."""
        if self._failure is not None:
            raise HandshakeError(self._failure)
        if len(data) > self.needed:
            raise ValueError(f"the handshake needs {self.needed} bytes, not {len(data)}")
        try:
            if not data:
                raise HandshakeError(f"{self._other} {self._silence}")
            return self._gather(data)
        except HandshakeError as error:
            self._failure = str(error)
            raise

    def _gather(self, data: bytes) -> bytes | None:
        self._gathered += data
        self.needed -= len(data)
        if self._step == self._on_opening:
            self._check_magic()
        if self.needed:
            return None
        whole = bytes(self._gathered)
        self._gathered.clear()
        return self._step(whole)

    def _check_magic(self) -> None:
        """Tell a stranger by its first bytes: it may never send as many as an opening has."""
        start = bytes(self._gathered[: len(MAGIC)])
        if not MAGIC.startswith(start):
            raise HandshakeError(
                f"{self._other} does not speak telegrad: it began with {start!r}. "
                "Is the address right?"
            )

    def _await(self, step: Callable[[bytes], bytes | None], size: int) -> None:
        self._step = step
        self.needed = size

    def _read_opening(self, opening: bytes, last_words: bytes) -> None:
        _, version, nonce = _OPENING.unpack(opening)
        if version != VERSION:
            raise HandshakeError(
                f"{self._other} speaks version {version} of the telegrad handshake and this "
                f"worker version {VERSION}: install the same telegrad everywhere",
                last_words,
            )
        if hmac.compare_digest(nonce, _OPENING.unpack(self._mine)[2]):
            raise HandshakeError(f"{self._other} sent this worker's own words back")

    def _read_proven_head(self, head: bytes) -> tuple[bytes, int, int]:
        proof, kind, size = _PROVEN.unpack(head)
        if not 0 < size <= MAX_BODY:
            raise HandshakeError(
                f"{self._other} announced a body of {size} bytes; a handshake takes {MAX_BODY}"
            )
        return proof, kind, size

    def _prove(self, label: bytes, transcript: bytes, kind: int, body: bytes) -> bytes:
        # Everything before the body has a fixed size, so no two inputs read the same.
        text = label + transcript + bytes((kind,)) + body
        return hmac.digest(self._key, text, hashlib.sha256)

    def _on_opening(self, opening: bytes) -> bytes | None:
        raise NotImplementedError


class ClientHandshake(_End):
    """The end that connects. `server` is how errors call the other, e.g. "the worker at ..."."""

    def __init__(self, key: bytes, hello: Hello, server: str = "the other end") -> None:
        super().__init__(key, server)
        self.peer: Answer | None = None
        self.proved = False
        """Whether the proof has been given away: from then on, silence may be a verdict."""
        self.opening = self._mine
        self._hello = hello
        self._body = _encode(hello)

    def _on_opening(self, opening: bytes) -> bytes:
        self._read_opening(opening, last_words=b"")
        self._openings = self._mine + opening
        self._proof = self._prove(_CLIENT_LABEL, self._openings, _HELLO, self._body)
        self._silence = (
            "refused the handshake without a word: the job's key differs (compare TELEGRAD_KEY "
            "or TELEGRAD_KEY_FILE on both sides), or it is shutting down"
        )
        self._await(self._on_head, _PROVEN.size)
        self.proved = True
        return _PROVEN.pack(self._proof, _HELLO, len(self._body)) + self._body

    def _on_head(self, head: bytes) -> None:
        self._expected, self._kind, size = self._read_proven_head(head)
        self._silence = "closed the connection in the middle of its answer"
        self._await(self._on_body, size)

    def _on_body(self, body: bytes) -> None:
        transcript = self._openings + self._proof
        proof = self._prove(_SERVER_LABEL, transcript, self._kind, body)
        if not hmac.compare_digest(proof, self._expected):
            raise HandshakeError(
                f"{self._other} did not prove the job's key: its key differs, or it is an impostor"
            )
        if self._kind == _REFUSAL:
            reason = _decode(Refuse, body).reason
            raise HandshakeError(f"{self._other} refused the connection: {reason}")
        if self._kind != _ANSWER:
            raise HandshakeError(f"{self._other} answered with the unknown kind {self._kind}")
        answer = _decode(Answer, body)
        if self._hello.to and answer.worker != self._hello.to:
            raise HandshakeError(
                f"{self._other} is worker {answer.worker!r}, not {self._hello.to!r}: "
                "does an old worker hold the address?"
            )
        self.peer = answer
        self.done = True


class ServerHandshake(_End):
    """The end that listens. `make_answer` sees a hello only after its sender proved the key."""

    opening = b""

    def __init__(
        self,
        key: bytes,
        make_answer: Callable[[Hello], Answer | Refuse],
        client: str = "the client",
    ) -> None:
        super().__init__(key, client)
        self.peer: Hello | None = None
        self._make_answer = make_answer

    def _on_opening(self, opening: bytes) -> bytes:
        self._read_opening(opening, last_words=self._mine)
        self._openings = opening + self._mine
        self._silence = "left before it proved the job's key"
        self._await(self._on_head, _PROVEN.size)
        return self._mine

    def _on_head(self, head: bytes) -> None:
        self._proof, self._kind, size = self._read_proven_head(head)
        self._await(self._on_body, size)

    def _on_body(self, body: bytes) -> bytes:
        proof = self._prove(_CLIENT_LABEL, self._openings, self._kind, body)
        if not hmac.compare_digest(proof, self._proof):
            raise HandshakeError(
                f"{self._other} did not prove the job's key: its key differs, or it is a stranger"
            )
        if self._kind != _HELLO:
            raise HandshakeError(f"{self._other} said hello with the unknown kind {self._kind}")
        try:
            hello = _decode(Hello, body)
        except HandshakeError as error:
            raise HandshakeError(str(error), self._refusal(str(error))) from None
        answer = self._make_answer(hello)
        if isinstance(answer, Refuse):
            raise HandshakeError(
                f"{self._other}, worker {hello.worker!r}, was refused: {answer.reason}",
                self._refusal(answer.reason),
            )
        reply = self._proven(_ANSWER, _encode(answer))
        self.peer = hello
        self.done = True
        return reply

    def _refusal(self, reason: str) -> bytes:
        # JSON writes one character in twelve bytes at most.
        return self._proven(_REFUSAL, _encode(Refuse(reason[: MAX_BODY // 12 - 2])))

    def _proven(self, kind: int, body: bytes) -> bytes:
        proof = self._prove(_SERVER_LABEL, self._openings + self._proof, kind, body)
        return _PROVEN.pack(proof, kind, len(body)) + body
