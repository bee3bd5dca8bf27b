"""The network between simulated workers: packets that are lost, doubled, late and out of order.

Between two workers there are two links as in production, one for the calls (and posts) of each; the
replies come back on the link of their calls. Both ends of a link run the session core of
production, so that above it every frame takes effect once and in order, whatever happens to the
packets. What TCP does in production is done here: a packet that came too early is held until those
before it are there, one that was lost is sent again after a while, and a connection that broke is
resumed.

The frames that pass are the codec's bytes, copied as they leave: two workers never share memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from telegrad.rpc.worker import WorkerInfo
from telegrad.testing.faults import Faults
from telegrad.testing.scheduler import Activity, Scheduler
from telegrad.wire.codec import Packed
from telegrad.wire.frames import Frame, Kind
from telegrad.wire.session import Session

ACKNOWLEDGE_AFTER = 8


@dataclass(frozen=True, slots=True)
class Packet:
    """A frame on its way, or (number 0) an acknowledgement alone."""

    number: int
    acknowledges: int
    kind: Kind | None
    call_id: int
    note: bytes
    meta: bytes
    buffers: tuple[bytes, ...]
    label: str

    def frame(self) -> Frame:
        """The frame as its receiver reads it: in memory of its own."""
        assert self.kind is not None
        buffers = [bytearray(buffer) for buffer in self.buffers]
        return Frame(self.kind, self.call_id, self.note, self.meta, buffers)  # type: ignore[arg-type]


class Port:
    """What an end of a link needs to know of its worker."""

    __slots__ = ("accepts_from", "dead", "info", "received")

    def __init__(
        self,
        info: WorkerInfo,
        received: Callable[[End, Frame, str], None],
        accepts_from: Callable[[int], bool],
    ) -> None:
        self.info = info
        self.received = received
        self.accepts_from = accepts_from
        self.dead = False


class Network:
    """All links of a run."""

    def __init__(
        self, scheduler: Scheduler, faults: Faults, sent: Callable[[str, str], None]
    ) -> None:
        self.scheduler = scheduler
        self.faults = faults
        self.sent = sent
        self.ports: dict[int, Port] = {}
        self._links: dict[tuple[int, int], Link] = {}

    def link(self, caller: int, callee: int) -> Link:
        link = self._links.get((caller, callee))
        if link is None:
            link = self._links[caller, callee] = Link(self, self.ports[caller], self.ports[callee])
        return link

    def between(self, one: int, other: int) -> list[Link]:
        return [self.link(one, other), self.link(other, one)]

    def lose_what_left(self, worker: int) -> None:
        """A worker died: of what it sent, a prefix per link may still arrive."""
        for link in self._links.values():
            for end in (link.caller_end, link.callee_end):
                if end.port.info.id == worker:
                    del end.under_way[self.scheduler.random.randint(0, len(end.under_way)) :]


class Link:
    """The calls of one worker to another, and their replies."""

    def __init__(self, network: Network, caller: Port, callee: Port) -> None:
        self.caller_end = End(network, caller, callee)
        self.callee_end = End(network, callee, caller)
        self.caller_end.peer = self.callee_end
        self.callee_end.peer = self.caller_end

    def cut(self) -> None:
        for end in (self.caller_end, self.callee_end):
            end.cut = True
            end.under_way.clear()

    def mend(self) -> None:
        """A new connection: each end tells what it has seen, and sends again what comes after."""
        ends = (self.caller_end, self.callee_end)
        seen = [end.session.seen for end in ends]
        for end, peer_has_seen in zip(ends, reversed(seen), strict=True):
            end.cut = False
            end.early.clear()
            end.session.resume(peer_has_seen)
        for end in ends:
            end.send_again()


class End:
    """One end of a link, and what is under way from it. A source of the scheduler."""

    peer: End

    def __init__(self, network: Network, port: Port, to: Port) -> None:
        self.port = port
        self.session: Session[Packet] = Session()
        self.under_way: list[Packet] = []
        self.early: dict[int, Packet] = {}
        self.cut = False
        self.requests: deque[tuple[Frame, str]] = deque()
        self.leader: Activity | None = None
        self.weight = network.scheduler.draw_weight()
        self._network = network
        self._scheduler = network.scheduler
        self._faulty = port is not to
        self._to = to
        self._in_ready = False
        self._resending = False

    # Leaving.

    def send(self, kind: Kind, call_id: int, note: bytes, packed: Packed, label: str) -> None:
        number, acknowledges = self.session.stamp()
        buffers = tuple(bytes(buffer) for buffer in packed.buffers)
        packet = Packet(
            number, acknowledges, kind, call_id, note, bytes(packed.meta), buffers, label
        )
        self.session.keep(number, packet, len(packet.meta))
        self._scheduler.record("sends", self.port.info.name, f"{label} -> {self._to.info.name}")
        self._transmit(packet)
        self._network.sent(self.port.info.name, label)

    def _transmit(self, packet: Packet) -> None:
        if self.cut:
            return
        if not self._faulty:
            self._put(packet)
            return
        faults, random = self._network.faults, self._scheduler.random
        if faults.drop and random.random() < faults.drop:
            self._scheduler.record("loses", self.port.info.name, packet.label)
            self._resend_later()
            return
        self._put_after(faults.delay, packet)
        if faults.duplicate and random.random() < faults.duplicate:
            self._put_after(faults.delay, packet)

    def _put_after(self, delay: float, packet: Packet) -> None:
        if not delay:
            self._put(packet)
            return
        arrival = self._scheduler.now + self._scheduler.random.uniform(0.0, delay)
        self._scheduler.at(arrival, lambda: self._put(packet), lambda: not self.port.dead)

    def _put(self, packet: Packet) -> None:
        self.under_way.append(packet)
        if not self._in_ready:
            self._in_ready = True
            self._scheduler.add(self)

    def _resend_later(self) -> None:
        if not self._resending:
            self._resending = True
            at = self._scheduler.now + self._network.faults.resend
            self._scheduler.at(at, self._resend, lambda: not self.port.dead)

    def _resend(self) -> None:
        self._resending = False
        self.send_again()

    def send_again(self) -> None:
        for packet in list(self.session.unacknowledged()):
            self._transmit(packet)

    # Arriving.

    def fire(self) -> bool:
        """Let one packet from here arrive at the other end."""
        if self.under_way:
            self.peer.arrive(self.under_way.pop(self._which()))
        self._in_ready = bool(self.under_way)
        return self._in_ready

    def _which(self) -> int:
        chance, random = self._network.faults.reorder, self._scheduler.random
        if not (chance and self._faulty) or random.random() >= chance:
            return 0
        return int(random.random() * len(self.under_way))

    def arrive(self, packet: Packet) -> None:
        if self.port.dead or not self.port.accepts_from(self._to.info.id):
            return
        session = self.session
        session.acknowledged(packet.acknowledges)
        if not packet.number:
            return
        if packet.number > session.seen + 1:
            self.early[packet.number] = packet
            return
        if not session.accept(packet.number, len(packet.meta)):
            self._acknowledge()
            return
        self._receive(packet)
        while (following := self.early.pop(session.seen + 1, None)) is not None:
            session.accept(following.number, len(following.meta))
            self._receive(following)
        if session.owes_ack()[0] > ACKNOWLEDGE_AFTER:
            self._acknowledge()

    def _receive(self, packet: Packet) -> None:
        sender = self._to.info.name
        self._scheduler.record("receives", self.port.info.name, f"{packet.label} <- {sender}")
        self.port.received(self, packet.frame(), packet.label)

    def _acknowledge(self) -> None:
        number = self.session.acknowledge()
        self._transmit(Packet(0, number, None, 0, b"", b"", (), f"acknowledgement {number}"))

    @property
    def other(self) -> int:
        """The worker at the other end."""
        return self._to.info.id
