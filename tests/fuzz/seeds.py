"""The seeds from which the fuzzer starts: a few well-formed inputs per target.

`python -m tests.fuzz.seeds` writes them to tests/fuzz/corpus. Inputs that the fuzzer found and
that matter (one per bug) lie beside them under names of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from telegrad.autograd.crossing import pack_note
from telegrad.autograd.messages import (
    NO_HISTORY,
    Absent,
    Ack,
    Begin,
    Fail,
    Failure,
    Gradient,
    History,
    Options,
    Sequel,
    encode,
)
from telegrad.rpc.loans import Loan
from telegrad.rpc.methods import call_parcel, fetch_parcel
from telegrad.rpc.reference_mail import in_one
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
)
from telegrad.wire.codec import Packed, Trust, pack
from telegrad.wire.frames import HEADER, INLINE, Kind
from telegrad.wire.handshake import _encode
from tests.fuzz import targets
from tests.fuzz.worker import frame_bytes, give_back, weigh
from tests.wire.codec_samples import Color, Mode, Pair, Pairing, Point, Record, Rights, Ticket

PLACE = Path(__file__).parent / "corpus"
CONTEXT = 1
PASS = (1 << 48) + 1


def _samples() -> list[Any]:
    base = torch.arange(8.0)
    channel = torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2, dtype=torch.int64), 0, torch.qint8
    )
    return [
        [1, -(2**70), 1.5, 2j, "text", b"bytes", bytearray(3), None, True, [1.5] * 9, [7] * 9],
        {"a": {1, 2}, (1, 2): frozenset([3]), "s": slice(1, 2), "r": range(3)},
        [weigh, Record(1, [Mode.ON]), Pair(1, 2), Ticket([1]), torch.float32, torch.Size([1])],
        [Rights.READ | Rights.WRITE, {Pairing(1, (2, 3))}, torch.device("cpu"), torch.strided],
        [base, base[3:9], base.view(2, 4).t(), base[:1].expand(4), base.bfloat16(), base[0]],
        [torch.empty(3, 4, device="meta"), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()],
        [torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.quint8), channel],
        [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.ones(2) > 0],
    ]


def _codec() -> dict[str, bytes]:
    return {str(n): _message(pack(s, [], Trust.DATA)) for n, s in enumerate(_samples())}


def _message(packed: Packed) -> bytes:
    return targets.message_bytes(packed.meta, [bytes(buffer) for buffer in packed.buffers])


def _code() -> dict[str, bytes]:
    values = [Color.RED, Point(1, [2]), torch.add, object(), Record.total]
    return {**_codec(), **{f"code {n}": _message(pack(v, [])) for n, v in enumerate(values)}}


def _frames() -> dict[str, bytes]:
    inline = INLINE.to_bytes(8, "little")
    four, size = (4).to_bytes(8, "little"), (70_000).to_bytes(8, "little")
    big = HEADER.pack(Kind.REPLY, 0, 0, 1, 0, 1, 16 + 1 + 70_000, 3, 0, 7)
    return {
        "plain": b"\0" + HEADER.pack(Kind.CALL, 0, 2, 0, 0, 4, 6, 1, 0, 1) + b"nometa",
        "buffer": b"\x09"
        + HEADER.pack(Kind.CALL, 0, 0, 1, 0, 1, 21, 1, 0, 1)
        + four
        + inline
        + b"mbuff",
        "shared": b"\0" + HEADER.pack(Kind.POST, 0, 0, 1, 1, 0, 24, 1, 0, 0) + four + bytes(16),
        "two": b"\1"
        + HEADER.pack(Kind.HOUSEKEEPING, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        + HEADER.pack(Kind.LEAVING, 0, 0, 0, 0, 0, 0, 1, 0, 0),
        "large": b"\0" + big + size + inline + b"m" + bytes(300),
    }


def _handshake() -> dict[str, bytes]:
    hello = _encode(targets.HELLO)
    answer = _encode(targets.ANSWER)
    return {
        "hello": bytes([5, 0, 1]) + hello,
        "refused": bytes([7, 3, 1]) + hello,
        "answer": bytes([4, 0, 2]) + answer,
        "refusal": bytes([4, 0, 3]) + b'{"reason": "no"}',
        "opening": bytes([1, 5]) + b"telegrad\1\0" + bytes(40),
        "silent": bytes([0, 0]) + b"telegrad\2\0" + bytes(40),
    }


def _worker() -> dict[str, bytes]:
    def call(*said: Any) -> bytes:
        return frame_bytes(Kind.CALL, b"", pack((*said, {}), None, Trust.DATA).meta)

    def post(topic: str, payload: Any, note: bytes = b"") -> bytes:
        return frame_bytes(Kind.POST, note, pack((topic, payload), None, Trust.DATA).meta)

    def parcel(request: Any) -> bytes:
        return frame_bytes(Kind.CALL, b"", pack(request, None, Trust.DATA).meta)

    def told(*messages: Message) -> bytes:
        return frame_bytes(Kind.POST, b"", pack(in_one(1, messages), None, Trust.DATA).meta)

    def passing(message: Any) -> bytes:
        packed = pack(encode(CONTEXT, PASS, message), None, Trust.DATA)
        return frame_bytes(Kind.POST, b"", packed.meta)

    empty = torch.empty(0, 3)
    options, followed = Options(), Options(sequel=Sequel((1 << 48) + 3, b"data"))
    failure = Fail(Failure(1, "peer", "message", "traceback"))
    noted = pack((weigh, (empty,), {}), None, Trust.DATA).meta
    return {
        "call": call(give_back, (1, [2])) + call(weigh, (empty,)),
        "noted": frame_bytes(Kind.CALL, pack_note((1 << 48) + 1, (1 << 48) + 9, (0,)), noted),
        "create": call("create", (((0, 1, 5), (1, 6)), give_back, (1,), {}))
        + parcel(fetch_parcel(ReferenceId(0, 1, 5)))
        + told(Release(Transfer(ReferenceId(0, 1, 5), ForkId(1, 6)))),
        "invoke": call("invoke", ((0, 0, 0), "total", (), {}))
        + parcel(call_parcel(ReferenceId(0, 0, 0), "total", (Loan((0, 0, 0)),)))
        + parcel(
            call_parcel(
                ReferenceId(0, 0, 0), "total", (), Transfer(ReferenceId(0, 1, 7), ForkId(1, 8))
            )
        ),
        "reference": told(
            Register(Transfer(ReferenceId(0, 0, 0), ForkId(2, 1)), 1),
            Fence((2,)),
            Gone(ForkId(1, 1)),
            Unpin(ForkId(1, 1)),
            Accepted(ForkId(1, 1)),
            Fenced(2),
        ),
        "census": post("autograd.release", (1, 1, (1 << 48) + 5, ((1 << 48) + 5,), (2,))),
        "holder": post("autograd.holder", CONTEXT) + call("autograd.describe", (CONTEXT,)),
        "backward": call("autograd.backward", ((0, 0, 0), CONTEXT, False)),
        "begin": passing(Begin(options, NO_HISTORY)) + passing(Absent((1,))) + passing(Ack()),
        "gradient": passing(Gradient(options, History(PASS, (1,)), True, 1, [None])),
        "sequel": passing(Begin(followed, History(PASS, (1,))))
        + passing(Gradient(followed, NO_HISTORY, False, 1, [None])),
        "fail": passing(Begin(options, NO_HISTORY)) + passing(failure),
        "closing": call("closing", (0, 1, 1, 0)),
        "reply": frame_bytes(Kind.REPLY, b"", pack([1, {"a": 2}], None, Trust.DATA).meta),
    }


def seeds() -> dict[str, dict[str, bytes]]:
    return {
        "frames": _frames(),
        "codec_data": _codec(),
        "codec_code": _code(),
        "handshake": _handshake(),
        "session": {"order": bytes(range(64)), "cuts": bytes([0, 1, 3, 6, 2, 7, 4, 5] * 8)},
        "references": {"said": bytes(8 * k % 256 for k in range(80)) + bytes(range(40, 120))},
        "calls": {"mixed": bytes(k * 7 % 256 for k in range(120))},
        "worker": _worker(),
    }


def kept(target: str) -> list[bytes]:
    """What is committed for a target."""
    return [path.read_bytes() for path in sorted((PLACE / target).iterdir())]


if __name__ == "__main__":
    for target, inputs in seeds().items():
        (PLACE / target).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (PLACE / target / name.replace(" ", "-")).write_bytes(data)
