"""How the workers of a job find each other, through one of torch's own stores.

The first worker (rank 0, or whoever comes first to a job without a world size) names the job; each
writes down who it is and where it listens; with a world size, rank 0 checks the whole list and
publishes it, so that every worker reads one entry and all agree, also on what is wrong.

The store may be open to anyone, so nothing secret goes in (of the key only a fingerprint), and
nothing that comes out is believed but what is under seal (see `entries`). A job that was given no
key makes one, in a file that only this user can read on this host.

In a job without a world size, workers leave and others come. A name becomes free when its worker
leaves or its process is seen dead. A rank is never used twice: it is what references and messages
know a worker by.

A supervised job of fixed size starts workers that died anew. Such a worker has a *life*, the number
of times that it was started before. It goes to the room of those who met without it, under its old
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
from telegrad.rpc.founding import Founding
from telegrad.rpc.job_files import read_key, remove_abandoned
from telegrad.rpc.meeting import Meeting
from telegrad.rpc.members import Member, Members
from telegrad.rpc.noticeboard import Noticeboard, not_ours
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
        self.incarnation = secrets.randbits(63)
        self.store: Store | None = store
        whole = PrefixStore("telegrad", store)
        self._board = self._whole_board = Noticeboard(whole, name, self.incarnation, timeout)
        _agree_on_kind(whole, "open" if world_size is None else "of fixed size")
        if world_size is None:
            rank = self._take_rank(name, rank)
        else:
            rank = self._board.store.add("ranks given out", 1) - 1 if rank is None else rank
            self._visit(name, rank, world_size)
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

    def _visit(self, name: str, rank: int, world_size: int) -> None:
        """In a job of fixed size: those who join for the n-th time meet in a room of their own."""
        check_rank(name, rank, world_size)
        number = self._board.store.add(f"visits of {rank}", 0 if self._life else 1)
        process = Process.own()
        self._visitor = f"visitor {number} of {rank}"
        self._board.put(self._visitor, {"name": name, "process": asdict(process)})
        if number > 1 and not self._life:
            before = self._board.get(f"visitor {number - 1} of {rank}", "its last worker")
            other = _process_of(before) or process
            if other != process and other.vital() in (Vital.ALIVE, Vital.STOPPED):
                self._board.store.add(f"visits of {rank}", -1)
                raise RendezvousError(
                    f"rank {rank} is taken twice: worker {name!r} has it, and so does worker "
                    f"{before['name']!r} (process {other.pid}). Give each worker a rank of its own"
                )
        self._board = self._board.room(str(number))

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
        job, key = founding.found_or_find(given)
        meeting = self._listen(job, key, host, plaintext, transports)
        while self._world_size is None and given is None and read_key(job) is None:
            # The last of the others left, and took the key along, before it saw us listen.
            meeting.close()
            job, key = founding.succeed(job)
            meeting = self._listen(job, key, host, plaintext, transports)
        meeting.tensors = tensors
        self._entries = Entries(key, job)
        return meeting

    def _listen(
        self,
        job: str,
        key: JobKey,
        host: str | None,
        plaintext: bool,
        transports: Collection[str],
    ) -> Meeting:
        meeting = self._listen_on_this_host(job, key, unix="unix" in transports)
        meeting.plaintext = plaintext
        if "tcp" in transports and host is not None:
            meeting.listen(TcpAddress(host, 0, tls=not plaintext and not is_loopback(host)))
            if not is_loopback(host):
                meeting.have_company(host)
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
                break
            except FileNotFoundError:
                if not left:
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
        if rank == 0:
            self._board.put("members", self._gather(mine, self._world_size))
        members = self._agreed()
        if self._life is None:
            return Members(members, size=self._world_size)
        return Members(members, self._look_up, self._world_size)

    def _join_large_job(self, me: Member, mine: dict[str, Any], world_size: int) -> Members:
        rank = me.info.id
        self._board.store.set(f"name {me.info.name}", f"{rank} {self.incarnation}")
        if rank == 0:
            outcome = self._gather(mine, world_size)
            self._board.put("members", outcome if "problem" in outcome else {"members": []})
        self._agreed()
        return self._know_some(me, world_size)

    def _know_some(self, me: Member, world_size: int) -> Members:
        """This worker, and others at even distances from it."""
        parts = LOOKED_AFTER + 1
        ranks = [(me.info.id + part * world_size // parts) % world_size for part in range(1, parts)]
        some = [
            self._entries.read(self._board.get(f"worker {rank}", f"rank {rank}")) for rank in ranks
        ]
        return Members([me, *some], self._look_up, size=world_size)

    def _agreed(self) -> list[Member]:
        """The list that rank 0 has published."""
        match self._board.get("members", "rank 0 to list all workers"):
            case {"problem": str(problem)}:
                raise RendezvousError(problem)
            case {"members": list(entries)}:
                return [self._entries.read(entry) for entry in entries]
        raise not_ours("members")

    def _return(self, me: Member, world_size: int) -> Members:
        """Come back to a job that goes on."""
        members = Members(self._agreed(), self._look_up, world_size)
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
        found = [mine]
        names = [self.info.name]
        for other in range(1, world_size):
            match self._board.get(f"worker {other}", f"rank {other} of {world_size}"):
                case {"problem": str(problem)}:
                    return {"problem": problem}
                case entry:
                    found.append(entry)
                    names.append(self._entries.read(entry).info.name)
        wrong = _problem(names)
        return {"members": found} if wrong is None else {"problem": wrong}

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
            elif self._world_size is not None:
                self._whole_board.put(self._visitor, {"process": None})
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
        member = self._entries.read(self._board.get(f"worker {rank}", "a worker"))
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
