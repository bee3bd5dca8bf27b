"""What workers write about themselves: each of them has the key, and may lie all the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from telegrad.rpc.entries import Entries
from telegrad.rpc.errors import RendezvousError
from telegrad.rpc.members import Member
from telegrad.rpc.vitals import Process
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.keys import new_key

ENTRIES = Entries(new_key(), "job")
ADDRESSES = ("unix:///run/1.sock", "tls://[fe80::1%eth0]:4000")


def member(pulse: str = "10.0.0.7 4001") -> Member:
    return Member(WorkerInfo("a", 1), 5, ADDRESSES, "here", Process.own(), pulse)


@pytest.mark.parametrize("pulse", ["", "10.0.0.7 4001", "fe80::1%eth0 4001"])
def test_what_a_worker_writes_is_read_as_it_was(pulse: str) -> None:
    entry = json.loads(json.dumps(ENTRIES.write(member(pulse))))
    assert ENTRIES.read(entry) == member(pulse)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", 7),
        ("name", ""),
        ("id", "1"),
        ("id", 1 << 16),
        ("incarnation", -1),
        ("incarnation", 1 << 64),
        ("addresses", 7),
        ("addresses", [7]),
        ("addresses", ["tcp://a:1:2"]),
        ("host", None),
        ("process", 7),
        ("process", {"pid": 1}),
        ("process", asdict(Process(1 << 31, 1, "pid:[1]"))),
        ("process", asdict(Process(0, 1, "pid:[1]"))),
        ("process", {**asdict(Process(1, 1, "pid:[1]")), "pid": "1/../2"}),
        ("pulse", None),
        ("pulse", "10.0.0.7"),
        ("pulse", "10.0.0.7 0"),
        ("pulse", "10.0.0.7 65536"),
        ("pulse", "10.0.0.7 " + "9" * 5000),
        ("pulse", "a.name.to.look.up 4001"),
    ],
)
def test_what_describes_no_worker_is_refused_though_it_is_sealed(name: str, value: Any) -> None:
    data = {**ENTRIES.write(member()), name: value}
    del data["seal"]
    with pytest.raises(RendezvousError, match="describes no worker"):
        ENTRIES.read({**data, "seal": ENTRIES._seal(data)})


def test_an_entry_that_lacks_something_is_refused_though_it_is_sealed() -> None:
    data = {"name": "a", "id": 1}
    with pytest.raises(RendezvousError, match="describes no worker"):
        ENTRIES.read({**data, "seal": ENTRIES._seal(data)})
