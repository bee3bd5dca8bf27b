"""How much one other worker may ask of this one.

Workers of one job that trust each other with code can do without: the limits are there to tell a
damaged stream from a large message. Between workers that take only data from each other they are
what keeps a hostile one from filling the memory of the rest, so they are much tighter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from telegrad.rpc.errors import Refused
from telegrad.wire import frames, trust
from telegrad.wire.trust import Trust


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what arrives from each other worker. What passes one is refused."""

    message_bytes: int = 64 << 30
    """Of one message, tensors included; a longer one ends the connection. Also of the elements of
    one tensor, those of expanded dimensions counted each time."""
    metadata_bytes: int = 1 << 30
    """Of one message without its tensors. Python objects take up to 110 times as much memory."""
    nesting: int = 200
    """Containers inside containers."""
    items: int = 1 << 26
    """Elements of one container."""
    tensors: int = 1 << 20
    """Tensors, and other large buffers, in one message."""
    calls_in_flight: int = 1 << 14
    """Calls of one worker that run or wait here at a time, coroutines among them. Those beyond are
    refused one by one. A caller that has the same limits waits before it comes to that."""
    bytes_in_flight: int = 1 << 46
    """Bytes that these calls brought; one call alone may bring more. By default they are weighed
    only between workers that take data only: others bound what they send themselves (`cargo`)."""
    references: int = 1 << 26
    """What is kept here of references for one worker: those that it holds to values of this one,
    the values that it has made here among them, and those that it gave to this one."""
    contexts: int = 1 << 26
    """Contexts of autograd that one worker brought here and that are not released."""
    records: int = 1 << 26
    """Messages with tensors that need gradient, to and from one worker, that contexts keep here."""
    passes: int = 1 << 26
    """Backward passes that one worker brought here and that are not over."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"Limits({name}={value!r}): give a number of at least 1")
        if self.nesting > 200:
            raise ValueError(f"Limits(nesting={self.nesting}): Python's stack ends at about 200")

    @property
    def calls_an_honest_caller_makes(self) -> int:
        """At a time; a few less than it may, as one that was answered may still count there."""
        return self.calls_in_flight - self.calls_in_flight // 8

    @property
    def weighs_calls(self) -> bool:
        return self.bytes_in_flight < _OF_CODE.bytes_in_flight

    def of_frames(self) -> frames.FrameLimits:
        return frames.FrameLimits(self.message_bytes, self.metadata_bytes, self.tensors)

    def of_codec(self) -> trust.Limits:
        return trust.Limits(
            self.metadata_bytes,
            self.nesting,
            self.items,
            self.tensors,
            # An expanded dimension takes no bytes in a message, and any number when it is used.
            tensor_bytes=self.message_bytes,
        )


_OF_CODE = Limits()
_OF_DATA = Limits(
    message_bytes=1 << 30,
    metadata_bytes=16 << 20,
    nesting=64,
    items=1 << 20,
    tensors=1 << 12,
    calls_in_flight=256,
    bytes_in_flight=1 << 30,
    references=1 << 16,
    contexts=1 << 10,
    records=1 << 16,
    passes=1 << 10,
)


def default_limits(trusted: Trust) -> Limits:
    return _OF_DATA if trusted is Trust.DATA else _OF_CODE


class _Lists(dict[int, list[None]]):
    """For each worker as many as are kept for it.

    Nearly every message is counted, on any thread: to append to a list, or to cut it, is one step
    and needs no lock. Two that come for the last place at once may both be refused.
    """

    def __missing__(self, worker: int) -> list[None]:
        return self.setdefault(worker, [])


class Ledger:
    """How many things of one kind are kept here for each other worker, and that not more are."""

    def __init__(self, kind: str, most: int, me: str, name: Callable[[int], str]) -> None:
        """`kind` is the limit's name; `me` and `name` are for the words of an error."""
        self._kind = kind
        self._most = most
        self._me = me
        self._name = name
        self._kept = _Lists()

    def charge(self, worker: int) -> None:
        """One more is kept for that worker; raises if it is one too many."""
        kept = self._kept[worker]
        kept.append(None)
        if len(kept) > self._most:
            kept.pop()
            self._refuse(worker)

    def _refuse(self, worker: int) -> NoReturn:
        raise Refused(
            f"worker {self._me!r} keeps {self._most} {self._kind} for worker "
            f"{self._name(worker)!r} and takes no more: let go of some of them, or raise "
            f"rpc.Limits.{self._kind} there"
        )

    def credit(self, worker: int, count: int = 1) -> None:
        """So many that were kept for that worker are gone."""
        if count:
            del self._kept[worker][-count:]

    def count(self, worker: int) -> int:
        return len(self._kept[worker])


def unlimited() -> Ledger:
    return Ledger("things", 1 << 62, "", str)
