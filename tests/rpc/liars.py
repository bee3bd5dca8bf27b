"""The lying member's battery: a worker that proved the key, and then keeps no rule.

    python -m tests.rpc.liars                       60 liars, one after the other
    python -m tests.rpc.liars --liars 5 --seed 7 --transport unix

Two honest workers of a job that takes data only work with each other all the time: calls,
references, backward passes. Liars join them, one after the other, by right. A liar does what an
honest worker does (it calls, keeps references, differentiates, answers), but what leaves it is not
what its libraries wrote: metadata, notes of autograd and buffers are bent, cut, exchanged and sent
again, calls get ids that are not theirs, answers go to questions of others; and some frames are
made by hand, with numbers that no frame has. The honest workers ask things of it in turn.

What is looked at: every honest operation between the honest ends right and in time; every operation
that needs the liar ends in its time, however it ends; nothing is unpickled or run that was not
exported; no thread and no process dies; and when the liars are gone nothing of them is left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from telegrad import autograd, rpc
from telegrad.rpc.current import current_node
from telegrad.rpc.values import PATIENCE_WITH_PROMISE
from telegrad.wire.frames import GROUP, HEADER, INLINE, Kind
from telegrad.wire.link import Link
from telegrad.wire.parcel import Parcel
from tests.rpc import data_functions as functions
from tests.rpc.fleet import Job, Nursery, join
from tests.rpc.test_data_only import forbid_pickle, hostile_posts

TIMEOUT = 1.0
SLOWEST = 8.0
"""Seconds that an operation may take on a machine that is busy, whatever its own timeout."""
MOST_MEMORY = 512 << 10
"""Kilobytes by which the honest may grow at their highest."""
MORE_DESCRIPTORS = 1
"""A link between the honest may have got a lane meanwhile; those of liars are closed."""
EXTREMES = [0, 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
TRANSPORTS: dict[str, dict[str, Any]] = {
    "unix": {},
    "tcp": {"host": "127.0.0.1", "transports": ("tcp",)},
}

Parts = dict[str, Any]


# What a liar does to a frame that is about to leave.


def bend(draw: random.Random, data: bytes) -> bytes:
    """Some bytes of it changed, exchanged for a number that is large, cut off or added."""
    bent = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(bent) + 1)
        match draw.randrange(5):
            case 0 if bent:
                bent[place % len(bent)] = draw.randrange(256)
            case 1:
                bent[place : place + 8] = struct.pack("<Q", draw.choice(EXTREMES))
            case 2:
                del bent[place:]
            case 3:
                del bent[place : place + draw.randrange(1, 9)]
            case _:
                bent[place:place] = draw.randbytes(draw.randrange(1, 9))
    return bytes(bent)


def bend_meta(draw: random.Random, frame: Parts, said: list[Parts]) -> None:
    frame["meta"] = bend(draw, frame["meta"])


def bend_note(draw: random.Random, frame: Parts, said: list[Parts]) -> None:
    frame["note"] = bend(draw, frame["note"])


def exchange_note(draw: random.Random, frame: Parts, said: list[Parts]) -> None:
    frame["note"] = draw.choice(said)["note"]


def exchange_meta(draw: random.Random, frame: Parts, said: list[Parts]) -> None:
    frame["meta"] = draw.choice(said)["meta"]


def exchange_id(draw: random.Random, frame: Parts, said: list[Parts]) -> None:
    near = max(0, frame["call_id"] + draw.randrange(-3, 4))
    frame["call_id"] = draw.choice((near, near, near, draw.choice(EXTREMES)))


def exchange_kind(draw: random.Random, frame: Parts, said: list[Parts]) -> None:
    frame["kind"] = draw.choice([Kind.CALL, Kind.REPLY, Kind.ERROR, Kind.POST, Kind.HOUSEKEEPING])


def exchange_buffers(draw: random.Random, frame: Parts, said: list[Parts]) -> None:
    buffers = list(frame["buffers"])
    match draw.randrange(4):
        case 0 if buffers:
            buffers.pop(draw.randrange(len(buffers)))
        case 1 if buffers:
            place = draw.randrange(len(buffers))
            buffers[place] = buffers[place][: draw.randrange(buffers[place].nbytes + 1)]
        case 2:
            buffers.append(memoryview(draw.randbytes(draw.randrange(1, 100))))
        case _:
            buffers = list(draw.choice(said)["buffers"])
    frame["buffers"] = buffers


LIES = [
    bend_meta, bend_meta, bend_meta, bend_note, exchange_note, exchange_meta, exchange_id,
    exchange_kind, exchange_buffers,
]  # fmt: skip


class Liar:
    """Stands between the libraries and the link."""

    def __init__(self, seed: int, share: float, by_hand: float) -> None:
        self._draw = random.Random(seed)
        self._share = share
        self._by_hand = by_hand
        self._said: list[Parts] = []
        self._send = Link.send

    def install(self) -> None:
        liar = self

        def send(link: Link, *args: Any, **options: Any) -> None:
            liar.say(link, *args, **options)

        Link.send = send  # type: ignore[method-assign]

    def say(
        self,
        link: Link,
        kind: int,
        call_id: int,
        meta: bytes = b"",
        buffers: Any = (),
        note: bytes = b"",
        tensors: Any = (),
        later: bool = False,
        deadline: float = float("inf"),
    ) -> None:
        draw = self._draw
        frame = {"kind": kind, "call_id": call_id, "meta": meta, "buffers": buffers, "note": note}
        if kind != Kind.LEAVING:
            self._said.append(dict(frame, buffers=[memoryview(bytes(each)) for each in buffers]))
            del self._said[:-200]
        if draw.random() < self._by_hand:
            link.stream.try_send([self._made_by_hand(link)])
            return
        if draw.random() < self._share and self._said:
            draw.choice(LIES)(draw, frame, self._said)
            if draw.random() < 0.2:
                self._send(link, **draw.choice(self._said))
        self._send(link, **frame, deadline=deadline)

    def _made_by_hand(self, link: Link) -> bytes:
        """A frame whose numbers need not agree; it may end the session, or be taken."""
        draw = self._draw
        seq, ack = link.session.stamp()
        link.session.keep(seq, b"", 0)
        rows = draw.choice((0, 0, 1, 3))
        freed = draw.choice((0, 0, 0, 2))
        places = [INLINE, INLINE, GROUP, GROUP + 5, 0, 4096, *EXTREMES]
        table = b"".join(
            struct.pack("<2Q", draw.choice((0, 8, 1 << 20, *EXTREMES)), draw.choice(places))
            for _ in range(rows)
        ) + struct.pack(f"<{freed}Q", *draw.choices(EXTREMES, k=freed))
        meta, note = draw.choice(self._said)["meta"], draw.choice(self._said)["note"]
        body = table + note + meta
        kind = draw.choice([*Kind, 0, 77])
        numbers = [len(note), rows, freed, len(meta), len(body), seq, ack, draw.randrange(1 << 20)]
        if draw.random() < 0.5:
            place = draw.randrange(len(numbers))
            numbers[place] = draw.choice(EXTREMES) % (2**32 if place < 4 else 2**64)
        return HEADER.pack(kind, draw.randrange(2), *numbers) + body


# What workers do with each other.


def add_up(to: str) -> None:
    counter = rpc.rpc_sync(to, functions.give_reference, args=(5,))
    assert counter.rpc_sync().add(3) == 8
    made = rpc.remote(to, functions.Counter, args=(1,))
    assert made.remote().add(1).to_here(current_node().timeout) == 2
    assert rpc.rpc_sync(to, functions.count_of, args=(counter,)) == 8


def scale_up(to: str) -> None:
    sizes = (3, 3, 3, 5000, 100_000)
    x = torch.arange(float(random.choice(sizes)))
    assert torch.equal(rpc.rpc_sync(to, functions.scale, args=(x,)), 2 * x)


def many_at_once(to: str) -> None:
    futures = [rpc.rpc_async(to, functions.scale, args=(n,)) for n in range(30)]
    assert [future.wait() for future in futures] == [2 * n for n in range(30)]


def differentiate(to: str) -> None:
    x = torch.arange(3.0, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, functions.weigh, args=(x,))
        autograd.backward(context, [loss], retain_graph=True, timeout=current_node().timeout)
        autograd.backward(context, [loss], timeout=current_node().timeout)
        assert torch.equal(autograd.get_gradients(context)[x], torch.full((3,), 2.0))
        there = rpc.rpc_sync(to, functions.weight_gradient, args=(context,))
        assert torch.equal(there, 2 * torch.arange(3.0))


def differentiate_twice(to: str) -> None:
    x = torch.arange(3.0, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, functions.weigh, args=(x * x,))
        autograd.backward(context, [loss], create_graph=True, timeout=current_node().timeout)
        loss = autograd.get_gradients(context)[x].sum()
        autograd.backward(context, [loss], timeout=current_node().timeout)


def post_what_is_hostile(to: str) -> None:
    node = current_node()
    for said in hostile_posts():
        topic, payload = (said.topic, said) if isinstance(said, Parcel) else said
        with contextlib.suppress(Exception):
            node.post(node.members.find(to).id, topic, payload)


WORK: list[Callable[[str], None]] = [
    add_up, scale_up, many_at_once, differentiate, differentiate_twice,
]  # fmt: skip


def deal_with(others: list[str], seconds: float, seed: int) -> tuple[int, float]:
    """Work with those who may lie: each piece ends, however. How many there were, the slowest."""
    current_node().timeout = TIMEOUT
    draw = random.Random(seed)
    until = time.monotonic() + seconds
    done, slowest = 0, 0.0
    while (started := time.monotonic()) < until:
        with contextlib.suppress(Exception):
            draw.choice(WORK)(draw.choice(others))
        slowest = max(slowest, time.monotonic() - started)
        done += 1
    gc.collect()
    return done, slowest


def lie_to(others: list[str], seconds: float, seed: int, by_hand: float) -> None:
    for other in others:
        rpc.rpc_sync(other, functions.scale, args=(1,))
    Liar(seed, 0.4, by_hand).install()
    for other in others:
        post_what_is_hostile(other)
    deal_with(others, seconds, seed)


def work_honestly(with_: str, seconds: float) -> tuple[int, float]:
    """Every piece of work is done right."""
    current_node().timeout = SLOWEST
    until = time.monotonic() + seconds
    done, slowest = 0, 0.0
    while (started := time.monotonic()) < until:
        for work in WORK:
            work(with_)
            slowest = max(slowest, time.monotonic() - started)
            started = time.monotonic()
            done += 1
    return done, slowest


def state(honest: tuple[str, ...]) -> dict[str, Any]:
    """What liars must not leave behind, when they are gone."""
    gc.collect()
    node = current_node()
    info = rpc.debug_info()
    return {
        "references": {what: count for what, count in info["references"].items() if count},
        "contexts": node.services["autograd"].counts()["num_autograd_contexts"],
        "calls": info["calls in flight"],
        "lost honest": [name for name in info["lost workers"] if name in honest],
        "ran": functions.what_ran(),
    }


def descriptors() -> list[str]:
    """What each open file of this process is."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return links


def peak_memory() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


class Battery:
    """Two honest workers, and those who come."""

    honest = ("a", "c")

    def __init__(self, nursery: Nursery, transport: str) -> None:
        self._nursery = nursery
        self._options = {"trust": "data", "rpc_timeout": TIMEOUT, **TRANSPORTS[transport]}
        self.job = Job(nursery, (), **self._options)
        for name in self.honest:
            self.job.processes[name] = nursery.start()
            self._join(name)
        self.job["a"].do(work_honestly, "c", 0.2)
        self.job["c"].do(work_honestly, "a", 0.2)
        for name in self.honest:
            self.job[name].do(forbid_pickle)
        self.before = {name: self._settled(name) for name in self.honest}
        self.descriptors = {name: self.job[name].do(descriptors) for name in self.honest}
        self.memory = {name: self.job[name].do(peak_memory) for name in self.honest}
        self.done = 0
        self.slowest = 0.0

    def _join(self, name: str) -> None:
        process = self.job[name]
        process.do(join, name, None, None, self.job.store.port, **self._options)
        process.do(functions.what_ran)  # imports the module

    def _settled(self, name: str) -> dict[str, Any]:
        """What a worker holds when the others have let go of its contexts and references."""
        until = time.monotonic() + 10
        while (now := self.job[name].do(state, self.honest))["contexts"] or now["references"]:
            assert time.monotonic() < until, f"{name} keeps {now} of honest work"
            time.sleep(0.01)
        return now

    def withstand(self, seed: int, seconds: float) -> None:
        """One liar more, and what must hold all the same."""
        name = f"liar{seed}"
        self.job.processes[name] = liar = self._nursery.start()
        self._join(name)
        by_hand = (0.0, 0.0, 0.02)[seed % 3]
        lying = liar.begin(lie_to, list(self.honest), seconds, seed, by_hand)
        dealing = self.job["a"].begin(deal_with, [name], seconds, seed)
        done, slowest = self.job["c"].do(work_honestly, "a", seconds)
        dealt, slowest_deal = dealing.result(seconds + 60)
        assert slowest < SLOWEST, f"honest work took {slowest:.1f} s"
        # A piece of work with the liar is several calls and passes, each of which may run out.
        assert slowest_deal < 10 * SLOWEST, f"work with a liar took {slowest_deal:.1f} s"
        liar.kill()
        with contextlib.suppress(ConnectionError):
            lying.result(10)
        del self.job.processes[name]
        self.done += done + dealt
        self.slowest = max(self.slowest, slowest)

    def check(self) -> None:
        """Nothing is left of the liars."""
        for name in self.honest:
            process = self.job[name]
            # A handler may still wait for a value that a liar said another had promised.
            until = time.monotonic() + PATIENCE_WITH_PROMISE + 20
            most = len(self.descriptors[name]) + MORE_DESCRIPTORS
            while True:
                now, files = process.do(state, self.honest), process.do(descriptors)
                if now == self.before[name] and len(files) <= most:
                    break
                assert time.monotonic() < until, (
                    f"{name}: {now}, before: {self.before[name]}; open files beyond those before: "
                    f"{sorted(set(files) - set(self.descriptors[name]))}"
                )
                time.sleep(0.1)
            grown = process.do(peak_memory) - self.memory[name]
            assert grown < MOST_MEMORY, f"{name} grew by {grown >> 10} MB"
            assert "Exception in thread" not in process.errors, process.errors
        self.job["c"].do(work_honestly, "a", 0.2)
        self.job["a"].do(work_honestly, "c", 0.2)

    def close(self) -> None:
        self.job.abandon()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rpc.liars", description=__doc__)
    parser.add_argument("--liars", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each of them")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 20))
    parser.add_argument("--transport", choices=list(TRANSPORTS), action="append")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    nursery = Nursery()
    for transport in options.transport or TRANSPORTS:
        battery = Battery(nursery, transport)
        for number in range(options.liars):
            battery.withstand(options.seed + number, options.seconds)
        battery.check()
        battery.close()
        print(
            f"{transport}: {options.liars} lying members; {battery.done} pieces of work beside "
            f"them, all right between the honest, the slowest {battery.slowest:.2f} s; nothing left"
        )
    nursery.close()
    return 0


if __name__ == "__main__":
    # By its name: the processes are sent functions of this module, and know it by no other.
    from tests.rpc import liars

    sys.exit(liars.main())
