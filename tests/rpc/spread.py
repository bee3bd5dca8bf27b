"""Jobs with one worker per host."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from telegrad import rpc
from tests.netns import Hosts, enter
from tests.rpc.fleet import Nursery, Process


class SpreadJob:
    """One worker per host; the store is beside them all."""

    def __init__(self, nursery: Nursery, network: Hosts, **options: Any) -> None:
        self.network = network
        self.store = TCPStore(network.gateway, 0, is_master=True, wait_for_workers=False)
        self.processes = {name: nursery.start() for name in network.addresses}
        place = {"size": len(network.addresses), "store": (network.gateway, self.store.port)}
        joining = [
            process.begin(
                join_from,
                network.namespace(name),
                name,
                rank,
                host=network.addresses[name],
                **place,
                **options,
            )
            for rank, (name, process) in enumerate(self.processes.items())
        ]
        for each in joining:
            each.result(60)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]


def join_from(
    namespace: str, name: str, rank: int, size: int, store: tuple[str, int], **options: Any
) -> None:
    enter(namespace)
    client = TCPStore(
        *store, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    rpc.init_rpc(name, rank=rank, world_size=size, store=client, transports=("tcp",), **options)
