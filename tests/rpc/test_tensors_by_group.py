"""Jobs whose large tensors travel by process groups: values, gradients, threads, faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from telegrad import autograd, rpc
from telegrad.rpc.agent import Agent
from telegrad.rpc.current import current_node
from telegrad.rpc.errors import CallTimeout, RendezvousError, WorkerLost
from telegrad.wire.group import THRESHOLD
from tests.rpc.fleet import Job, Process, client_of, join, serve_store

MakeJob = Callable[..., Job]
SEED = 20261118


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def double_there(to: str, *sizes: int) -> list[bool]:
    def right(size: int) -> bool:
        x = torch.arange(size, dtype=torch.uint8)
        return torch.equal(rpc.rpc_sync(to, double, args=(x,)), x * 2)

    return [right(size) for size in sizes]


def has_group(to: str) -> bool:
    agent = current_node().transport
    assert isinstance(agent, Agent)
    link = agent._outgoing[rpc.get_worker_info(to).id].link  # type: ignore[union-attr]
    return link._group is not None and link._arena is None


def gradients(to: str) -> bool:
    x = torch.randn(THRESHOLD, requires_grad=True)
    w = torch.randn(THRESHOLD, requires_grad=True)
    with autograd.context() as context:
        there = rpc.rpc_sync(to, multiply, args=(x, w))
        autograd.backward(context, [there.sin().sum()])
        found = autograd.get_gradients(context)
    (x * w).sin().sum().backward()
    return torch.allclose(found[x], x.grad) and torch.allclose(found[w], w.grad)  # type: ignore[arg-type]


def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


def call_from_threads(to: str, count: int, sever: bool = False) -> int:
    draw = torch.Generator().manual_seed(SEED)
    sizes = torch.randint(THRESHOLD // 2, 8 * THRESHOLD, (count,), generator=draw).tolist()

    def call(number: int) -> bool:
        x = torch.full((sizes[number],), number % 100, dtype=torch.uint8)
        future = rpc.rpc_async(to, double, args=(x,))
        if not sever:
            x.fill_(255)
        elif number % 10 == 5:
            agent = current_node().transport
            assert isinstance(agent, Agent)
            agent.sever(rpc.get_worker_info(to).id)
        return torch.equal(future.wait(), torch.full_like(x, number % 100 * 2))

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(call, range(count)))


def hold_then_double(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x * 2


def error_of_stream_of_calls(to: str) -> str:
    """Send large tensors without end; what ends it."""
    x = torch.ones(64 << 20, dtype=torch.uint8)
    try:
        while True:
            rpc.rpc_sync(to, double, args=(x,), timeout=60)
    except WorkerLost as error:
        return str(error)


def make_default_group(rank: int, port: int) -> None:
    dist.init_process_group("gloo", store=client_of(port), rank=rank, world_size=2)


def sum_over_default_group(rank: int) -> float:
    x = torch.tensor(float(rank + 1))
    dist.all_reduce(x)
    return x.item()


def test_values_of_all_sizes_go_both_ways(make_job: MakeJob) -> None:
    job = make_job("a", "b", tensors="gloo")
    sizes = (1, THRESHOLD - 1, THRESHOLD, THRESHOLD + 1, 5_000_000)
    assert all(job["a"].do(double_there, "b", *sizes))
    assert all(job["b"].do(double_there, "a", *sizes))
    assert job["a"].do(has_group, "b"), "and shared memory is not used"
    job.close()


def inference_both_ways(to: str) -> bool:
    with torch.inference_mode():
        x = torch.arange(100_000)
        come_back = rpc.rpc_sync(to, in_inference_mode, (x,))
    assert not come_back.is_inference()
    return bool((come_back == 2 * x).all()) and rpc.rpc_sync(to, torch.is_grad_enabled) is True


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 2


@pytest.mark.parametrize("tensors", ["gloo", None])
def test_tensors_of_inference_mode_travel_as_others_do(
    make_job: MakeJob, tensors: str | None
) -> None:
    options = {} if tensors is None else {"tensors": tensors}
    job = make_job("a", "b", host="127.0.0.1", transports=("tcp",), **options)
    assert job["a"].do(inference_both_ways, "b")
    job.close()


@pytest.mark.parametrize("transports", [("unix",), ("tcp",)])
def test_gradients_travel_by_the_group(make_job: MakeJob, transports: tuple[str, ...]) -> None:
    job = make_job("a", "b", tensors="gloo", transports=transports, host="127.0.0.1")
    assert job["a"].do(gradients, "b")
    job.close()


def test_threads_that_call_at_once_get_each_its_own(make_job: MakeJob) -> None:
    job = make_job("a", "b", tensors="gloo")
    calling = [
        job["a"].begin(call_from_threads, "b", 80),
        job["b"].begin(call_from_threads, "a", 80),
    ]
    assert [each.result(60) for each in calling] == [80, 80]
    job.close()


def test_connections_that_break_under_way_are_mended_with_a_group_of_their_own(
    make_job: MakeJob,
) -> None:
    job = make_job("a", "b", tensors="gloo")
    assert job["a"].begin(call_from_threads, "b", 60, sever=True).result(90) == 60
    assert job["a"].do(double_there, "b", 1_000_000) == [True]
    assert job["a"].do(has_group, "b")
    job.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops_ends_its_transfers(
    make_job: MakeJob, how: signal.Signals
) -> None:
    job = make_job("a", "b", tensors="gloo", liveness=1.0)
    assert all(job["a"].do(double_there, "b", 1_000_000))
    streaming = job["a"].begin(error_of_stream_of_calls, "b")
    time.sleep(0.5)
    job["b"].signal(how)
    assert "Worker 'b' is gone" in streaming.result(60)
    job["b"].kill()


def timed_out(to: str) -> bool:
    x = torch.ones(1_000_000, dtype=torch.uint8)
    try:
        rpc.rpc_sync(to, hold_then_double, args=(x, 1.0), timeout=0.2)
    except CallTimeout:
        return all(double_there(to, 1_000_000))
    return False


def test_a_call_that_times_out_leaves_the_link_whole(make_job: MakeJob) -> None:
    job = make_job("a", "b", tensors="gloo")
    assert job["a"].do(timed_out, "b")
    job.close()


def test_the_programs_own_default_group_goes_on_beside(make_job: MakeJob) -> None:
    job = make_job("a", "b", tensors="gloo")
    making = [job[n].begin(make_default_group, r, job.store.port) for r, n in enumerate("ab")]
    for each in making:
        each.result(30)
    assert all(job["a"].do(double_there, "b", 1_000_000))
    summing = [job[n].begin(sum_over_default_group, r) for r, n in enumerate("ab")]
    assert [each.result(30) for each in summing] == [3.0, 3.0]
    assert all(job["a"].do(double_there, "b", 1_000_000))
    job.close()


def test_all_workers_of_a_job_choose_the_same(start: Callable[[], Process]) -> None:
    store = serve_store()
    first, second = start(), start()
    joining = first.begin(join, "a", 0, 2, store.port, tensors="gloo")
    with pytest.raises(RendezvousError, match="was told tensors=None, but the first"):
        second.begin(join, "b", 1, 2, store.port).result(30)
    with pytest.raises(RendezvousError, match="was told tensors=None, but the first"):
        joining.result(30)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tensors": "pigeon"}, "give one of 'gloo', 'nccl'"),
        ({"tensors": "gloo", "trust": "data"}, "do not go together"),
        ({"tensors": "gloo", "host": "192.0.2.1"}, "in the clear, and this job speaks TLS"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    options: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        rpc.init_rpc("a", rank=0, world_size=1, store=serve_store(), **options)  # type: ignore[arg-type]
