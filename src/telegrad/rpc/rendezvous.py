"""How the workers of a job find each other, through one of torch's own stores.

The first worker (rank 0, or whoever comes first to a job without a world size) names the job; each
writes down who it is and where it listens; with a world size, rank 0 checks the whole list and
publishes it, so that every worker reads one entry and all agree, also on what is wrong. `rooms` has
how they come together though some have tried before, or were in another job.

The store may be open to anyone, so nothing secret goes in (of the key only a fingerprint), and
nothing that comes out is believed but what is under seal (see `entries`). A job that was given no
key makes one, in a file that only this user can read on this host.

In a job without a world size, workers leave and others come. A name becomes free when its worker
leaves or its process is seen dead. A rank is never used twice: it is what references and messages
know a worker by.

A supervised job of fixed size starts workers that died anew. Such a worker has a *life*, the number
of times that it was started before. It goes to the room in which its predecessor was, under its old
name and rank and with the id `rank + life * world_size`, which nobody had before.

A large job has no list that all read: n workers that read n entries each would move n squared of
them through one store. Each worker learns from rank 0 that all is well, reads the entries of a few
others, spread evenly over the job, to look after, and looks up by name or rank whom it is to call.
So the store has to be there while workers still meet for the first time.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from telegrad.rpc.entries import Entries
from telegrad.rpc.errors import RendezvousError
from telegrad.rpc.founding import Disagreement, Founding
from telegrad.rpc.job_files import leave_mark, read_key, remove_abandoned, remove_if_last
from telegrad.rpc.meeting import Meeting
from telegrad.rpc.members import Member, Members
from telegrad.rpc.noticeboard import Noticeboard, WaitedInVain, not_ours
from telegrad.rpc.rooms import (
    OUTCOME,
    READY,
    Room,
    check_outcome,
    open_room,
    problem_of,
    unless_given_up,
)
from telegrad.rpc.vitals import Process, Vital, read_process
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.address import (
    TcpAddress,
    UnixAddress,
    host_id,
    is_loopback,
    job_directory,
)
from telegrad.wire.keys import JobKey, key_from_environment

KNOWN_TO_ALL = 1024
"""The most workers of a job in which each knows all from the start."""
LOOKED_AFTER = 16
"""In a larger one: so many others each knows from the start."""
TIMES_TO_MAKE_DIRECTORY = 20


def check_rank(name: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise RendezvousError(
            f"worker {name!r} has rank {rank} in a job of {world_size}: ranks go from 0 "
            f"to {world_size - 1}"
        )


class Rendezvous:
    """One worker's visit to the meeting place."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int | None,
        world_size: int | None,
        timeout: float,
        life: int | None = None,
        serves: bool = False,
    ) -> None:
        """`serves`: the store's server is in this process, and ends with the last that refers to
        it."""
        self._serves = serves
        self._world_size = world_size
        self._life = life
        self._name = name
        self._named = False
        self._met = False
        self.incarnation = secrets.randbits(63)
        self.store: Store | None = store
        whole = PrefixStore("telegrad", store)
        self._board = self._whole_board = Noticeboard(whole, name, self.incarnation, timeout)
        _agree_on_kind(whole, "open" if world_size is None else "of fixed size")
        self._room: Room | None = None
        self._given_rank = rank
        if world_size is None:
            rank = self._take_rank(name, rank)
        else:
            rank = self._visit(name, rank, world_size)
            rank += (life or 0) * world_size
        self.info = WorkerInfo(name, rank)

    def _take_rank(self, name: str, rank: int | None) -> int:
        """In an open job: the rank that was asked for, or one that nobody has."""
        if rank is not None:
            if not self._board.claim(f"rank {rank}", name):
                raise RendezvousError(
                    f"rank {rank} is taken: worker {name!r} asks for it, and another worker had "
                    "it before. In a job without world_size give no rank, and a free one is found"
                )
            return rank
        while True:
            rank = self._board.store.add("ranks given out", 1) - 1
            if self._board.claim(f"rank {rank}", name):
                return rank

    # The room, in a job of fixed size.

    def _visit(self, name: str, rank: int | None, world_size: int) -> int:
        """Enter a room; the rank that we have there."""
        if rank is not None:
            check_rank(name, rank, world_size)
            if self._life:
                return self._follow(rank)
            if self._whole_board.store.check([_visitor(rank)]):
                before = self._whole_board.read(_visitor(rank))
                if _is_other(_process_of(before), Vital.ALIVE, Vital.STOPPED):
                    raise _taken_twice(rank, name, before)
        return self._take_seat(name, rank, world_size)

    def _follow(self, rank: int) -> int:
        """The room of the worker whose place this one takes."""
        match self._whole_board.get(_visitor(rank), f"rank {rank}, whose place it takes,"):
            case {"room": int(number)}:
                self._enter(Room(self._whole_board, number), rank)
                return rank
        raise not_ours(_visitor(rank))

    def _take_seat(self, name: str, rank: int | None, world_size: int) -> int:
        """The seat of our rank, or one that is free, in the room that is open."""
        moved = self._room is not None
        while True:
            room = open_room(self._whole_board)
            seat = _next_rank(room) if rank is None else rank
            if seat < world_size:
                holder = room.take_seat(seat, self._describe_visitor(room))
                if holder is None:
                    self._enter(room, seat)
                    return seat
                if rank is None:
                    continue
                # Who is on another host, and cannot be seen, counts as gone, but for once only:
                # two that have one rank would drive each other from room to room.
                seen = (Vital.UNKNOWN,) if moved else ()
                if _is_other(_process_of(holder), Vital.ALIVE, Vital.STOPPED, *seen):
                    raise _taken_twice(seat, name, holder)
            elif not _any_is_dead(room, world_size):
                check_rank(name, seat, world_size)
            room.give_up()
            moved = True

    def _enter(self, room: Room, rank: int) -> None:
        self._room = room
        self._board = room.board
        self._rank = rank
        self._whole_board.put(_visitor(rank), self._describe_visitor(room))

    def _describe_visitor(self, room: Room) -> dict[str, Any]:
        return {
            "name": self._name,
            "process": asdict(Process.own()),
            "room": room.number,
            "world size": self._world_size,
        }

    def move_on(self) -> None:
        """To the next room: somebody has given up the one that we were in."""
        if self._life or self._world_size is None:
            raise RendezvousError(
                f"worker {self._name!r} cannot come back: its job was given up before all had met. "
                "Start the job anew"
            )
        self.info = WorkerInfo(
            self._name, self._take_seat(self._name, self._given_rank, self._world_size)
        )

    # The job and its key.

    def prepare(
        self,
        key: JobKey | None,
        host: str | None,
        plaintext: bool,
        transports: Collection[str],
        tensors: str | None = None,
    ) -> Meeting:
        """Learn or make the job, then listen."""
        given = key or key_from_environment()
        founding = Founding(self._board, self.info, self._world_size, tensors)
        try:
            job, key = founding.found_or_find(given)
        except Disagreement as error:
            raise self._reported(error) from None
        except WaitedInVain as error:
            raise RendezvousError(f"{error}{self._where_rank_0_is()}") from None
        meeting = self._listen(job, key, host, plaintext, transports)
        while self._world_size is None and given is None and read_key(job) is None:
            # The last of the others left, and took the key along, before it saw us listen.
            meeting.close()
            job, key = founding.succeed(job)
            meeting = self._listen(job, key, host, plaintext, transports)
        meeting.tensors = tensors
        self._entries = Entries(key, job)
        return meeting

    def _reported(self, problem: Disagreement) -> RendezvousError:
        """What is wrong is told to all by rank 0, if it is there: this may be an old room."""
        if self._life or self._world_size is None:
            return RendezvousError(str(problem))
        self._board.put(READY, {"problem": str(problem)})
        try:
            agreed = problem_of(self._await_outcome())
        except WaitedInVain:
            return RendezvousError(
                f"{problem}. (Rank 0 did not answer for {self._board.timeout:g} s: this may be "
                "what is left of an attempt that failed. It is out of the way now; try again)"
            )
        return agreed or RendezvousError(str(problem))

    def _where_rank_0_is(self) -> str:
        """What there is to say of a rank 0 that did not come to our room."""
        with contextlib.suppress(RuntimeError, dist.DistError, RendezvousError):
            if self._room is not None and self._whole_board.store.check([_visitor(0)]):
                match self._whole_board.read(_visitor(0)):
                    case {"name": str(name), "room": int(room), "world size": size} as visitor:
                        process = _process_of(visitor)
                        if room < self._room.number and _is_other(process, Vital.DEAD):
                            return f". Rank 0 was worker {name!r}, which has died"
                        if room < self._room.number and _is_other(process, *Vital):
                            return f". Rank 0 is worker {name!r}, in a job of {size} workers"
        return ""

    def _listen(
        self,
        job: str,
        key: JobKey,
        host: str | None,
        plaintext: bool,
        transports: Collection[str],
    ) -> Meeting:
        meeting = self._listen_on_this_host(job, key, unix="unix" in transports)
        try:
            meeting.plaintext = plaintext
            if "tcp" in transports and host is not None:
                meeting.listen(TcpAddress(host, 0, tls=not plaintext and not is_loopback(host)))
                if not is_loopback(host):
                    meeting.have_company(host)
        except BaseException:
            meeting.close()
            raise
        return meeting

    def _listen_on_this_host(self, job: str, key: JobKey, unix: bool) -> Meeting:
        """Listen in the job's directory, and make it again while those who leave take it along."""
        for left in reversed(range(TIMES_TO_MAKE_DIRECTORY)):
            directory = job_directory(job)
            remove_abandoned(directory.parent)
            path = directory / f"{self.info.id}-{self.incarnation & 0xFFFFFF:x}.sock"
            try:
                meeting = Meeting(key, job, self.incarnation, host_id(directory), directory)
                if unix:
                    meeting.listen(UnixAddress(str(path)))
                else:
                    leave_mark(directory)
                break
            except FileNotFoundError:
                if not left:
                    raise
            except BaseException:
                remove_if_last(directory)
                raise
        return meeting

    # The members.

    def join(self, meeting: Meeting) -> Members:
        """Say who we are, and learn who the others are."""
        me = Member(
            self.info,
            self.incarnation,
            tuple(str(address) for address in meeting.addresses),
            meeting.host,
            Process.own(),
            meeting.pulse,
        )
        rank = self.info.id
        if self._world_size is None:
            return self._join_open_job(me)
        if self._life:
            return self._return(me, self._world_size)
        mine = self._entries.write(me)
        self._board.put(f"worker {rank}", mine)
        if self._life is None and self._world_size > KNOWN_TO_ALL:
            return self._join_large_job(me, mine, self._world_size)
        members = self._agree(mine, self._world_size)
        if self._life is None:
            return Members(members, size=self._world_size)
        return Members(members, self._look_up, self._world_size)

    def _join_large_job(self, me: Member, mine: dict[str, Any], world_size: int) -> Members:
        self._board.store.set(f"name {me.info.name}", f"{me.info.id} {self.incarnation}")
        self._agree(mine, world_size)
        return self._know_some(me, world_size)

    def _agree(self, mine: dict[str, Any], world_size: int) -> list[Member]:
        """All workers of the job, by the list that rank 0 has published, if it is not too long."""
        if self.info.id == 0:
            outcome = self._settle(self._gather(mine, world_size))
        else:
            if self._board.store.add("arrived", 1) == world_size - 1:
                self._board.put(READY, {"all": True})
            outcome = self._await_outcome()
        return self._read_members(outcome)

    def _know_some(self, me: Member, world_size: int) -> Members:
        """This worker, and others at even distances from it."""
        parts = LOOKED_AFTER + 1
        ranks = [(me.info.id + part * world_size // parts) % world_size for part in range(1, parts)]
        some = [self._entries.read(self._board.read(f"worker {rank}")) for rank in ranks]
        return Members([me, *some], self._look_up, size=world_size)

    def _settle(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Rank 0: publish what the room has come to, unless it was given up meanwhile."""
        assert self._room is not None
        settled: dict[str, Any] = unless_given_up(self._room.settle(outcome))
        self._met = True
        return settled

    def _await_outcome(self) -> dict[str, Any]:
        assert self._room is not None
        try:
            outcome = self._board.get(OUTCOME, "rank 0 to list all workers")
        except WaitedInVain:
            if self._life:
                raise
            # Rank 0 may list us at this very moment: then we have joined, and else never will.
            outcome = self._room.give_up()
            if "given up" in outcome:
                raise
        checked = check_outcome(unless_given_up(outcome))
        self._met = True
        return checked

    def _read_members(self, outcome: dict[str, Any]) -> list[Member]:
        problem = problem_of(outcome)
        if problem is not None:
            raise problem
        return [self._entries.read(entry) for entry in outcome["members"]]

    def _return(self, me: Member, world_size: int) -> Members:
        """Come back to a job that goes on."""
        outcome = self._await_outcome()
        members = Members(self._read_members(outcome), self._look_up, world_size)
        for info in members.infos():
            follower = self._look_up(info.name)
            if follower is not None:
                members.add(follower)
        members.add(me)
        self._board.put(f"worker {me.info.id}", self._entries.write(me))
        self._board.store.set(f"name {me.info.name}", f"{me.info.id} {self.incarnation}")
        return members

    def _gather(self, mine: dict[str, Any], world_size: int) -> dict[str, Any]:
        """Rank 0: the list of all workers, or what is wrong with it."""
        if world_size > 1:
            match unless_given_up(self._board.get(READY, lambda: self._missing(world_size))):
                case {"problem": str(problem)}:
                    return {"problem": problem}
        found = [mine]
        names = [self.info.name]
        for other in range(1, world_size):
            entry = self._board.read(f"worker {other}")
            found.append(entry)
            names.append(self._entries.read(entry).info.name)
        wrong = _problem(names)
        if wrong is not None:
            return {"problem": wrong}
        return {"members": found if self._life is not None or world_size <= KNOWN_TO_ALL else []}

    def _missing(self, world_size: int) -> str:
        """The first of the others that has not come."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            for rank in range(1, world_size):
                if not self._board.store.check([f"worker {rank}"]):
                    return f"rank {rank} of {world_size}"
        return "the other workers"

    def _join_open_job(self, me: Member) -> Members:
        name = me.info.name
        if not (
            self._board.claim(f"name {name}", str(me.info.id)) or self._inherit(name, me.info.id)
        ):
            raise RendezvousError(_not_unique(name))
        self._named = True
        self._board.put(f"worker {me.info.id}", self._entries.write(me))
        self._board.put(f"arrival {self._board.store.add('arrivals', 1)}", me.info.id)
        members = Members(list(self._present()), self._look_up)
        members.add(me)
        return members

    def _present(self) -> Iterator[Member]:
        for rank in self._board.present_ranks():
            member = self._look_up(rank)
            if member is not None:
                yield member

    def _inherit(self, name: str, rank: int) -> bool:
        """Take over the name of a worker that died without leaving."""
        held = self._board.store.get(f"name {name}").decode(errors="replace")
        holder = self._look_up(name)
        if holder is None or holder.process is None or holder.process.vital() is not Vital.DEAD:
            return False
        mine = f"{rank} {self.incarnation}"
        return bool(self._board.store.compare_set(f"name {name}", held, mine).decode() == mine)

    def leave(self) -> None:
        """Give the name, or in a job of fixed size the rank, back: another worker may have it.

        The store is let go of here: much refers to this visit, and some of it in cycles. But who
        serves it stays for a while, as others may be about to join again.
        """
        with contextlib.suppress(RuntimeError, dist.DistError):
            if self._named:
                self._board.store.delete_key(f"worker {self.info.id}")
                self._board.store.delete_key(f"name {self.info.name}")
            elif self._room is not None:
                if not self._met and not self._life:
                    self._room.give_up()
                self._whole_board.put(
                    _visitor(self._rank), {"process": None, "room": self._room.number}
                )
            else:
                # Nobody knows this worker by its rank yet.
                self._board.store.delete_key(f"rank {self.info.id}")
        if not self._serves:
            self._board.close()
            self._whole_board.close()
            self.store = None

    def _look_up(self, who: str | int) -> Member | None:
        try:
            return self._find_entry(who)
        except RendezvousError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise RendezvousError(
                f"worker {self._name!r} cannot look up worker {who!r}: the store in which the "
                f"workers met does not answer any more ({error})"
            ) from None

    def _find_entry(self, who: str | int) -> Member | None:
        rank = self._rank_of(who) if isinstance(who, str) else who
        if rank is None or not self._board.store.check([f"worker {rank}"]):
            return None
        member = self._entries.read(self._board.read(f"worker {rank}"))
        if who not in (member.info.name, member.info.id):
            raise RendezvousError(f"the store has worker {member.info.name!r} in place of {who!r}")
        return member

    def _rank_of(self, name: str) -> int | None:
        if not self._board.store.check([f"name {name}"]):
            return None
        rank = self._board.store.get(f"name {name}").decode(errors="replace").split(" ")[0]
        return int(rank) if rank.isascii() and rank.isdigit() and len(rank) < 9 else None


def _agree_on_kind(store: Store, kind: str) -> None:
    """Jobs with and without a world size keep separate entries: they would never see each other."""
    if store.compare_set("kind of job", "", kind).decode() != kind:
        raise RendezvousError(
            "RPC group mixes statically and dynamically initialized members which is not "
            "supported. Give every worker the same world_size, or none."
        )


def _not_unique(name: str) -> str:
    return (
        f"RPC worker name {name!r} is not unique: two workers have it. Give each worker a name "
        "of its own."
    )


def _visitor(rank: int) -> str:
    """The entry of the worker that has a rank, or had it last."""
    return f"visitor of {rank}"


def _next_rank(room: Room) -> int:
    return int(room.board.store.add("ranks given out", 1)) - 1


def _any_is_dead(room: Room, world_size: int) -> bool:
    """Whether somebody took a seat and died: the room will never be full."""
    seats = [f"seat {rank}" for rank in range(world_size)]
    taken = [room.board.read(seat) for seat in seats if room.board.store.check([seat])]
    return any(_is_other(_process_of(holder), Vital.DEAD) for holder in taken)


def _is_other(process: Process | None, *vitals: Vital) -> bool:
    """Whether it is a process other than this one, of which that is so."""
    return process is not None and process != Process.own() and process.vital() in vitals


def _taken_twice(rank: int, name: str, other: dict[str, Any]) -> RendezvousError:
    return RendezvousError(
        f"rank {rank} is taken twice: worker {name!r} has it, and so does worker "
        f"{other['name']!r} (process {other['process']['pid']}). Give each worker a rank of its own"
    )


def _process_of(visitor: Any) -> Process | None:
    match visitor:
        case {"process": None}:
            return None
        case {"name": str(), "process": process}:
            with contextlib.suppress(ValueError):
                return read_process(process)
    raise not_ours("visitor")


def _problem(names: list[str]) -> str | None:
    """What is wrong with the names of all workers."""
    counted = Counter(names)
    return next((_not_unique(name) for name in names if counted[name] > 1), None)
