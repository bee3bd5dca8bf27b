"""What `_get_current_rpc_agent()` gives: a view of telegrad's node with the methods of an agent."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlparse

import torch

from telegrad.compat.stock import Store, _TensorPipeRpcBackendOptionsBase, is_cpu_only
from telegrad.rpc import api as native
from telegrad.rpc.current import current_node, find_node
from telegrad.rpc.node import Node
from telegrad.rpc.rendezvous import Rendezvous
from telegrad.rpc.worker import WorkerInfo
from telegrad.wire.address import own_address_towards

_SERVICE = "torch agent"


class RpcAgent:
    """Any agent."""


class TensorPipeAgent(RpcAgent):
    """Telegrad, for code that asks for the agent of torch RPC."""

    def __init__(self, node: Node, options: _TensorPipeRpcBackendOptionsBase) -> None:
        self._node = node
        self._options = options

    @property
    def store(self) -> Store | None:
        visit: Rendezvous = self._node.services["rendezvous"]
        return visit.store

    @property
    def is_static_group(self) -> bool:
        return bool(self._node.services["static"])

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        return self._node.info if worker is None else self._node.members.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return self._node.members.infos()

    def get_debug_info(self) -> dict[str, str]:
        """What there is to count; telegrad has no pool of threads that a size would bound."""
        return {
            "agent.num_pending_requests": str(self._node.calls.total()),
            "agent.thread_pool_size": str(self._options.num_worker_threads),
        }

    def get_metrics(self) -> dict[str, str]:
        return self.get_debug_info()

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        self._node.services["closing"].close(timeout)

    def shutdown(self) -> None:
        if find_node() is self._node:
            native.shutdown(graceful=False)

    def sync(self) -> None:
        """Every call that this worker began is over."""
        for pending in self._node.calls.all():
            self._node.transport.wait(pending)

    def _get_device_map(self, worker: object) -> dict[torch.device, torch.device]:
        return {}

    def _get_backend_options(self) -> _TensorPipeRpcBackendOptionsBase:
        return self._options


def start(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    options: _TensorPipeRpcBackendOptionsBase,
    agent_class: type[TensorPipeAgent] = TensorPipeAgent,
) -> TensorPipeAgent:
    """Join the job that meets in a store."""
    _refuse_devices(options)
    native.init_rpc(
        name,
        rank=None if rank < 0 else rank,
        world_size=world_size,
        store=store,
        host=_reachable_at(options.init_method),
        rpc_timeout=options.rpc_timeout,
        join_timeout=options.rpc_timeout if options.rpc_timeout > 0 else 1800.0,
    )
    node = current_node()
    agent = node.services[_SERVICE] = agent_class(node, options)
    return agent


def current_agent() -> TensorPipeAgent:
    agent: TensorPipeAgent | None = current_node().services.get(_SERVICE)
    if agent is None:
        raise RuntimeError(
            "This job was joined with telegrad.rpc.init_rpc, not with torch.distributed.rpc: "
            "it has no agent. Use telegrad's own functions."
        )
    return agent


def _refuse_devices(options: _TensorPipeRpcBackendOptionsBase) -> None:
    if options.devices or not is_cpu_only(options.device_maps):
        raise RuntimeError(
            "telegrad does not move tensors between devices on the way: leave `device_maps` and "
            "`devices` out, and use .cpu() and .to(device) at both ends of a call."
        )


def _reachable_at(init_method: str) -> str | None:
    """This host's address towards the others', None if all are here.

    `env://` and `tcp://` name the host where the workers meet: the way there is the way to all.
    """
    if "TELEGRAD_HOST" in os.environ:
        return os.environ["TELEGRAD_HOST"]
    url: Any = urlparse(init_method)
    if url.scheme == "tcp" and url.hostname:
        return own_address_towards(url.hostname, url.port or 0)
    if url.scheme == "env" and "MASTER_ADDR" in os.environ:
        port = os.environ.get("MASTER_PORT", "0")
        return own_address_towards(os.environ["MASTER_ADDR"], int(port))
    return None
