"""Workers that die are started anew: same name and rank, another incarnation."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.launch.forkserver import ForkServer
from telegrad.launch.job import Seat

_kept: list[object] = []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill(name: str) -> None:
    with pytest.raises(rpc.WorkerLost, match=name):
        rpc.rpc_sync(name, die, timeout=30)


def keep(thing: object) -> int:
    _kept.append(thing)
    return len(_kept)


def call_through(name: str) -> int:
    """What a worker that never met the new incarnation can do."""
    rpc.wait_for_worker(name, timeout=30)
    return int(rpc.rpc_sync(name, os.getpid, timeout=30))


def forward(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def test_a_worker_that_dies_comes_back_under_its_name_and_rank() -> None:
    def main() -> None:
        before = rpc.rpc_sync("ps", os.getpid)
        old = rpc.get_worker_info("ps")
        kill("ps")
        new = rpc.wait_for_worker("ps", timeout=30)
        assert new.name == "ps"
        assert new != old
        assert rpc.rpc_sync("ps", os.getpid) not in (before, os.getpid())
        assert rpc.rpc_sync(1, os.getpid) == rpc.rpc_sync("ps", os.getpid)
        assert rpc.rpc_sync("trainer", call_through, args=("ps",)) == rpc.rpc_sync("ps", os.getpid)
        assert [info.name for info in rpc.get_worker_infos()] == ["main", "trainer", "ps"]
        with pytest.raises(rpc.WorkerLost, match="'ps' is gone"):
            rpc.rpc_sync(old, os.getpid)

    telegrad.run(main, workers=["ps", "trainer"], restarts=1)
    assert not rpc.is_initialized()


def test_the_new_incarnation_knows_and_calls_the_others() -> None:
    def main() -> None:
        kill("a")
        kill("b")
        for name in ("a", "b"):
            rpc.wait_for_worker(name, timeout=30)
        assert rpc.rpc_sync("a", call_through, args=("b",)) == rpc.rpc_sync("b", os.getpid)
        assert rpc.rpc_sync("b", call_through, args=("a",)) == rpc.rpc_sync("a", os.getpid)
        assert rpc.rpc_sync("b", call_through, args=("main",)) == os.getpid()

    telegrad.run(main, workers=["a", "b"], restarts=2)


def test_each_worker_is_started_anew_only_so_often() -> None:
    def main() -> None:
        for _ in range(2):
            kill("a")
            rpc.wait_for_worker("a", timeout=30)
        kill("a")
        with pytest.raises(rpc.CallTimeout, match=r"'a' is gone.*no other came"):
            rpc.wait_for_worker("a", timeout=1)
        assert rpc.rpc_sync("b", os.getpid) != os.getpid()

    telegrad.run(main, workers=["a", "b"], restarts=2)


def test_without_restarts_a_dead_worker_stays_dead() -> None:
    def main() -> None:
        kill("a")
        with pytest.raises(rpc.WorkerLost, match="'a' is gone"):
            rpc.wait_for_worker("a", timeout=30)

    telegrad.run(main, workers=["a"])


def test_owners_drop_what_the_dead_incarnation_held_and_the_new_one_starts_empty() -> None:
    def main() -> None:
        mine = rpc.RRef(torch.ones(2))
        assert rpc.rpc_sync("a", keep, args=(mine,)) == 1
        theirs = rpc.remote("a", torch.ones, args=(3,))
        theirs.to_here()
        assert rpc.debug_info()["references"]["forks"] == 1
        kill("a")
        rpc.wait_for_worker("a", timeout=30)
        with pytest.raises(rpc.ReferenceLost, match="'a'"):
            theirs.to_here()
        assert rpc.rpc_sync("a", keep, args=(mine,)) == 1
        assert _until(lambda: rpc.debug_info()["references"]["forks"] == 1)
        assert rpc.remote("a", torch.ones, args=(3,)).to_here().tolist() == [1, 1, 1]

    telegrad.run(main, workers=["a", "b"], restarts=1)


def test_gradients_flow_through_a_new_incarnation() -> None:
    def main() -> None:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        kill("a")
        rpc.wait_for_worker("a", timeout=30)
        with telegrad.autograd.context() as context:
            loss = rpc.rpc_sync("a", forward, args=(x,))
            telegrad.autograd.backward(context, [loss])
            gradients = telegrad.autograd.get_gradients(context)
        assert gradients[x].tolist() == [2.0, 4.0]

    telegrad.run(main, workers=["a"], restarts=1)


def test_two_workers_that_die_together_find_each_other_again() -> None:
    def main() -> None:
        dying = [rpc.rpc_async(name, die) for name in ("a", "b")]
        for each in dying:
            with pytest.raises(rpc.WorkerLost):
                each.wait()
        for name in ("a", "b"):
            rpc.wait_for_worker(name, timeout=30)
        assert rpc.rpc_sync("a", call_through, args=("b",)) == rpc.rpc_sync("b", os.getpid)

    telegrad.run(main, workers=["a", "b"], restarts=1)


def stop_for(seconds: float) -> None:
    """Be stopped as by a debugger, and go on after a while."""
    pid = os.getpid()
    if os.fork() == 0:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    time.sleep(60)


def test_a_worker_that_was_stopped_for_too_long_is_replaced_though_it_goes_on() -> None:
    def main() -> None:
        before = rpc.rpc_sync("a", os.getpid)
        with pytest.raises(rpc.WorkerLost, match="stopped"):
            rpc.rpc_sync("a", stop_for, args=(6.0,), timeout=30)
        rpc.wait_for_worker("a", timeout=30)
        after = rpc.rpc_sync("a", os.getpid)
        assert after != before
        assert rpc.rpc_sync("b", call_through, args=("a",)) == after
        assert _until(lambda: not os.path.exists(f"/proc/{before}"))

    telegrad.run(main, workers=["a", "b"], restarts=1, liveness=1.0)


def test_errors_say_that_the_process_that_starts_workers_has_ended() -> None:
    def main() -> None:
        server = rpc.rpc_sync("a", os.getppid)
        os.kill(server, signal.SIGKILL)  # As the kernel does when memory runs out.
        with pytest.raises(rpc.WorkerLost):
            rpc.rpc_sync("a", time.sleep, args=(60,), timeout=30)
        rpc.wait_for_worker("a", timeout=30)

    ended = r"the process that starts the workers ended by itself: it was ended by signal SIGKILL"
    with pytest.raises(rpc.WorkerLost, match=f"'a' is gone: .*{ended}") as caught:
        telegrad.run(main, workers=["a", "b"], restarts=2)
    assert any(re.match(ended, note) for note in caught.value.__notes__)


def test_the_first_error_after_that_end_has_a_note_of_it() -> None:
    def main() -> None:
        os.kill(rpc.rpc_sync("a", os.getppid), signal.SIGKILL)
        rpc.rpc_sync("a", time.sleep, args=(60,), timeout=30)

    with pytest.raises(rpc.WorkerLost) as caught:
        telegrad.run(main, workers=["a"])
    assert any("ended by itself" in note for note in caught.value.__notes__)


def test_a_number_of_restarts_that_is_none_is_refused() -> None:
    for wrong in (-1, True, 1.5):
        restarts: Any = wrong
        with pytest.raises(ValueError, match="restarts="):
            telegrad.run(lambda: None, workers=1, restarts=restarts)


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_worker_that_cannot_be_forked_just_now_is_forked_later(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server that all others are children of must not end for that."""
    ours, theirs = Pipe()
    server = ForkServer(theirs)
    seat = Seat("ps", 1, 2, 0, b"", 1.0, 1.0, 1)
    refused = [2]

    def fork() -> int:
        if refused[0]:
            refused[0] -= 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return 0  # As in the worker that was forked.

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(server, "_watch_for_exits", lambda: None)
    monkeypatch.setattr(server, "_leave_server", lambda *pipe: [os.close(end) for end in pipe])
    server._vacant.append(seat)
    assert server.serve() is seat
    assert capfd.readouterr().err.count("worker 'ps' cannot be started anew yet") == 1
    ours.close()
