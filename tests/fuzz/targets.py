"""What the fuzzer drives: each target takes bytes that a peer might send.

A target returns, or raises nothing but what its callers in production catch; it takes no time and
no memory out of proportion. Anything else is a bug. `ALL` maps the targets' names to the functions;
the same functions are driven by atheris (`python -m tests.fuzz`) and by hypothesis (`make test`).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import struct
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from telegrad.rpc.calls import Calls
from telegrad.rpc.errors import ReferenceLost, TelegradError, WorkerLost
from telegrad.rpc.reference_messages import (
    Accepted,
    Fence,
    Fenced,
    ForkId,
    Gone,
    Message,
    ReferenceId,
    Register,
    Release,
    Transfer,
    Unpin,
    read_messages,
    write_message,
)
from telegrad.rpc.references import References, State
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire import names
from telegrad.wire.arena import Arena, ArenaView
from telegrad.wire.codec import CodecError, Limits, Trust, unpack
from telegrad.wire.frames import Frame, FrameLimits
from telegrad.wire.handshake import (
    Answer,
    ClientHandshake,
    HandshakeError,
    Hello,
    Refuse,
    ServerHandshake,
)
from telegrad.wire.link import Link, LinkBroken, LinkClosed
from telegrad.wire.opaque import TreeUnpickler
from telegrad.wire.session import Session, SessionError
from tests.fuzz.worker import serve
from tests.wire import codec_samples  # noqa: F401 (its exports are part of what is fuzzed)

LIMITS = Limits(meta=1 << 16, depth=50, items=1 << 12, tensors=1 << 8)
FRAME_LIMITS = FrameLimits(frame_bytes=1 << 20, meta_bytes=1 << 16, buffers=1 << 8)


class Bytes:
    """A stream that holds what a peer sent and swallows what is sent to it."""

    loss: OSError | None = None

    def __init__(self, data: bytes, piece: int) -> None:
        self._data = data
        self._piece = piece

    def recv_into(self, view: memoryview) -> int:
        chunk = self._data[: min(self._piece, len(view))]
        self._data = self._data[len(chunk) :]
        view[: len(chunk)] = chunk
        return len(chunk)

    try_recv_into = recv_into

    def set_receive_timeout(self, seconds: float | None) -> None:
        pass

    def try_send(self, parts: Sequence[bytes | memoryview]) -> int:
        return sum(memoryview(part).nbytes for part in parts)

    def wait_writable(self, timeout: float | None) -> bool:
        return True

    def pending(self) -> int:
        return 0

    def unheard(self) -> float:
        return 0.0

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._data = b""


def frames(data: bytes) -> None:
    """The frame parser, with shared memory on both sides, in pieces of any size."""
    if not data:
        return
    arena, theirs = Arena(1 << 16), Arena(1 << 16)
    arena.place(memoryview(bytes(100)))
    freed: deque[int] = deque()
    view = ArenaView(theirs.fd, freed.append)
    link = Link(
        Bytes(data[1:], data[0] or 1 << 20),
        arena=arena,
        view=view,
        freed=freed,
        limits=FRAME_LIMITS,
    )
    try:
        while True:
            link.receive()
    except (CodecError, LinkBroken, LinkClosed):
        pass
    finally:
        view.close()
        arena.close()
        theirs.close()


def _message_of(data: bytes) -> tuple[bytes, list[bytearray]]:
    """Metadata and buffers: a count, their sizes in two bytes each, the buffers, the rest."""
    count = min(data[0] if data else 0, 8, (len(data) - 1) // 2)
    at = 1 + 2 * count
    buffers = []
    for (size,) in struct.iter_unpack("<H", data[1:at]) if count else ():
        buffers.append(bytearray(data[at : at + size]))
        at += size
    return data[at:], buffers


def message_bytes(meta: bytes, buffers: Sequence[bytes]) -> bytes:
    """The inverse, for the corpus."""
    sizes = b"".join(struct.pack("<H", len(buffer)) for buffer in buffers)
    return bytes([len(buffers)]) + sizes + b"".join(buffers) + meta


def codec_data(data: bytes) -> None:
    """What arrives at a worker that takes data only."""
    _decode(data, Trust.DATA)


def codec_code(data: bytes) -> None:
    """What arrives at a worker that takes code, without its pickles and imports: they may do
    anything, and are allowed to."""
    load, imported = TreeUnpickler.load, names.imported
    TreeUnpickler.load = _no_pickle  # type: ignore[method-assign]
    names.imported = sys.modules.__getitem__
    try:
        _decode(data, Trust.CODE)
    finally:
        TreeUnpickler.load = load  # type: ignore[method-assign]
        names.imported = imported


def _no_pickle(self: Any) -> Any:
    raise CodecError("not while fuzzing")


def _decode(data: bytes, trust: Trust) -> None:
    meta, buffers = _message_of(data)
    try:
        value = unpack(meta, buffers, [], trust, LIMITS)
    except CodecError:
        return
    _touch(value, set())


def _touch(value: Any, seen: set[int]) -> None:
    """Read tensors: one that lies outside of its buffer shows only then."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _touch(item, seen)
    elif isinstance(value, dict):
        for key, item in value.items():
            _touch(key, seen)
            _touch(item, seen)
    elif isinstance(value, torch.Tensor) and not value.is_meta:
        _touch_tensor(value.detach())


def _touch_tensor(tensor: torch.Tensor) -> None:
    if tensor.layout is torch.strided and not tensor.is_quantized:
        if tensor.numel():
            corner = tensor[tuple(slice(-2, None) for _ in range(tensor.dim()))]
            corner.reshape(-1)[:64].tolist() if _has_numbers(corner) else corner.numel()
    elif tensor.numel() <= 1 << 16:
        dense = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
        dense.reshape(-1)[:64].tolist()


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Torch can show the elements of its common types only."""
    return tensor.numel() <= 1 << 16 and tensor.dtype in _NUMBERS


_NUMBERS = frozenset(
    getattr(torch, name)
    for name in [
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)

KEY = b"k" * 32
ANSWER = Answer("b", 1, 1, "s", 0, "2", 1)
HELLO = Hello("a", 0, 1, "job", "b", "s", 0, "2", 1, "calls", 1)


def handshake(data: bytes) -> None:
    """Either end; the third bit of the first byte lets the body come with a proof that holds."""
    if len(data) < 2:
        return
    flags, piece = data[0], data[1] or 4096
    server = ServerHandshake(KEY, lambda hello: Refuse("no") if flags & 2 else ANSWER)
    client = ClientHandshake(KEY, HELLO)
    end: Any = server if flags & 1 else client
    words = _proven(end, data[2:]) if flags & 4 else data[2:]
    at = 0
    try:
        while not end.done and at <= len(words):
            chunk = words[at : at + min(piece, end.needed)]
            at += len(chunk)
            end.receive(chunk)
    except HandshakeError as error:
        assert len(error.last_words) < 8192  # noqa: PT017 (no test of pytest)
    assert end.done == (end.peer is not None)


def _proven(end: Any, body: bytes) -> bytes:
    """The words of a peer that holds the key and says whatever it likes."""
    opening = struct.pack("<8sH32s", b"telegrad", 1, bytes(32))
    kind, body = (body[0], body[1:4097]) if body else (1, b"x")
    key = hmac.digest(KEY, b"telegrad handshake 1", hashlib.sha256)
    if isinstance(end, ServerHandshake):
        text = b"telegrad client\0" + opening + end._mine
    else:
        openings = end._mine + opening
        hello = end._prove(b"telegrad client\0", openings, 1, end._body)
        text = b"telegrad server\0" + openings + hello
    proof = hmac.digest(key, text + bytes([kind]) + body, hashlib.sha256)
    return opening + struct.pack("<32sBH", proof, kind, len(body)) + body


def session(data: bytes) -> None:
    """Two ends over a link that loses its tail at will: every frame arrives once and in order.

    Then one end meets a peer that says any numbers: they are refused, or believed and harmless.
    """
    ends: list[Session[int]] = [Session(), Session()]
    wires: list[deque[tuple[int, int]]] = [deque(), deque()]
    arrived: list[list[int]] = [[], []]
    sent = [0, 0]
    for byte in data:
        me, you = byte & 1, 1 - (byte & 1)
        match byte >> 1 & 3:
            case 0:
                seq, ack = ends[me].stamp()
                sent[me] += 1
                ends[me].keep(seq, seq, 1)
                wires[me].append((seq, ack))
            case 1 if wires[you]:
                seq, ack = wires[you].popleft()
                ends[me].acknowledged(ack)
                if seq and ends[me].accept(seq, 1):
                    arrived[me].append(seq)
            case 2:
                wires[me].append((0, ends[me].acknowledge()))
            case 3:
                _resume(ends, wires)
        assert arrived == [list(range(1, len(a) + 1)) for a in arrived]
    _resume(ends, wires)
    for me in (0, 1):
        for seq, _ in wires[1 - me]:
            if ends[me].accept(seq, 1):
                arrived[me].append(seq)
        assert arrived[me] == list(range(1, sent[1 - me] + 1))
    _lie_to(ends[0], data)


def _resume(ends: list[Session[int]], wires: list[deque[tuple[int, int]]]) -> None:
    seen = [end.seen for end in ends]
    for me in (0, 1):
        ends[me].resume(seen[1 - me])
        wires[me] = deque((seq, ends[me].seen) for seq in ends[me].unacknowledged())


def _lie_to(end: Session[int], data: bytes) -> None:
    for at in range(0, len(data) - 9, 9):
        number = int.from_bytes(data[at + 1 : at + 9], "little")
        try:
            match data[at] % 3:
                case 0:
                    end.acknowledged(number)
                case 1:
                    end.accept(number, 1)
                case 2:
                    end.resume(number)
        except SessionError:
            return


def references(data: bytes) -> None:
    """The owner's and the holder's part, with messages of peers that say what they like."""
    core = References(0)
    for worker in (1, 2, 3):
        core.worker_joined(worker)
    handles: list[Any] = [core.create_local(), core.create_remote(1).fork]
    for at in range(0, len(data) - 8, 8):
        op, a, b, c, d, e, f, sender = (byte & 7 for byte in data[at : at + 8])
        transfer = Transfer(ReferenceId(a, b, c), ForkId(d, e))
        try:
            match data[at] >> 3:
                case 0:
                    handles.append(core.share(handles[a % len(handles)], 1 + b % 3))
                    handles.pop()
                case 1:
                    core.drop(handles.pop(a % len(handles)) if len(handles) > 1 else (9, 9))  # type: ignore[arg-type]
                case 2:
                    core.worker_lost(1 + a % 3, "fuzzed")
                case 3:
                    handles.append(core.create_local(State.PENDING))
                case _:
                    for said in read_messages(write_message(_said(op, transfer, f))):
                        core.receive(1 + sender % 3, said)
        except (ReferenceLost, WorkerLost, TelegradError, ValueError, KeyError):
            pass
        for action in core.take_actions():
            assert action is not None
        core.debug_info()


def _said(op: int, transfer: Transfer, worker: int) -> Message:
    return (
        Register(transfer, worker),
        Release(transfer),
        Accepted(transfer.fork),
        Unpin(transfer.fork),
        Fence((worker,)),
        Fenced(worker),
        Gone(transfer.fork),
        Gone(transfer.fork, "fuzzed"),
    )[op]


def calls(data: bytes) -> None:
    """Replies, deadlines and losses in any order: each call is settled once, and none is left."""
    table = Calls()
    workers = [WorkerInfo(f"w{n}", n) for n in range(3)]
    open_: dict[int, Any] = {}
    now = 0.0
    for at in range(0, len(data) - 1, 2):
        kind, number = data[at] % 5, data[at + 1]
        if kind == 0:
            pending = table.begin(workers[number % 3], "target", number % 7, now)
            open_[pending.call_id] = pending
        elif kind == 1:
            taken = table.take(number % 4, number)
            assert (taken is not None) == (
                number in open_ and open_[number].callee.id == number % 4
            )
            if taken is not None:
                open_.pop(number).settle(Frame(2, number, b"", b"", []))
        elif kind == 2:
            now += number / 16
            for pending in table.expire(now):
                assert open_.pop(pending.call_id).done
        elif kind == 3 and not number % 8:
            for pending in table.fail(number % 3, WorkerLost("fuzzed")):
                assert open_.pop(pending.call_id).error is not None
        else:
            table.look_by(now + number)
        assert table.total() == len(open_)
    table.expire(math.inf)
    table.fail(None, WorkerLost("over"))
    assert table.total() == 0


ALL: dict[str, Callable[[bytes], None]] = {
    "frames": frames,
    "codec_data": codec_data,
    "codec_code": codec_code,
    "handshake": handshake,
    "session": session,
    "references": references,
    "calls": calls,
    "worker": serve,
}
