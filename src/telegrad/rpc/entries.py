"""What workers write about themselves in the store, and how others know that a worker wrote it.

Whoever reaches the store can write to it. Were its entries believed, a stranger could send a worker
to an address of his choice and sit between two workers that prove the key to each other through
him; or tell one that another's process is dead. So each entry carries a seal: an HMAC under a key
that follows from the job's, over the entry and the name of the job. What a stranger can still do is
to remove entries or to put back old ones of the same job: then workers do not find each other, or
find a worker that has left, and say so. He can keep a job from starting, and no more than that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict
from typing import Any

from telegrad.rpc.errors import RendezvousError, TelegradError
from telegrad.rpc.heartbeat import read_pulse
from telegrad.rpc.members import Member
from telegrad.rpc.vitals import read_process
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.address import parse_address
from telegrad.wire.keys import JobKey


class Entries:
    """Writes and reads the entries of one job's workers."""

    def __init__(self, key: JobKey, job: str) -> None:
        self._key = key.derive("telegrad entry 1")
        self._job = job

    def write(self, member: Member) -> dict[str, Any]:
        """A worker as JSON can hold it."""
        data = {
            "name": member.info.name,
            "id": member.info.id,
            "incarnation": member.incarnation,
            "addresses": list(member.addresses),
            "host": member.host,
            "process": None if member.process is None else asdict(member.process),
            "pulse": member.pulse,
        }
        return {**data, "seal": self._seal(data)}

    def read(self, entry: Any) -> Member:
        """The worker of an entry; `RendezvousError` if none of this job wrote it."""
        if not isinstance(entry, dict) or not isinstance(entry.get("seal"), str):
            raise _forged()
        data = {name: value for name, value in entry.items() if name != "seal"}
        if not hmac.compare_digest(self._seal(data).encode(), entry["seal"].encode()):
            raise _forged()
        try:
            return _read_member(data)
        except (ValueError, TelegradError) as error:
            raise RendezvousError(
                f"the store holds an entry of this job that describes no worker: {error}"
            ) from None

    def _seal(self, data: dict[str, Any]) -> str:
        text = json.dumps([self._job, data], sort_keys=True)
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _read_member(data: dict[str, Any]) -> Member:
    """All of it, before any of it is used: its worker has the key, and may lie all the same."""
    match data:
        case {
            "name": str(name),
            "id": int(number),
            "incarnation": int(incarnation),
            "addresses": [*addresses],
            "host": str(host),
            "process": process,
            "pulse": str(pulse),
        } if 0 <= incarnation < 1 << 64:
            pass
        case _:
            raise ValueError("something is missing, or is of another kind")
    for address in addresses:
        if type(address) is not str:
            raise ValueError("an address is no text")
        parse_address(address)
    if pulse:
        read_pulse(pulse)
    return Member(
        WorkerInfo(name, number),
        incarnation,
        tuple(addresses),
        host,
        None if process is None else read_process(process),
        pulse,
    )


def _forged() -> RendezvousError:
    return RendezvousError(
        "the store holds an entry that no worker of this job wrote: has its worker another key "
        "(compare TELEGRAD_KEY and TELEGRAD_KEY_FILE), or can strangers write to the store?"
    )
