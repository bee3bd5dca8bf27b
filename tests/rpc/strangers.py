"""The stranger's battery: everything that someone without the key can try, while a job runs.

    python -m tests.rpc.strangers              all attacks, over Unix sockets, plain TCP and TLS
    python -m tests.rpc.strangers --rounds 5 --transport tls flood

Two workers call each other on one host. A third process attacks the one that is called. (A Unix
socket is in a directory that its user alone can enter; here the stranger is the same user.) For
each attack two things are looked at.

Refused: the worker says no more than its opening (42 bytes, a nonce) or TLS's own words; no link is
made, no worker is lost, nothing that the attacker sent is run, and nothing is written to its log.

Not slowed: the median time of a call is measured in windows, in turn with and without the attack;
each pair of windows gives a ratio, and the median ratio must not pass 1.1. An attack has gone on
for half a second when its window begins. Attackers keep a stated pace, because they share the
machine with the job: at full speed they would slow it by the processor time that they take
themselves. The flood comes faster than a worker lets visitors in (`reception.PER_SECOND`). Beside
the ratio stands what the attack costs the worker in processor time, which a noisy machine does not
change much.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import pickle
import secrets
import socket
import ssl
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from telegrad import rpc
from telegrad.rpc import meeting, rendezvous
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.wire.address import (
    Address,
    TcpAddress,
    UnixAddress,
    Unreachable,
    bound,
    connect,
    listen,
    parse_address,
)
from telegrad.wire.codec import pack
from telegrad.wire.frames import HEADER, Kind
from telegrad.wire.handshake import MAGIC, VERSION, ClientHandshake, HandshakeError, Hello
from telegrad.wire.keys import JobKey, tls_contexts
from tests.rpc import functions
from tests.rpc.data_functions import Bomb
from tests.rpc.fleet import Job, Nursery

OPENING = MAGIC + VERSION.to_bytes(2, "little")
OPENING_BYTES = 42
DRIPPING = 200
LIMIT = 1.1
WINDOW = 0.4
LEAD = 0.5
TRANSPORTS: dict[str, dict[str, Any]] = {
    "unix": {},
    "tcp": {"host": "127.0.0.1", "transports": ("tcp",)},
    # Loopback would do without; here it stands for a network.
    "tls": {"host": "127.0.0.1", "transports": ("tcp",)},
}


@dataclass(frozen=True)
class Target:
    """Where the attacked worker listens, and what the attacker has overheard."""

    address: Address
    recorded: bytes
    tls: bool
    patience: float = 5.0

    def visit(self) -> socket.socket:
        sock = connect(self.address, self.patience)
        sock.settimeout(self.patience)
        return sock


Strike = Callable[[Target], bytes]


def say(words: Callable[[], bytes]) -> Strike:
    """Send some words at once; all that the worker says before it hangs up."""

    def strike(target: Target) -> bytes:
        with target.visit() as sock:
            with contextlib.suppress(OSError):
                sock.sendall(words())
                sock.shutdown(socket.SHUT_WR)
            return _rest(sock)

    return strike


def _rest(sock: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while chunk := sock.recv(1 << 16):
            said += chunk
    return said


def nothing_but_noise() -> bytes:
    return secrets.token_bytes(secrets.randbelow(3000))


def proof_that_is_none() -> bytes:
    """An opening, and then a hello as it should be but for its proof."""
    body = b'{"worker": "a"}'
    return (
        OPENING
        + secrets.token_bytes(32)
        + struct.pack("<32sBH", secrets.token_bytes(32), 1, len(body))
        + body
    )


def frame_of_an_exabyte() -> bytes:
    frame = HEADER.pack(Kind.CALL, 0, 0, 1 << 31, 0, 1 << 31, 1 << 60, 1, 0, 1)
    return frame + OPENING + secrets.token_bytes(32) + struct.pack("<32sBH", bytes(32), 1, 65535)


def pickled_bomb() -> bytes:
    meta = pack((Bomb(), (), {})).meta
    frame = HEADER.pack(Kind.CALL, 0, 0, 0, 0, len(meta), len(meta), 1, 0, 1) + meta
    body = pickle.dumps(Bomb())
    head = struct.pack("<32sBH", secrets.token_bytes(32), 1, len(body))
    return OPENING + secrets.token_bytes(32) + head + body + frame


def replay(target: Target) -> bytes:
    return say(lambda: target.recorded)(target)


def with_the_key_of_another_job(target: Target) -> bytes:
    """All of the handshake, and TLS before it where the worker wants that."""
    key = JobKey(secrets.token_bytes(32))
    hello = Hello("a", 0, 1, "job", "b", "s", 0, "2", 1, "calls", 1)
    end = ClientHandshake(bytes(key), hello)
    said = b""
    with target.visit() as sock:
        try:
            channel: Any = sock
            if target.tls:
                channel = tls_contexts(key)[1].wrap_socket(sock)
            channel.sendall(end.opening)
            while not end.done:
                chunk = channel.recv(end.needed)
                said += chunk
                channel.sendall(end.receive(chunk) or b"")
        except (HandshakeError, ssl.SSLError, OSError):
            return said
    raise AssertionError("a worker answered to the key of another job")


def come_and_go(target: Target) -> bytes:
    # A Unix socket whose queue is full refuses at once, where TCP lets a visitor wait.
    with contextlib.suppress(Unreachable):
        target.visit().close()
    return b""


class Dripping:
    """Slow loris: many connections, each of which sends a byte now and then."""

    def __init__(self) -> None:
        self._open: list[tuple[socket.socket, Iterator[int]]] = []
        self._turn = itertools.count()

    def __call__(self, target: Target) -> bytes:
        if not self._open:
            self._open = [self._begin(target) for _ in range(DRIPPING)]
        number = next(self._turn) % DRIPPING
        sock, words = self._open[number]
        try:
            sock.sendall(bytes([next(words)]))
        except OSError:
            sock.close()
            self._open[number] = self._begin(target)
        return b""

    @staticmethod
    def _begin(target: Target) -> tuple[socket.socket, Iterator[int]]:
        return target.visit(), itertools.cycle(OPENING + bytes(20))


@dataclass(frozen=True)
class Attack:
    per_second: float
    begin: Callable[[], Strike]


ATTACKS: dict[str, Attack] = {
    "no key": Attack(50, lambda: say(lambda: OPENING + secrets.token_bytes(32))),
    "wrong key": Attack(50, lambda: say(proof_that_is_none)),
    "another job's key": Attack(20, lambda: with_the_key_of_another_job),
    "replayed handshake": Attack(50, lambda: replay),
    "oversized frames": Attack(50, lambda: say(frame_of_an_exabyte)),
    "pickle bomb": Attack(50, lambda: say(pickled_bomb)),
    "garbage": Attack(50, lambda: say(nothing_but_noise)),
    "slow loris": Attack(200, Dripping),
    "flood": Attack(400, lambda: come_and_go),
}


def attack(name: str, target: Target, seconds: float) -> tuple[int, int]:
    """In the attacker's process: how often it struck, and the most that it was told."""
    chosen = ATTACKS[name]
    strike = chosen.begin()
    told = strikes = 0
    started = time.monotonic()
    while (now := time.monotonic() - started) < seconds:
        due = strikes / chosen.per_second
        if due > now:
            time.sleep(due - now)
        told = max(told, len(strike(target)))
        strikes += 1
    return strikes, told


# The job.


def use_tls_on_loopback() -> None:
    rendezvous.is_loopback = meeting.is_loopback = lambda host: False


def listening_at() -> Address:
    [address] = _agent()._meeting.addresses
    return address


def _agent() -> Agent:
    agent = current_node().transport
    assert isinstance(agent, Agent)
    return agent


def state() -> dict[str, Any]:
    """What a stranger must not be able to change."""
    info = rpc.debug_info()
    return {"links": len(_agent()._incoming), "lost": info["lost workers"]}


def median_of_calls(seconds: float) -> float:
    times = []
    until = time.perf_counter() + seconds
    while (start := time.perf_counter()) < until:
        rpc.rpc_sync("b", functions.nothing)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def processor_time_of(seconds: float) -> float:
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def record_handshake() -> bytes:
    """In the caller's process: what its side of a conversation looks like on the wire."""
    members = current_node().members
    callee = members.member(1)
    [text] = callee.addresses
    address = parse_address(text)
    relay: Address = TcpAddress("127.0.0.1", 0)
    if isinstance(address, UnixAddress):
        relay = UnixAddress(f"{address.path}.relay")
    listener = listen(relay)
    said: list[bytes] = []
    carrying = threading.Thread(target=_carry, args=(listener, address, said), daemon=True)
    carrying.start()
    relay = bound(relay, listener)
    if isinstance(relay, TcpAddress) and isinstance(address, TcpAddress):
        relay = replace(relay, tls=address.tls)
    member = replace(callee, addresses=(str(relay),))
    visit = meeting.meet(_agent()._meeting, current_node().info, member, "x" * 32, 0, "probe")
    visit.stream.close()
    carrying.join(10)
    return b"".join(said)


def _carry(listener: socket.socket, address: Address, said: list[bytes]) -> None:
    client, _ = listener.accept()
    server = connect(address, None)

    def back() -> None:
        with contextlib.suppress(OSError):
            while chunk := server.recv(1 << 16):
                client.sendall(chunk)
            client.shutdown(socket.SHUT_WR)

    threading.Thread(target=back, daemon=True).start()
    with contextlib.suppress(OSError):
        while chunk := client.recv(1 << 16):
            said.append(chunk)
            server.sendall(chunk)
        server.shutdown(socket.SHUT_WR)


class Battery:
    """A running job, and a stranger beside it."""

    def __init__(self, nursery: Nursery, transport: str) -> None:
        tls = transport == "tls"
        self.job = Job(
            nursery,
            ("a", "b"),
            use_tls_on_loopback if tls else None,
            **TRANSPORTS[transport],
            key=secrets.token_bytes(32),
        )
        self.stranger = nursery.start()
        self.job["a"].do(rpc.rpc_sync, "b", functions.nothing)
        recorded = self.job["a"].do(record_handshake)
        self.target = Target(self.job["b"].do(listening_at), recorded, tls)
        self.before = self.job["b"].do(state)

    def check_refused(self, name: str, seconds: float) -> int:
        """Attack, and see that nothing came of it; how often the stranger struck."""
        strikes, told = self.stranger.do(attack, name, self.target, seconds)
        # TLS tells a stranger its certificate, which is the same for all, and an alert.
        assert told <= (2048 if self.target.tls else OPENING_BYTES), f"{name}: {told} bytes told"
        assert self.job["b"].do(state) == self.before, name
        assert self.job["a"].do(rpc.rpc_sync, "b", functions.who_am_i) == "b"
        assert self.job["b"].errors == "", self.job["b"].errors
        return int(strikes)

    def slowdown(self, name: str, rounds: int) -> float:
        """The median ratio of calls beside an attack to calls without one."""
        ratios = []
        for number in range(rounds):
            pair = {}
            for attacked in (False, True) if number % 2 else (True, False):
                if attacked:
                    seconds = LEAD + WINDOW + 0.1
                    attacking = self.stranger.begin(attack, name, self.target, seconds)
                    time.sleep(LEAD)
                pair[attacked] = self.job["a"].do(median_of_calls, WINDOW)
                if attacked:
                    attacking.result(60)
            ratios.append(pair[True] / pair[False])
        return statistics.median(ratios)

    def cost(self, name: str, seconds: float = 2.0) -> float:
        """Processor time that an attack takes from the worker, as a share of one core."""
        idle = self.job["b"].do(processor_time_of, seconds)
        attacking = self.stranger.begin(attack, name, self.target, seconds)
        used = self.job["b"].do(processor_time_of, seconds)
        attacking.result(60)
        return float(used - idle) / seconds

    def close(self) -> None:
        self.stranger.kill()
        self.job.abandon()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rpc.strangers", description=__doc__)
    parser.add_argument("attacks", nargs="*", help=f"some of {', '.join(ATTACKS)}")
    parser.add_argument("--rounds", type=int, default=20, help="pairs of windows per attack")
    parser.add_argument("--transport", choices=list(TRANSPORTS), action="append")
    options = parser.parse_args()
    slowed = []
    for transport in options.transport or TRANSPORTS:
        nursery = Nursery()
        battery = Battery(nursery, transport)
        for name in options.attacks or ATTACKS:
            strikes = battery.check_refused(name, 2.0)
            ratio, cost = battery.slowdown(name, options.rounds), battery.cost(name)
            pace = ATTACKS[name].per_second
            print(
                f"{transport} {name:20} refused {strikes:4} times; a call takes {ratio:.2f} times "
                f"as long beside {pace:g} attempts per second, which take {cost:.1%} of a core",
                flush=True,
            )
            if ratio > LIMIT:
                slowed.append(f"{name} over {transport}")
        battery.close()
        nursery.close()
    if slowed:
        print(f"SLOWED by more than a tenth: {', '.join(slowed)}")
    return bool(slowed)


if __name__ == "__main__":
    # By its name: the processes are sent functions of this module, and know it by no other.
    from tests.rpc import strangers

    sys.exit(strangers.main())
