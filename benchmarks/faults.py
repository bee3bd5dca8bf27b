"""The same faults on stock torch RPC and on telegrad: how a caller learns of them, and when.

Two real processes, "caller" and "callee". The fault strikes while the caller waits; what it then
learns is printed with the time since the fault. Who has learned nothing after `PATIENCE` seconds is
ended. Calls have no deadline of their own, so that only the loss itself can end them.

    python -m benchmarks.faults [words of a fault's name]
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.netns import Hosts, enter, why_not

PATIENCE = 20.0
LONG = 600.0
SYSTEMS = ("stock", "telegrad")


@dataclass(frozen=True)
class Fault:
    """What the caller does, and what strikes the callee while it does."""

    name: str
    act: Callable[[Any, Any], None]
    strike: Callable[[int, Hosts | None], None]
    needs_hosts: bool = False


def sleep_long() -> None:
    time.sleep(LONG)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(LONG)
        return gradient


def slow_to_differentiate(x: torch.Tensor) -> torch.Tensor:
    return SlowBackward.apply(x)


def call(rpc: Any, autograd: Any) -> None:
    rpc.rpc_sync("callee", sleep_long, timeout=0)


def differentiate(rpc: Any, autograd: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        y = rpc.rpc_sync("callee", slow_to_differentiate, args=(x,))
        autograd.backward(context, [y.sum()])


def shut_down(rpc: Any, autograd: Any) -> None:
    rpc.shutdown()


def kill(pid: int, hosts: Hosts | None) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int, hosts: Hosts | None) -> None:
    os.kill(pid, signal.SIGSTOP)


def cut_off(pid: int, hosts: Hosts | None) -> None:
    assert hosts is not None
    hosts.cut_off("callee")


FAULTS = [
    Fault("callee killed during a call", call, kill),
    Fault("callee stopped during a call", call, stop),
    Fault("callee's host cut off during a call", call, cut_off, needs_hosts=True),
    Fault("worker killed during backward", differentiate, kill),
    Fault("worker killed before shutdown", shut_down, kill),
]


def modules(system: str) -> tuple[Any, Any]:
    if system == "stock":
        import torch.distributed.autograd as autograd
        import torch.distributed.rpc as rpc
    else:
        from telegrad import autograd, rpc  # type: ignore[no-redef]
    return rpc, autograd


def work(
    system: str, name: str, meeting: str, host: str | None, space: str, channel: Connection
) -> None:
    if space:
        enter(space)
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    rpc, autograd = modules(system)
    rank = ("caller", "callee").index(name)
    if system == "stock":
        options = rpc.TensorPipeRpcBackendOptions(init_method=meeting)
        rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    else:
        more = {"host": host, "transports": ("tcp",)} if host else {}
        rpc.init_rpc(name, rank=rank, world_size=2, init_method=meeting, **more)
    channel.send("ready")
    act = channel.recv()
    if name == "callee":
        time.sleep(LONG)
    try:
        act(rpc, autograd)
        channel.send("returned")
    except BaseException as error:
        channel.send(f"{type(error).__name__}: {error}")
    os._exit(0)


def observe(system: str, fault: Fault) -> str:
    """What the caller learned, and when."""
    with ExitStack() as stack:
        hosts = None
        if fault.needs_hosts:
            hosts = Hosts(("caller", "callee"))
            stack.callback(hosts.close)
        meeting = "file://" + stack.enter_context(tempfile.TemporaryDirectory()) + "/store"
        processes, channels = {}, {}
        for name in ("caller", "callee"):
            channels[name], theirs = mp.get_context("spawn").Pipe()
            address = hosts.addresses[name] if hosts else None
            space = hosts.namespace(name) if hosts else ""
            args = (system, name, meeting, address, space, theirs)
            processes[name] = mp.get_context("spawn").Process(target=work, args=args)
            processes[name].start()
            stack.callback(processes[name].kill)
        for channel in channels.values():
            if not channel.poll(60) or channel.recv() != "ready":
                return "did not start"
        return _strike(fault, processes, channels, hosts)


def _strike(fault: Fault, processes: Any, channels: Any, hosts: Hosts | None) -> str:
    before = fault.act is shut_down
    if before:
        fault.strike(processes["callee"].pid, hosts)
        time.sleep(0.5)
    struck = time.monotonic()
    channels["caller"].send(fault.act)
    if not before:
        time.sleep(2.0)  # until the caller waits; companions have been heard by then
        fault.strike(processes["callee"].pid, hosts)
        struck = time.monotonic()
    if not channels["caller"].poll(PATIENCE):
        return f"nothing within {PATIENCE:g} s"
    try:
        said = channels["caller"].recv()
    except EOFError:
        said = "the caller's process died"
    return f"after {time.monotonic() - struck:.2f} s: {said.splitlines()[0]}"


def main() -> int:
    for fault in FAULTS:
        if not all(word in fault.name for word in sys.argv[1:]):
            continue
        print(fault.name)
        reason = why_not() if fault.needs_hosts else None
        for system in SYSTEMS:
            print(f"  {system:9}", reason or observe(system, fault), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
