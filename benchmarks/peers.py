"""Run the same measurements on stock torch RPC and on telegrad, in turn, and compare.

Each peer runs in processes of its own that are gone before the next one starts (stock torch RPC
keeps a core busy even when idle). The peers take turns for several rounds; what is compared are
medians over all rounds, as a ratio, because machines are noisy but equally so for both.

Ray's actors and gRPC can only make calls: they take part in those measurements (`others.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Samples = dict[str, list[float]]
PEERS = ("stock", "telegrad")
CALLERS = ("stock", "ray", "grpc", "telegrad")
TURN_SECONDS = 180

_pace = 1.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def paced(seconds: float) -> float:
    """How long to measure what is measured for so many seconds at the usual pace."""
    return seconds * _pace


def sample(work: Callable[[], object], seconds: float, warm_up: int = 20) -> list[float]:
    """Times of single runs, for about so many seconds; at least five."""
    for _ in range(warm_up):
        work()
    times = []
    until = time.perf_counter() + paced(seconds)
    while time.perf_counter() < until or len(times) < 5:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


def sample_in_turn(
    works: dict[str, Callable[[], object]], seconds: float, warm_up: int = 10
) -> Samples:
    """As `sample`, for things that are compared with each other: each has its turn, again and
    again, for about so many seconds each. The speed of a machine changes within a run."""
    for work in works.values():
        for _ in range(warm_up):
            work()
    samples: Samples = {case: [] for case in works}
    until = time.perf_counter() + paced(seconds) * len(works)
    while time.perf_counter() < until or len(next(iter(samples.values()))) < 5:
        for case, work in works.items():
            start = time.perf_counter()
            work()
            samples[case].append(time.perf_counter() - start)
    return samples


class Peer:
    """What a measurement may use: the rpc and autograd modules of one implementation."""

    def __init__(self, name: str, rpc: Any, autograd: Any = None) -> None:
        self.name = name
        self.rpc = rpc
        self.autograd = autograd


def run_peer(name: str, measure: Callable[[Peer], Samples], workers: int) -> Samples:
    """In a process of its own: start the workers of one peer and measure."""
    if name == "telegrad":
        import telegrad
        import telegrad.autograd

        peer = Peer(name, telegrad.rpc, telegrad.autograd)
        return telegrad.run(lambda: measure(peer), workers=workers)
    if name in ("ray", "grpc"):
        from benchmarks import others

        opened = others.ray_actor() if name == "ray" else others.grpc_server()
        with opened as calls:
            return measure(Peer(name, calls))
    return _run_stock(measure, workers)


def _run_stock(measure: Callable[[Peer], Samples], workers: int) -> Samples:
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as stock
    import torch.multiprocessing as multiprocessing

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=_serve_stock, args=(rank, workers + 1))
        for rank in range(1, workers + 1)
    ]
    for child in children:
        child.start()
    _join_stock("main", 0, workers + 1)
    try:
        return measure(Peer("stock", stock, dist_autograd))
    finally:
        stock.shutdown()
        for child in children:
            child.join()


def _join_stock(name: str, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed.rpc as stock

    torch.set_num_threads(1)
    stock.init_rpc(name, rank=rank, world_size=world_size)


def _serve_stock(rank: int, world_size: int) -> None:
    import torch.distributed.rpc as stock

    _join_stock(f"worker{rank}", rank, world_size)
    stock.shutdown()


def compare(
    program: str,
    measure: Callable[[Peer], Samples],
    *,
    workers: int = 1,
    derived: Callable[[Samples], dict[str, float]] | None = None,
) -> None:
    """The main function of a benchmark program."""
    parser = argparse.ArgumentParser(description=f"python -m {program}")
    parser.add_argument("--rounds", type=int, default=3, help="how often each peer has its turn")
    parser.add_argument("--json", help="also write all medians to this file")
    parser.add_argument("--pace", type=float, default=1.0, help="0.5: measure half as long")
    parser.add_argument("--peer", choices=CALLERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        global _pace
        _pace = arguments.pace
        print(json.dumps(run_peer(arguments.peer, measure, workers)))
        return
    gathered: dict[str, Samples] = {peer: {} for peer in PEERS}
    for number in range(arguments.rounds):
        for peer in PEERS:
            print(f"round {number + 1} of {arguments.rounds}: {peer}", file=sys.stderr, flush=True)
            for case, times in turn(program, peer, arguments.pace).items():
                gathered[peer].setdefault(case, []).extend(times)
    rows = table(gathered)
    for row in rows:
        print(row)
    if derived is not None:
        for peer in PEERS:
            for case, value in derived(gathered[peer]).items():
                print(f"{peer:>9}  {case}: {value:.3f}")
    if arguments.json:
        medians = {p: {c: statistics.median(t) for c, t in s.items()} for p, s in gathered.items()}
        with open(arguments.json, "w") as file:
            json.dump(medians, file, indent=1)


def turn(program: str, peer: str, pace: float) -> Samples:
    """Let one peer run one program's measurements, in processes that end with it."""
    command = [sys.executable, "-m", program, "--peer", peer, "--pace", str(pace)]
    # Stock torch warns of itself in every process.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    # Without a buffer Python drops what a pipe does not take in one go.
    environment.pop("PYTHONUNBUFFERED", None)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:
        try:
            output, _ = process.communicate(timeout=TURN_SECONDS)
        finally:
            # What a peer left behind would be measured with the next one.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    result: Any = json.loads(output.strip().splitlines()[-1])
    return {case: list(times) for case, times in result.items()}


def table(gathered: dict[str, Samples]) -> list[str]:
    """Medians and 99th percentiles of both peers, and the ratio of the medians."""
    head = f"{'':34} {'stock':>10} {'p99':>10} {'telegrad':>10} {'p99':>10} {'ratio':>7}"
    rows = [head]
    for case in gathered["telegrad"]:
        stock, ours = gathered["stock"].get(case), gathered["telegrad"][case]
        cells = [f"{case:34}"]
        for times in (stock, ours):
            if times is None:
                cells += [f"{'-':>10}", f"{'-':>10}"]
            else:
                cells += [f"{show(statistics.median(times)):>10}", f"{show(_p99(times)):>10}"]
        ratio = statistics.median(ours) / statistics.median(stock) if stock else float("nan")
        rows.append(" ".join((*cells, f"{ratio:7.2f}")))
    return rows


def _p99(times: list[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]


def show(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds:.2f} s"
