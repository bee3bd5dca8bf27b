"""Who is in the job: names, ids, incarnations and addresses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from telegrad.rpc.errors import TelegradError, UnknownWorker
from telegrad.rpc.vitals import Process
from telegrad.rpc.worker import WorkerInfo

NAMED_IN_ERRORS = 64


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the others can reach it.

    The incarnation is a random number made when a process joins: a worker that was restarted under
    its old name is another incarnation, and what the old one still sends is refused. `pulse` is
    where its companion answers ("host port", see pulse.py), empty if it has none.
    """

    info: WorkerInfo
    incarnation: int
    addresses: tuple[str, ...] = ()
    host: str = ""
    process: Process | None = None
    pulse: str = ""


class Members:
    """The workers that this one knows of.

    In a job without a world size, workers come later: `look_up` asks the rendezvous for one that is
    not known yet, by name or id. In a supervised job (`ranks` says how many ranks it has) a lost
    worker may come back: as another incarnation with the old name and rank, but with an id of its
    own, because ids are what references and messages know a worker by.

    A job of fixed `size` has the ids from 0 on. In a large one no worker knows all others, for n
    lists of n members would be the first thing to grow with the square of n: those that are not
    known are looked up when somebody asks for them.
    """

    def __init__(
        self,
        members: list[Member],
        look_up: Callable[[str | int], Member | None] | None = None,
        ranks: int | None = None,
        size: int | None = None,
    ) -> None:
        self._by_name: dict[str, WorkerInfo] = {}
        self._by_id: dict[int, Member] = {}
        self._lost: set[int] = set()
        self._look_up = look_up
        self._ranks = ranks
        self._size = size
        self.on_replaced: Callable[[], object] | None = None
        """Called when another worker has come under a name."""
        for member in members:
            self.add(member)

    def add(self, member: Member) -> None:
        info = member.info
        known = self._by_name.get(info.name)
        if known is None or known.id in self._lost or known.id < info.id:
            self._by_name[info.name] = info
        self._by_id[info.id] = member
        if known is not None and known.id != info.id and self.on_replaced is not None:
            self.on_replaced()

    def seen_by_another(self) -> Members:
        """The same workers, for another worker of this process: who is lost is its own matter."""
        another = Members([], size=self._size)
        another._by_name, another._by_id = self._by_name, self._by_id
        return another

    def predecessors(self, info: WorkerInfo) -> list[int]:
        """Workers that had this one's name before it, and are not known to be lost."""
        if self._size is not None:
            return []
        return [
            worker
            for worker, member in list(self._by_id.items())
            if member.info.name == info.name and worker < info.id and worker not in self._lost
        ]

    @property
    def may_return(self) -> bool:
        """Whether another worker may come under the name of a lost one."""
        return self._look_up is not None and self._size is None

    @property
    def knows_all(self) -> bool:
        """Whether there is nobody in the job that this worker would have to look up."""
        return self._size is None or len(self._by_id) >= self._size

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker that a caller means by a name, an id, or a `WorkerInfo`."""
        if type(to) is str:
            info = self._by_name.get(to)
            if info is None:
                return self._search(to)
            return info if info.id not in self._lost else self._successor(info)
        if isinstance(to, WorkerInfo):
            member = self._by_id.get(to.id)
            if member is not None and member.info == to:
                return to
            return self._search(to.name)
        if isinstance(to, bool) or not isinstance(to, int):
            raise ValueError(
                f"Cannot get worker info for {to!r}: name a worker by its name (str), "
                f"its rank (int) or a WorkerInfo, not by {type(to).__name__}."
            )
        member = self._by_id.get(to)
        if member is None:
            return self._search(to)
        supervised = self._ranks is not None and to < self._ranks
        return self._successor(member.info) if supervised and to in self._lost else member.info

    def lost(self, worker: int) -> None:
        """A worker is gone; another may come under its name."""
        self._lost.add(worker)

    def _successor(self, info: WorkerInfo) -> WorkerInfo:
        known = self._by_name[info.name]
        if known.id not in self._lost:
            return known
        member = self._look_up(info.name) if self._look_up is not None else None
        if member is None or member.info.id in self._lost:
            return info
        self.add(member)
        return member.info

    def _search(self, to: str | int) -> WorkerInfo:
        member = self._look_up(to) if self._look_up is not None else None
        if member is None:
            raise UnknownWorker(
                f"could not find destination {to!r}: no such worker in this job. {self._roll()}"
            )
        self.add(member)
        return member.info

    def _roll(self) -> str:
        known = self.members()
        named = ", ".join(f"{m.info.name} ({m.info.id})" for m in known[:NAMED_IN_ERRORS])
        more = len(self) - min(len(known), NAMED_IN_ERRORS)
        return f"Its workers are: {named}{f' and {more:,} more' if more else ''}."

    def member(self, worker: int) -> Member:
        member = self._by_id.get(worker)
        if member is None:
            self._search(worker)
            member = self._by_id[worker]
        return member

    def has(self, worker: int) -> bool:
        """Whether there is, or was, such a worker in the job."""
        try:
            self.member(worker)
        except TelegradError:
            return False
        return True

    def name(self, worker: int) -> str:
        member = self._by_id.get(worker)
        return member.info.name if member is not None else f"#{worker}"

    def __len__(self) -> int:
        """How many there are or were, as far as this worker can tell: it only ever grows."""
        return self._size or len(self._by_id)

    def live(self) -> set[int]:
        """The ids of those that are not lost, known or not."""
        everyone = self._by_id.keys() if self._size is None else set(range(self._size))
        return everyone - self._lost

    def lowest_live(self) -> int:
        """The least of `live`; in a job of fixed size found without looking at each."""
        if self._size is None:
            return min(self.live())
        return next(worker for worker in range(self._size) if worker not in self._lost)

    def fewest_live(self) -> int:
        """A number that those who live cannot be fewer than, found without looking at each."""
        return len(self) - len(self._lost)

    def members(self) -> list[Member]:
        """Those that are known, in the order of their ids."""
        return [self._by_id[worker] for worker in sorted(self._by_id)]

    def infos(self) -> list[WorkerInfo]:
        """Of several incarnations of a worker the last; in an open job, those that are there."""
        if self._size is not None:
            return [self.member(worker).info for worker in range(self._size)]
        is_open = self._look_up is not None and self._ranks is None
        infos = [member.info for member in self.members()]
        return [
            info
            for info in infos
            if self._by_name.get(info.name) == info and not (is_open and info.id in self._lost)
        ]
