"""What users call."""

from __future__ import annotations

import atexit
import math
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn

from torch.compiler import is_dynamo_compiling
from torch.distributed import Store  # type: ignore[attr-defined]

from telegrad.rpc.agent import Agent
from telegrad.rpc.arguments import check_bound, check_seconds, check_whole
from telegrad.rpc.closing import IT_IS_OVER, Closing
from telegrad.rpc.current import current_node, find_node, set_process_node
from telegrad.rpc.errors import CallTimeout, JobClosed, NotInitialized, TelegradError
from telegrad.rpc.futures import CallFuture, begin_async
from telegrad.rpc.limits import Limits
from telegrad.rpc.meeting import Meeting
from telegrad.rpc.members import Members
from telegrad.rpc.node import DEFAULT_TIMEOUT, LIVENESS, Node
from telegrad.rpc.outside import outside_of_graphs
from telegrad.rpc.rendezvous import Rendezvous, check_rank
from telegrad.rpc.room import room_to
from telegrad.rpc.rooms import RoomGivenUp
from telegrad.rpc.rref import RRef, remote_reference
from telegrad.rpc.runtime import ThreadRuntime, Threads
from telegrad.rpc.store import open_store
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire import interrupts
from telegrad.wire.address import is_loopback
from telegrad.wire.codec import Trust
from telegrad.wire.group import check_backend
from telegrad.wire.keys import JobKey

To = str | int | WorkerInfo
Args = tuple[Any, ...] | list[Any]

HOST_VARIABLE = "TELEGRAD_HOST"
PAUSE = 0.005
PAUSE_FOR_RETURN = 0.02
PATIENCE_AT_THE_END = 1.0
NEEDED_TO_JOIN = 6
JOIN_TIMEOUT = 60.0
_starting = threading.Lock()


@outside_of_graphs
def init_rpc(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    store: Store | None = None,
    key: bytes | None = None,
    host: str | None = None,
    plaintext: bool = False,
    transports: Collection[str] = ("unix", "tcp"),
    tensors: str | None = None,
    trust: str = "code",
    limits: Limits | None = None,
    rpc_timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float | None = None,
    liveness: float = LIVENESS,
    life: int | None = None,
) -> None:
    """Join a job under a name that no other worker has.

    The workers meet through one of torch's stores: an `init_method` (`env://`, `tcp://host:port`,
    `file:///path`) or a `store` that exists. With a `world_size` the call returns when all have
    joined; without one, workers come and go. `rank` is found as torch finds it, or given out.

    `key` is the job's secret; by default it is taken from TELEGRAD_KEY_FILE or TELEGRAD_KEY, and a
    job that has none makes one that works for this user on this host. `host` (or
    TELEGRAD_HOST) is the address at which other hosts reach this worker, over TLS unless both ends
    say `plaintext`; without it nothing listens but a Unix socket. `transports`
    says where it listens at all: with `("tcp",)` it is called over TCP on its own host, too.
    With `tensors="gloo"` large tensors travel by process groups of torch.distributed, in the clear.

    `join_timeout` is how long this worker waits for the others, in seconds: by default 60, or as
    long as the `store` that was given waits. Who has given up may try again in the same place.

    `rpc_timeout` bounds every call that does not say otherwise, in seconds (0: no bound);
    `liveness` is how long a broken connection may take to come back before its worker counts as
    lost. With `trust="data"` nothing that arrives is ever unpickled, and others can call only
    functions marked with `telegrad.export`. `limits` bounds what each of them may send and have
    run at a time; by default little is allowed under `trust="data"`.

    `life` is for whoever starts dead workers anew, as `telegrad.run(restarts=)` does: 0 for all at
    first, and for a worker that takes the place of a dead one, how many had it before.
    """
    with _starting:
        if find_node() is not None:
            raise TelegradError(
                "RPC is already initialized in this process: call telegrad.rpc.shutdown() first"
            )
        host = host or os.environ.get(HOST_VARIABLE)
        trusted = _check_options(trust, transports, host, limits)
        _check_tensors(tensors, trusted, host, plaintext)
        _check_place(name, rank, world_size, life)
        check_bound("rpc_timeout", rpc_timeout)
        if join_timeout is not None:
            check_seconds("join_timeout", join_timeout)
        check_seconds("liveness", liveness)
        if store is not None and not isinstance(store, Store):
            raise TypeError(f"store={store!r}: give one of torch's stores, or an init_method=")
        if join_timeout is None:
            join_timeout = _patience_of(store)
        job_key = JobKey(key) if key is not None else None
        # From here on: what is half joined is not left so.
        interrupts.install("job")
        try:
            with room_to("join a job", NEEDED_TO_JOIN):
                serves = False
                if store is None:
                    store, rank, world_size = open_store(
                        name, init_method, rank, world_size, join_timeout
                    )
                    # Torch has that one serve the store, if any worker does.
                    serves = rank == 0
                visit = Rendezvous(store, name, rank, world_size, join_timeout, life, serves)
                try:
                    meeting, members = _enter(visit, job_key, host, plaintext, transports, tensors)
                except BaseException:
                    visit.leave()
                    raise
                if trusted is Trust.DATA:
                    meeting.arena_bytes = 0
                threads = Threads()
                runtime = ThreadRuntime(threads)
                node = Node(
                    visit.info,
                    members,
                    runtime,
                    trust=trusted,
                    limits=limits,
                    timeout=rpc_timeout,
                    liveness=liveness,
                )
                try:
                    agent = Agent(node, threads, meeting, liveness)
                except BaseException:
                    visit.leave()
                    meeting.close()
                    raise
                node.transport = runtime.transport = agent
                node.services["closing"] = Closing(node)
                node.services["rendezvous"] = visit
                node.services["static"] = world_size is not None
                set_process_node(node)
                try:
                    agent.start(announce=bool(life))
                except BaseException:
                    visit.leave()
                    set_process_node(None)
                    agent.close()
                    threads.close()
                    raise
        except BaseException:
            interrupts.uninstall("job")
            raise


def _patience_of(store: Store | None) -> float:
    """How long a store waits by itself; torch writes 0 for one that has no bound."""
    own: float = 0 if store is None else store.timeout.total_seconds()  # type: ignore[attr-defined]
    return own or JOIN_TIMEOUT


def _check_options(
    trust: str, transports: Collection[str], host: str | None, limits: Limits | None
) -> Trust:
    unknown = sorted(set(transports) - {"unix", "tcp"})
    if isinstance(transports, str) or unknown or not transports:
        raise ValueError(f"transports={transports!r}: give some of ('unix', 'tcp')")
    if "unix" not in transports and host is None:
        raise ValueError("a worker that is called over TCP only needs an address: give host=")
    if trust not in ("code", "data"):
        raise ValueError(f"trust={trust!r}: it is 'code' or 'data'")
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(f"limits={limits!r}: give a telegrad.rpc.Limits(...)")
    return Trust(trust)


def _check_tensors(tensors: str | None, trust: Trust, host: str | None, plaintext: bool) -> None:
    if tensors is None:
        return
    check_backend(tensors)
    if trust is Trust.DATA:
        raise ValueError(
            f"tensors={tensors!r} and trust='data' do not go together: a process group believes "
            "whoever reaches its port"
        )
    if host is not None and not is_loopback(host) and not plaintext:
        raise ValueError(
            f"tensors={tensors!r} sends tensors between hosts in the clear, and this job speaks "
            "TLS: give plaintext=True as well if the network is your own, or leave tensors out"
        )


def _check_place(name: str, rank: int | None, world_size: int | None, life: int | None) -> None:
    WorkerInfo(name, 0)
    if world_size is not None:
        check_whole("world_size", world_size, least=1)
    if rank is not None:
        check_whole("rank", rank, least=None if world_size else 0)
        if world_size is not None:
            check_rank(name, rank, world_size)
    if life is not None:
        check_whole("life", life, least=0)


def _enter(
    visit: Rendezvous,
    key: JobKey | None,
    host: str | None,
    plaintext: bool,
    transports: Collection[str],
    tensors: str | None,
) -> tuple[Meeting, Members]:
    while True:
        try:
            meeting = visit.prepare(key, host, plaintext, transports, tensors)
            try:
                return meeting, visit.join(meeting)
            except BaseException:
                meeting.close()
                raise
        except RoomGivenUp:
            visit.move_on()


@outside_of_graphs
def shutdown(graceful: bool = True, timeout: float = 0) -> None:
    """Leave the job.

    With `graceful=True` it waits until every worker has called `shutdown` and no call is under way
    anywhere; in a job without a world size, where others stay, until this worker's own calls have
    ended. `timeout` bounds that in seconds (0: no bound). With `graceful=False` it leaves at once,
    and what others still wait for from here ends with an error that says so.
    """
    node = current_node()
    agent = node.transport
    check_bound("timeout", timeout)
    if not isinstance(agent, Agent):
        raise TelegradError(
            f"Worker {node.info.name!r} is simulated: its job ends by itself when every main "
            "function has returned and all has come to rest. Leave shutdown to the code that calls "
            "init_rpc, or to telegrad.run."
        )
    try:
        if graceful:
            if node.services["static"]:
                node.services["closing"].close(timeout)
            else:
                _await_own_calls(node, timeout)
            _within(node, partial(_release, node))
    finally:
        try:
            _within(node, node.services["rendezvous"].leave)
        finally:
            set_process_node(None)
            agent.close(job_is_over=node.services["closing"].is_over())
            agent.threads.close()
            interrupts.uninstall("job")


def _await_own_calls(node: Node, timeout: float) -> None:
    until = node.runtime.now() + timeout if timeout > 0 else math.inf
    pause = node.runtime.condition()
    with pause:
        while node.calls.total() and node.runtime.now() < until:
            pause.wait(PAUSE)


def _within(node: Node, work: Callable[[], object]) -> None:
    """Do what needs another, but not for longer than a moment: it may not answer any more."""
    done = threading.Event()

    def do() -> None:
        try:
            work()
        finally:
            done.set()

    node.runtime.spawn(do)
    done.wait(PATIENCE_AT_THE_END)


def _release(node: Node) -> None:
    """Drop what others keep for this worker."""
    node.values.bury()
    node.values.release_all()


@atexit.register
def _leave_at_exit() -> None:
    """A process that ends without a shutdown says so, rather than to leave broken links."""
    node = find_node()
    if node is not None and isinstance(node.transport, Agent):
        set_process_node(None)
        node.transport.close()


def rpc_sync(
    to: To,
    func: Callable[..., Any],
    args: Args | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:
    """Call a function on another worker (or on this one) and wait for its result.

    `to` is a worker's name, its rank or its `WorkerInfo`. An error on the other side is raised here
    with its own type; the remote traceback is its `__cause__`. `timeout` in seconds, 0 for none.

        rpc_sync("worker1", torch.add, args=(torch.ones(2), 3))
    """
    if is_dynamo_compiling():
        return _traced().rpc_sync(to, func, args, kwargs, timeout)
    node = current_node()
    check_call(func, args, kwargs)
    pending = node.call(node.members.find(to), func, args or (), kwargs, timeout)
    if not pending.done:
        try:
            node.transport.wait(pending)
        except BaseException:
            node.abandon(pending)
            raise
    value = node.outcome(pending)
    # The last step: whoever ends a timer of its own thereafter hears nothing of it any more.
    if interrupts.put_off:
        interrupts.run_put_off()
    return value


def rpc_async(
    to: To,
    func: Callable[..., Any],
    args: Args | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> CallFuture:
    """As `rpc_sync`, but returns a `torch.futures.Future` at once. It can be awaited, too."""
    if is_dynamo_compiling():
        traced: CallFuture = _traced().rpc_async(to, func, args, kwargs, timeout)
        return traced
    node = current_node()
    check_call(func, args, kwargs)
    future = begin_async(node, node.members.find(to), func, args or (), kwargs, timeout)
    if interrupts.put_off:
        interrupts.run_put_off()
    return future


def remote(
    to: To,
    func: Callable[..., Any],
    args: Args | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> RRef[Any]:
    """Call a function on another worker and return a reference to its result at once."""
    if is_dynamo_compiling():
        traced: RRef[Any] = _traced().remote(to, func, args, kwargs, timeout)
        return traced
    node = current_node()
    check_call(func, args, kwargs)
    reference = remote_reference(node, node.members.find(to), func, args or (), kwargs, timeout)
    if interrupts.put_off:
        interrupts.run_put_off()
    return reference


def _traced() -> Any:
    """The same functions for Dynamo, which makes nodes of a graph of them."""
    from telegrad.compile import traced

    return traced


def check_call(func: object, args: object = None, kwargs: object = None) -> None:
    """Raise a sentence if a call cannot be made of these."""
    if not callable(func):
        raise TypeError(f"{func!r} cannot be called: give the function itself, not its name")
    if args is not None and not isinstance(args, tuple | list):
        refuse_args(type(args).__name__)
    if kwargs is not None and not isinstance(kwargs, dict):
        refuse_kwargs(type(kwargs).__name__)


def refuse_args(kind: str) -> NoReturn:
    raise TypeError(f"args is a {kind}: give a tuple, as args=(x,) for one")


def refuse_kwargs(kind: str) -> NoReturn:
    raise TypeError(f"kwargs is a {kind}: give a dict of names and values")


def get_worker_info(name: To | None = None) -> WorkerInfo:
    """The `WorkerInfo` of a worker; without a name that of this worker."""
    node = current_node()
    return node.info if name is None else node.members.find(name)


def get_worker_infos() -> list[WorkerInfo]:
    """All workers of the job that this one knows of."""
    return current_node().members.infos()


@outside_of_graphs
def wait_for_worker(to: str | int, timeout: float | None = None) -> WorkerInfo:
    """The worker of that name or rank, when it is there: one that died may be started anew.

    `timeout` in seconds, 0 for none; by default that of the job's calls. In a job in which nobody
    comes back, `WorkerLost` is raised at once for a worker that is gone.

        wait_for_worker("ps", timeout=30)
    """
    node = current_node()
    limit = node.timeout if timeout is None else timeout
    check_bound("timeout", limit)
    until = node.runtime.now() + limit if limit > 0 else math.inf
    pause = node.runtime.condition()
    while True:
        if node.closed:
            raise JobClosed(f"Worker {node.info.name!r} shut down while it waited for {to!r}.")
        info = node.members.find(to)
        if not node.is_lost(info.id):
            return info
        if not node.members.may_return or node.none_returns is not None:
            raise node.loss_of(info.id)
        if node.runtime.now() >= until:
            raise CallTimeout(
                f"Worker {info.name!r} is gone ({node.lost_workers()[info.id]}), and no other came "
                f"in its place within {limit:g} s."
            )
        with pause:
            pause.wait(PAUSE_FOR_RETURN)


def give_up_on_lost_workers(why: str) -> None:
    """For whoever starts lost workers anew and cannot any more: the errors that follow say why."""
    node = find_node()
    if node is not None:
        node.none_returns = why


@outside_of_graphs
def on_worker_lost(callback: Callable[[WorkerInfo, str], object]) -> None:
    """Have `callback(worker, reason)` called, in a thread of its own, when a worker is gone.

    By then the calls that waited for it have failed. A worker that leaves while others stay counts
    too; those that leave because every worker has called `shutdown` do not.

        on_worker_lost(lambda worker, reason: print(worker.name, reason))
    """
    node = current_node()
    if not callable(callback):
        raise TypeError(f"{callback!r} cannot be called: give a function of worker and reason")

    def told(worker: int, reason: str) -> None:
        if reason != IT_IS_OVER:
            info = node.members.member(worker).info
            node.runtime.spawn(partial(tell, info, reason))

    def tell(info: WorkerInfo, reason: str) -> None:
        closing = node.services.get("closing")
        if closing is None or not closing.is_over():
            callback(info, reason)

    node.on_lost(told)


def is_initialized() -> bool:
    return find_node() is not None


@outside_of_graphs
def debug_info() -> dict[str, Any]:
    """What this worker holds and waits for: calls, references, links, threads."""
    node = current_node()
    info: dict[str, Any] = {
        "calls in flight": [pending.describe() for pending in node.calls.all()],
        "references": node.values.debug_info(),
        "lost workers": {node.members.name(w): why for w, why in node.lost_workers().items()},
    }
    if isinstance(node.transport, Agent):
        info["links"] = node.transport.debug_info()
        info["bytes"] = node.transport.bytes_moved()
    return info


__all__ = [
    "NotInitialized",
    "debug_info",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_initialized",
    "on_worker_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_for_worker",
]
