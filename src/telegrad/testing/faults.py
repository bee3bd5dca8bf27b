"""What goes wrong in a simulated run, in words.

    Faults(drop=0.05, duplicate=0.02).kill("b", at=17)
    Faults(delay=0.5).cut("a", "b", after=1.0, lasting=2.0)
    Faults().kill("c", during="autograd")

Packets are lost, doubled and reordered below the session of a link, as on a bad network: the calls
above must not notice. Kills and long cuts they do notice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Moment:
    """When a fault strikes: at a message of the run, counted from 1; at the `nth` message whose
    label contains `during`; or after so many seconds of virtual time."""

    at: int | None = None
    during: str | None = None
    nth: int | None = None
    after: float | None = None

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.at, self.during, self.after)) != 1:
            raise ValueError("Say when a fault strikes: one of at=, during= or after=.")
        if self.nth is not None and self.during is None:
            raise ValueError("nth= counts the messages of during=, which is missing.")


@dataclass(frozen=True, slots=True)
class Kill:
    worker: str
    moment: Moment


@dataclass(frozen=True, slots=True)
class Cut:
    one: str
    other: str
    moment: Moment
    lasting: float | None


@dataclass(frozen=True, slots=True)
class Faults:
    """Chances per packet, and what happens to workers and links.

    drop        chance that a packet is lost; it is sent again after `resend` seconds
    duplicate   chance that a packet arrives twice
    reorder     chance that a packet is overtaken by those behind it on its own link
    delay       a packet takes up to so many (virtual) seconds
    detect      a killed worker is noticed by each other one within so many seconds
    liveness    a link that is cut for longer than this counts as a lost worker on both ends
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    resend: float = 0.1
    detect: float = 1.0
    liveness: float = 5.0
    kills: tuple[Kill, ...] = field(default=())
    cuts: tuple[Cut, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            chance = getattr(self, name)
            if not 0.0 <= chance < 1.0:
                raise ValueError(f"{name} is a chance and must be in [0, 1), but is {chance}.")
        for name in ("delay", "resend", "detect", "liveness"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a time and must not be negative.")

    def kill(
        self,
        worker: str,
        *,
        at: int | None = None,
        during: str | None = None,
        nth: int | None = None,
        after: float | None = None,
    ) -> Faults:
        """The worker dies without a word. What it sent just before may or may not arrive.

        Without `nth` the seed chooses one of the first eight messages of `during`.
        """
        moment = Moment(at, _topic(during), nth, after)
        return replace(self, kills=(*self.kills, Kill(worker, moment)))

    def cut(
        self,
        one: str,
        other: str,
        *,
        lasting: float | None = None,
        at: int | None = None,
        during: str | None = None,
        nth: int | None = None,
        after: float | None = None,
    ) -> Faults:
        """The connections between two workers break, and mend after `lasting` seconds, if ever."""
        moment = Moment(at, _topic(during), nth, after)
        return replace(self, cuts=(*self.cuts, Cut(one, other, moment, lasting)))


def _topic(during: str | None) -> str | None:
    return "autograd.pass" if during == "backward" else during
