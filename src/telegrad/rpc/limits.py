"""How much one other worker may ask of this one.

Workers of one job that trust each other with code can do without: the limits are there to tell a
damaged stream from a large message. Between workers that take only data from each other they are
what keeps a hostile one from filling the memory of the rest, so they are much tighter.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """Calls of one worker that run or wait here at a time. Those beyond are refused one by one."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"Limits({name}={value!r}): give a number of at least 1")
        if self.nesting > 200:
            raise ValueError(f"Limits(nesting={self.nesting}): Python's stack ends at about 200")

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
)


def default_limits(trusted: Trust) -> Limits:
    return _OF_DATA if trusted is Trust.DATA else _OF_CODE
