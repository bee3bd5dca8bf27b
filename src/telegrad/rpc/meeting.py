"""How two workers meet: connect, prove the job's key to each other, share memory.

The handshake itself is a core (`wire/handshake.py`); here it is driven over sockets, with a time
limit, and before it is done nothing of the other side's words is looked at.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from telegrad.rpc.job_files import remove_if_last
from telegrad.rpc.members import Member
from telegrad.rpc.pulse import Companion
from telegrad.rpc.vitals import Process
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.address import (
    DEFAULT_SILENCE,
    Address,
    TcpAddress,
    UnixAddress,
    Unreachable,
    bound,
    connect,
    is_loopback,
    listen,
    parse_address,
    prepare,
)
from telegrad.wire.arena import Arena, ArenaView
from telegrad.wire.group import TensorGroup, form_group
from telegrad.wire.handshake import (
    Answer,
    ClientHandshake,
    HandshakeError,
    Hello,
    Refuse,
    ServerHandshake,
    refuse_other_build,
)
from telegrad.wire.keys import JobKey, tls_contexts
from telegrad.wire.stream import PlainStream, Stream
from telegrad.wire.tls import TlsCutShort, TlsStream

PROTOCOL = 4
PATIENCE = 10.0
ARENA_BYTES = 1 << 30
PULSE_KEY = "pulse"
_MEMORY, _NO_MEMORY = b"M", b"-"

Shared = tuple[Arena | None, ArenaView | None, deque[int]]
_Memory = TypeVar("_Memory", Arena, ArenaView)


@dataclass
class Meeting:
    """What a worker needs in order to be met and to meet others."""

    key: JobKey
    job: str
    incarnation: int
    host: str
    directory: Path | None = None
    listeners: list[socket.socket] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    arena_bytes: int = ARENA_BYTES
    plaintext: bool = False
    silence: float = DEFAULT_SILENCE
    tensors: str | None = None
    """The backend of the process groups by which large tensors travel."""
    pulse: str = ""
    attempts: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    _companion: Companion | None = None
    _tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None

    def listen(self, address: Address) -> None:
        listener = listen(address)
        self.listeners.append(listener)
        self.addresses.append(bound(address, listener))

    def have_company(self, host: str) -> None:
        """Workers on other hosts cannot see how this process is: somebody has to tell them."""
        me = Process.own()
        pulse_key = self.key.derive(PULSE_KEY)
        self._companion = Companion(host, pulse_key, self.incarnation, me.pid, me.born)
        self.pulse = "{} {}".format(*self._companion.address)

    @property
    def lacks_company(self) -> bool:
        """Whether the one that answers for this process was killed. Never waits."""
        companion = self._companion
        return companion is not None and companion.has_ended

    def restore_company(self) -> None:
        companion = self._companion
        if companion is not None:
            companion.revive()

    def address_of(self, listener: socket.socket) -> Address:
        try:
            return self.addresses[self.listeners.index(listener)]
        except ValueError:
            raise OSError("the door was closed before the visitor was greeted") from None

    def own_host(self) -> str:
        """The address at which this worker is reached, of this host alone if it has no other."""
        hosts = [each.host for each in self.addresses if isinstance(each, TcpAddress)]
        return hosts[0] if hosts else "127.0.0.1"

    def tls(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        if self._tls is None:
            self._tls = tls_contexts(self.key)
        return self._tls

    def close(self) -> None:
        for listener, address in zip(self.listeners, self.addresses, strict=True):
            listener.close()
            if isinstance(address, UnixAddress):
                with contextlib.suppress(OSError):
                    os.unlink(address.path)
        self.listeners.clear()
        self.addresses.clear()
        if self._companion is not None:
            self._companion.close()
            self._companion = None
        if self.directory is not None:
            remove_if_last(self.directory)


@dataclass
class Connected:
    """A connection after its handshake."""

    stream: Stream
    arena: Arena | None
    view: ArenaView | None
    freed: deque[int]
    group: TensorGroup | None
    name: str
    """What both ends call the connection, if it may have a lane (`wire/lane.py`); else empty."""

    def close(self) -> None:
        self.stream.close()
        if self.group is not None:
            self.group.close()


@dataclass
class Visit(Connected):
    peer_has_seen: int


@dataclass
class Visitor(Connected):
    hello: Hello


def meet(
    meeting: Meeting,
    me: WorkerInfo,
    member: Member,
    session: str,
    seen: int,
    purpose: str,
    patience: float | None = None,
) -> Visit:
    """Connect to a worker. Raises `Unreachable`, `HandshakeError`, `CutShort` or an `OSError`."""
    patience = PATIENCE if patience is None else max(0.001, min(PATIENCE, patience))
    address = _choose(meeting, member)
    sock = connect(address, patience, silence=meeting.silence)
    hello = Hello(
        worker=me.name,
        worker_id=me.id,
        incarnation=meeting.incarnation,
        job=meeting.job,
        to=member.info.name,
        session=session,
        resume_at=seen,
        torch=str(torch.__version__),
        protocol=PROTOCOL,
        purpose=purpose,
        attempt=next(meeting.attempts),
    )
    try:
        whom = f"worker {member.info.name!r} at {address}"
        sock.settimeout(patience)
        channel = _open_channel(sock, address, meeting, patience, server_side=False, peer=whom)
        handshake = ClientHandshake(bytes(meeting.key), hello, whom)
        _shake_hands(channel, handshake)
        assert handshake.peer is not None
        if handshake.peer.incarnation != member.incarnation:
            raise HandshakeError(f"{whom} is another incarnation than the one that joined")
        shared, group = _equip(meeting, channel, sock, address, purpose, rank=0)
        name = _name(meeting, address, handshake)
        return Visit(channel.stream(), *shared, group, name, handshake.peer.resume_at)
    except BaseException:
        sock.close()
        raise


def greet(
    meeting: Meeting,
    me: WorkerInfo,
    sock: socket.socket,
    listener: socket.socket,
    admit: Callable[[Hello], Refuse | int],
) -> Visitor:
    """Let a visitor prove the key and say who it is."""
    address = meeting.address_of(listener)
    sock.settimeout(PATIENCE)
    prepare(sock, silence=meeting.silence)

    def answer(hello: Hello) -> Answer | Refuse:
        if hello.job != meeting.job:
            return Refuse(f"worker {me.name!r} belongs to another job")
        refused = refuse_other_build(hello, protocol=PROTOCOL, torch=str(torch.__version__))
        if refused is not None:
            return refused
        admitted = admit(hello)
        if isinstance(admitted, Refuse):
            return admitted
        return Answer(
            worker=me.name,
            worker_id=me.id,
            incarnation=meeting.incarnation,
            session=hello.session,
            resume_at=admitted,
            torch=str(torch.__version__),
            protocol=PROTOCOL,
        )

    channel = _open_channel(sock, address, meeting, PATIENCE, server_side=True, peer="a visitor")
    handshake = ServerHandshake(bytes(meeting.key), answer, "a visitor")
    _shake_hands(channel, handshake)
    assert handshake.peer is not None
    shared, group = _equip(meeting, channel, sock, address, handshake.peer.purpose, rank=1)
    name = _name(meeting, address, handshake)
    return Visitor(channel.stream(), *shared, group, name, handshake.peer)


def _name(meeting: Meeting, address: Address, end: ClientHandshake | ServerHandshake) -> str:
    """Under TLS a second connection gains next to nothing (`benchmarks/streams.py`)."""
    in_the_clear = isinstance(address, TcpAddress) and not address.tls
    return end.name if in_the_clear and meeting.tensors is None else ""


def _equip(
    meeting: Meeting,
    channel: _Channel,
    sock: socket.socket,
    address: Address,
    purpose: str,
    *,
    rank: int,
) -> tuple[Shared, TensorGroup | None]:
    """What large tensors travel by besides the connection: shared memory or a process group."""
    nothing: Shared = (None, None, deque())
    if meeting.tensors is not None:
        if purpose == "probe":
            return nothing, None
        try:
            return nothing, form_group(meeting.tensors, channel, rank, meeting.own_host())
        except TimeoutError:
            raise CutShort("the other end did not form a process group in time") from None
        except ConnectionError as error:
            raise CutShort(f"the connection broke before a group was formed: {error}") from None
    if purpose == "calls" and isinstance(address, UnixAddress):
        return _share_memory(sock, meeting.arena_bytes), None
    return nothing, None


def _choose(meeting: Meeting, member: Member) -> Address:
    """The nearest address of a worker."""
    addresses = [parse_address(text) for text in member.addresses]
    for address in addresses:
        if isinstance(address, UnixAddress) and member.host == meeting.host:
            return address
    for address in addresses:
        if isinstance(address, TcpAddress):
            _check_private(meeting, member, address)
            return address
    raise Unreachable(
        f"worker {member.info.name!r} is on another host and listens on this host's Unix socket "
        "only. For a job on several hosts give every worker the same key (TELEGRAD_KEY_FILE) and "
        "an address to listen at (init_rpc(..., host=) or TELEGRAD_HOST)"
    )


def _check_private(meeting: Meeting, member: Member, address: TcpAddress) -> None:
    """Both ends have to ask for plaintext: what is sent is the sender's as well."""
    if not (address.tls or meeting.plaintext or is_loopback(address.host)):
        raise Unreachable(
            f"worker {member.info.name!r} listens at {address} without TLS, and this worker was "
            "not told that it may speak in the clear: give plaintext=True to both, or to neither"
        )


class CutShort(OSError):
    """The connection ended, or fell silent, in the middle of the handshake: try again."""


class Unanswered(CutShort):
    """The other end hung up on our proof: its key differs, or it had no time for us."""


class _Channel:
    """A socket during its handshake: reads and writes within one time limit for all of them.

    A limit for each would let a stranger who sends a byte now and then stay for ever.
    """

    def __init__(self, sock: socket.socket, tls: TlsStream | None, patience: float) -> None:
        self._socket = sock
        self._tls = tls
        self._patience = patience
        self._until = time.monotonic() + patience

    def read(self, count: int) -> bytes:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake took too long")
        if self._tls is None:
            self._socket.settimeout(left)
            return self._socket.recv(count)
        self._tls.set_receive_timeout(left)
        buffer = bytearray(count)
        got = self._tls.recv_into(memoryview(buffer))
        if got < 0:
            raise TimeoutError("the handshake took too long")
        return bytes(buffer[:got])

    def read_exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.read(count - len(data))
            if not more:
                raise ConnectionError("the other end closed the connection")
            data += more
        return data

    def write(self, data: bytes) -> None:
        if self._tls is None:
            self._socket.sendall(data)
            return
        rest = memoryview(data)
        while rest:
            sent = self._tls.try_send([rest])
            rest = rest[sent:]
            if rest and not self._tls.wait_writable(self._patience):
                raise TimeoutError("the handshake took too long")

    def stream(self) -> Stream:
        if self._tls is not None:
            self._tls.set_receive_timeout(None)
            return self._tls
        return PlainStream(self._socket)


def _open_channel(
    sock: socket.socket,
    address: Address,
    meeting: Meeting,
    patience: float,
    *,
    server_side: bool,
    peer: str,
) -> _Channel:
    if not (isinstance(address, TcpAddress) and address.tls):
        return _Channel(sock, None, patience)
    context = meeting.tls()[0 if server_side else 1]
    try:
        tls = TlsStream(sock, context, server_side=server_side, timeout=patience, peer=peer)
    except TlsCutShort as error:
        raise CutShort(str(error)) from None
    return _Channel(sock, tls, patience)


def _shake_hands(channel: _Channel, end: ClientHandshake | ServerHandshake) -> None:
    if end.opening:
        channel.write(end.opening)
    while not end.done:
        try:
            data = channel.read(end.needed)
        except TimeoutError:
            raise CutShort("the other end did not finish the handshake in time") from None
        except ConnectionError as error:
            raise CutShort(f"the connection broke during the handshake: {error}") from None
        try:
            reply = end.receive(data)
        except HandshakeError as error:
            if not data:
                proved = isinstance(end, ClientHandshake) and end.proved
                raise (Unanswered if proved else CutShort)(str(error)) from None
            if error.last_words:
                with contextlib.suppress(OSError):
                    channel.write(error.last_words)
            raise
        if reply:
            try:
                channel.write(reply)
            except (TimeoutError, ConnectionError) as error:
                raise CutShort(f"the connection broke during the handshake: {error}") from None


def _share_memory(sock: socket.socket, size: int) -> Shared:
    """Give each other the descriptor of the memory that large tensors will travel in.

    A process may be able to make such memory and not to map the other's, or neither: its limits on
    files and on address space are its own. So each end says whether it has what it was given, and
    in a direction in which there is no memory tensors go by the socket.

    Without a size, none is shared: who shares memory can change a tensor after it was checked.
    """
    arena = _memory_or_none(lambda: Arena(size)) if size else None
    freed: deque[int] = deque()
    given, descriptors = _exchange(sock, arena)
    try:
        view = None
        if size and given == _MEMORY:
            if not descriptors:
                # The kernel drops a descriptor for which there is no room, and says nothing.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            view = _memory_or_none(lambda: ArenaView(descriptors[0], freed.append))
    except ValueError as error:
        raise HandshakeError(f"the other end shared no memory that can be used: {error}") from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    taken = _confirm(sock, view is not None)
    if arena is not None and taken != _MEMORY:
        arena.close()
        arena = None
    return arena, view, freed


def _memory_or_none(make: Callable[[], _Memory]) -> _Memory | None:
    """None where the limits of this process forbid such memory: it can do without.

    A lack of descriptors is another matter: nothing can be done without those.
    """
    try:
        return make()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _exchange(sock: socket.socket, arena: Arena | None) -> tuple[bytes, list[int]]:
    """Offer our memory; what the other end offers."""
    try:
        if arena is None:
            sock.sendall(_NO_MEMORY)
        else:
            socket.send_fds(sock, [_MEMORY], [arena.fd])
        word, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    except (TimeoutError, ConnectionError) as error:
        raise CutShort(f"the other end did not share its memory: {error}") from None
    if not word:
        raise CutShort("the other end left before it shared its memory")
    return word, descriptors


def _confirm(sock: socket.socket, has_memory: bool) -> bytes:
    """Say whether we have the other end's memory here; what it says of ours."""
    try:
        sock.sendall(_MEMORY if has_memory else _NO_MEMORY)
        word = sock.recv(1)
    except (TimeoutError, ConnectionError) as error:
        raise CutShort(f"the other end did not say whether it has our memory: {error}") from None
    if not word:
        raise CutShort("the other end left before it said whether it has our memory")
    return word
