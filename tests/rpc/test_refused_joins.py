"""What is said when a worker cannot join."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from telegrad import rpc
from telegrad.rpc.errors import InvalidWorker
from telegrad.wire.keys import JobKeyError
from tests.rpc import functions
from tests.rpc.fleet import Process, failures, init, join, results, serve_store
from tests.rpc.inside import call

Start = Callable[[], Process]
KEY = b"0123456789abcdef0123456789abcdef"


def join_all(processes: list[Process], *whos: tuple[str, int, int], **options: Any) -> list[Any]:
    store = serve_store()
    futures = [
        process.begin(join, name, rank, size, store.port, **options)
        for process, (name, rank, size) in zip(processes, whos, strict=True)
    ]
    found = failures(futures)
    del store
    return found


def test_a_name_taken_twice_is_told_to_all(start: Start) -> None:
    processes = [start(), start(), start()]
    started = time.monotonic()
    found = join_all(processes, ("a", 0, 3), ("a", 1, 3), ("c", 2, 3))
    assert all(isinstance(error, rpc.RendezvousError) for error in found)
    assert all("'a' is not unique" in str(error) for error in found)
    assert time.monotonic() - started < 30


def test_different_world_sizes_are_told_to_all_at_once(start: Start) -> None:
    processes = [start(), start()]
    started = time.monotonic()
    found = join_all(processes, ("a", 0, 2), ("b", 1, 3))
    assert all("world_size=3, but rank 0 was told 2" in str(error) for error in found), found
    assert time.monotonic() - started < 30


def test_a_rank_taken_twice_is_told_to_who_came_second(start: Start) -> None:
    store = serve_store()
    first, second, third = start(), start(), start()
    started = time.monotonic()
    joining = first.begin(join, "a", 0, 2, store.port)
    store.wait(["telegrad/visitor of 0"])
    with pytest.raises(rpc.RendezvousError, match=r"rank 0 is taken twice.*'c'.*'a'"):
        second.do(join, "c", 0, 2, store.port)
    third.do(join, "b", 1, 2, store.port)
    joining.result(30)
    assert first.do(call, "b", functions.who_am_i) == "b"
    assert time.monotonic() - started < 30
    results([first.begin(rpc.shutdown), third.begin(rpc.shutdown)])
    # The process that left lives on, but its rank is free.
    results([third.begin(join, "b", 1, 2, store.port), second.begin(join, "c", 0, 2, store.port)])
    assert second.do(call, "b", functions.who_am_i) == "b"


@pytest.mark.parametrize("rank", [-1, 2, 70_000])
def test_a_rank_out_of_range_is_refused(start: Start, rank: int) -> None:
    [error] = join_all([start()], ("a", rank, 2))
    assert isinstance(error, rpc.RendezvousError)
    assert "ranks go from 0 to 1" in str(error)


@pytest.mark.parametrize("name", ["", "with space", "x" * 200, "slash/"])
def test_a_bad_name_is_refused(start: Start, name: str) -> None:
    [error] = join_all([start()], (name, 0, 1))
    assert isinstance(error, ValueError)
    assert "Worker name must" in str(error)


def test_a_worker_with_another_key_or_none_is_told_to_all_at_once(start: Start) -> None:
    for theirs, words in ((b"x" * 32, "has another key"), (None, "was given no key")):
        store = serve_store()
        a, b = start(), start()
        found = failures(
            [
                a.begin(join, "a", 0, 2, store.port, key=KEY),
                b.begin(join, "b", 1, 2, store.port, key=theirs),
            ]
        )
        assert all(isinstance(error, rpc.RendezvousError) for error in found)
        assert all(words in str(error) for error in found), found
        assert not any(KEY.decode() in str(error) for error in found)


def test_a_short_key_and_a_key_file_that_others_can_read_are_refused(
    start: Start, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/meeting"
    with pytest.raises(JobKeyError, match="at least 16"):
        start().do(init, "a", rank=0, world_size=1, key=b"short", init_method=url)
    path = tmp_path / "key"
    path.write_text(KEY.hex())
    path.chmod(0o644)
    with pytest.raises(JobKeyError, match="chmod 600"):
        start().do(
            init,
            "a",
            {"TELEGRAD_KEY_FILE": str(path)},
            rank=0,
            world_size=1,
            init_method=url,
        )


def test_a_missing_worker_is_named_after_the_join_timeout(start: Start, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    with pytest.raises(rpc.RendezvousError, match="waited 1 s for rank 1 of 2"):
        start().do(init, "a", rank=0, world_size=2, init_method=url, join_timeout=1.0)


@pytest.mark.parametrize(
    ("rank", "words"),
    [(0, "give all workers another"), (1, "did not answer: .*is it what listens")],
)
def test_a_port_at_which_no_store_listens_is_named_within_the_join_timeout(
    start: Start, rank: int, words: str
) -> None:
    process = start()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(rpc.RendezvousError, match=f"'a'.*{url}.*{words}") as raised:
            process.do(init, "a", rank=rank, world_size=2, init_method=url, join_timeout=1.0)
        assert time.monotonic() - started < 20
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///no/such/directory/meeting", "there is no directory '/no/such/directory'"),
        ("pigeon://roof", "give 'env://', 'tcp://host:port' or 'file:///path'"),
        ("tcp://127.0.0.1", "it names no port; write 'tcp://host:port'"),
        ("tcp://127.0.0.1:x", "its port is no number from 0 to 65535"),
        ("tcp://127.0.0.1:99999", "its port is no number from 0 to 65535"),
        ("tcp://:29500", "it names no host"),
        (None, "set MASTER_ADDR"),
    ],
)
def test_an_init_method_that_names_no_store_is_refused(
    url: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    started = time.monotonic()
    with pytest.raises(rpc.RendezvousError, match=words):
        rpc.init_rpc("a", rank=0, world_size=1, init_method=url, join_timeout=60.0)
    assert time.monotonic() - started < 30


ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_PORT": "x"}, "MASTER_PORT of the environment is 'x': give a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999: ports go from 0 to 65535"),
        ({"RANK": "zero"}, "RANK of the environment is 'zero': give a whole number"),
        ({"RANK": "zero", "WORLD_SIZE": ""}, "RANK of the environment is 'zero'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE of the environment is 'two'"),
        ({"RANK": "", "MASTER_PORT": ""}, "set MASTER_PORT and RANK in the environment"),
    ],
)
def test_a_variable_that_is_wrong_is_named(
    changes: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ENVIRONMENT, **changes}.items():
        monkeypatch.setenv(name, value)
        if not value and name == "WORLD_SIZE":
            monkeypatch.delenv(name)
    with pytest.raises(rpc.RendezvousError, match=words) as raised:
        rpc.init_rpc("a", join_timeout=5.0)
    assert "set MASTER_ADDR" not in str(raised.value)


def test_a_port_of_the_environment_that_is_taken_is_named(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = {**ENVIRONMENT, "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(rpc.RendezvousError, match="something else listens at MASTER_PORT"):
            start().do(init, "a", env, join_timeout=5.0)


@pytest.mark.parametrize("way", ["env", "tcp"])
def test_a_host_that_is_not_known_is_named(start: Start, way: str) -> None:
    host = "no.such.host.invalid"
    options = {"init_method": f"tcp://{host}:29500"} if way == "tcp" else {}
    env = {**ENVIRONMENT, "MASTER_ADDR": host}
    with pytest.raises(rpc.RendezvousError, match=f"the host '{host}', of which no address"):
        start().do(init, "a", env, rank=1, world_size=2, join_timeout=0.5, **options)


STORE = b"\t\0\0\0refcount/\x01\0\0\x001"


@pytest.mark.parametrize(
    "content",
    [b"import torch\n" * 80, b"\xff" * 1000, b"\0" * 64, b"x", STORE[:-1], STORE[:11], STORE[:-3]],
    ids=["text", "large numbers", "zeros", "one byte", "no value", "half a key", "half a length"],
)
def test_a_file_that_is_no_store_is_named_and_left_as_it_was(
    start: Start, tmp_path: Path, content: bytes
) -> None:
    """Torch would look in it for the end of an entry for ever, and no signal would end that."""
    path = tmp_path / "notes"
    path.write_bytes(content)
    process = start()
    with pytest.raises(rpc.RendezvousError, match=f"file '{path}' is there, and it is no store"):
        process.begin(
            init, "a", rank=0, world_size=1, init_method=f"file://{path}", join_timeout=5.0
        ).result(60)
    assert path.read_bytes() == content


def test_a_directory_and_a_pipe_are_no_stores(start: Start, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = start()
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(rpc.RendezvousError, match=f"'{path}' is no file"):
            process.begin(init, "a", rank=0, world_size=1, init_method=f"file://{path}").result(60)


@pytest.mark.parametrize("content", [b"", STORE], ids=["empty", "used"])
def test_a_file_that_is_a_store_is_met_in_though_it_was_there(
    start: Start, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "meeting"
    path.write_bytes(content)
    process = start()
    process.do(init, "a", rank=0, world_size=1, init_method=f"file://{path}")
    process.do(rpc.shutdown)


def test_a_file_that_another_process_keeps_locked_is_named(start: Start, tmp_path: Path) -> None:
    with (tmp_path / "meeting").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(rpc.RendezvousError, match=r"has had the file .* locked for 0\.5 s"):
            start().begin(
                init, "a", rank=0, world_size=1, init_method=f"file://{file.name}", join_timeout=0.5
            ).result(60)


def test_an_address_that_is_not_ours_is_refused(start: Start, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1 is not an address of this host"):
        start().do(
            init, "a", rank=0, world_size=1, init_method=f"file://{tmp_path}/m", host="192.0.2.1"
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transports": ("tcp",)}, "give host="),
        ({"transports": ("carrier pigeon",)}, "some of"),
        ({"transports": ()}, "some of"),
        ({"trust": "blind"}, "'code' or 'data'"),
        ({"limits": 5}, r"limits=5: give a telegrad\.rpc\.Limits"),
        ({"world_size": 0}, "world_size=0: .* at least 1"),
        ({"world_size": -3}, "world_size=-3: .* at least 1"),
        ({"world_size": "2"}, "world_size='2' is a str: give a whole number"),
        ({"rank": "0"}, "rank='0' is a str: give a whole number"),
        ({"rank": True}, "rank=True is a bool: give a whole number"),
        ({"rank": -1, "world_size": None}, "rank=-1: .* at least 0"),
        ({"life": -1}, "life=-1: .* at least 0"),
        ({"rpc_timeout": -1}, "rpc_timeout=-1: .* 0 for no bound"),
        ({"rpc_timeout": math.nan}, "rpc_timeout=nan: .* 0 for no bound"),
        ({"rpc_timeout": "x"}, "rpc_timeout='x' is a str"),
        ({"join_timeout": -1}, "join_timeout=-1: .* greater than 0"),
        ({"join_timeout": math.inf}, "join_timeout=inf: .* greater than 0"),
        ({"liveness": -1}, "liveness=-1: .* greater than 0"),
        ({"liveness": 0}, "liveness=0: .* greater than 0"),
        ({"key": "x" * 32}, "key is a str: give bytes"),
        ({"store": "here"}, "store='here': give one of torch's stores"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words) as raised:
        init("a", **({"rank": 0, "world_size": 1} | options))
    assert "xxxx" not in str(raised.value)


@pytest.mark.parametrize(("name", "number"), [(3, 1), (None, 1), ("a", "1"), ("a", 1.0)])
def test_a_worker_info_has_a_string_and_a_whole_number(name: Any, number: Any) -> None:
    with pytest.raises(InvalidWorker, match="must be a"):
        rpc.WorkerInfo(name, number)


def test_a_second_init_and_a_call_before_init_or_after_shutdown_are_refused(start: Start) -> None:
    process = start()
    store = serve_store()
    with pytest.raises(rpc.NotInitialized, match="init_rpc"):
        process.do(call, "a", functions.nothing)
    with pytest.raises(rpc.NotInitialized):
        process.do(rpc.shutdown)
    with pytest.raises(rpc.NotInitialized):
        process.do(rpc.RRef, 1)
    process.do(join, "a", 0, 1, store.port)
    with pytest.raises(rpc.TelegradError, match="already initialized"):
        process.do(join, "a", 0, 1, store.port)
    assert process.do(call, "a", functions.who_am_i) == "a"
    process.do(rpc.shutdown)
    with pytest.raises(rpc.NotInitialized):
        process.do(call, "a", functions.nothing)
    process.do(join, "a", 0, 1, store.port)
    assert process.do(call, 0, functions.who_am_i) == "a"
