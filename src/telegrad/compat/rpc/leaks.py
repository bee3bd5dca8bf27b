"""Whether somebody still refers to a value of this worker when the job ends.

Code may ask for that with `torch.distributed.rpc.api._ignore_rref_leak = False`. By then every
worker has let go of what it holds; the messages that say so are given a moment to come in.
"""

from __future__ import annotations

from telegrad.rpc.node import Node

MOMENT = 2.0
PAUSE = 0.01


def await_releases(node: Node) -> None:
    """Until no other worker refers to a value here, but for a moment only."""
    until = node.runtime.now() + MOMENT
    changed = node.runtime.condition()
    while node.values.debug_info()["forks"] and node.runtime.now() < until:
        with changed:
            changed.wait(PAUSE)


def describe_leaks(node: Node) -> str | None:
    forks = node.values.debug_info()["forks"]
    if not forks:
        return None
    return (
        f"Leaking RRef: other workers still hold {forks} references to values of worker "
        f"{node.info.name!r} at shutdown. Drop them before, or leave "
        "torch.distributed.rpc.api._ignore_rref_leak at True."
    )
