"""Which node the calling thread works for.

A process has one as a rule. Under the simulator, and where fakes are traced, a thread has its own.
A process that was forked from a worker has none, and is told why.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from telegrad.rpc.errors import NotInitialized

if TYPE_CHECKING:
    from telegrad.rpc.node import Node


class _Thread(threading.local):
    node: Node | None = None


_local = _Thread()
_process_node: Node | None = None
_forked = False


def _leave_the_job_to_the_parent() -> None:
    """In a process that was forked: the connections of the job are its parent's, and what this one
    wrote there would be taken for the parent's own."""
    global _forked
    nodes = [node for node in (find_thread_node(), _process_node) if node is not None]
    for node in nodes:
        node.closed = True
    _forked = _forked or bool(nodes)
    _local.node = None
    set_process_node(None)


os.register_at_fork(after_in_child=_leave_the_job_to_the_parent)


def not_initialized(message: str | None = None) -> NotInitialized:
    """Why there is no job here, in these words unless it is for being forked."""
    if not _forked:
        return NotInitialized(message)
    return NotInitialized(
        "This process was forked from a worker, and the job's connections are not its own: make "
        "the call in the worker itself, or start the process by spawn and let it join by init_rpc."
    )


def current_node() -> Node:
    node = _local.node or _process_node
    if node is None:
        raise not_initialized()
    return node


def find_node() -> Node | None:
    return _local.node or _process_node


def find_thread_node() -> Node | None:
    """The node that the calling thread works for, if that is not the process's."""
    return _local.node


def set_process_node(node: Node | None) -> None:
    global _process_node, _forked
    _process_node = node
    if node is not None:
        _forked = False


def set_thread_node(node: Node | None) -> None:
    """Let the calling thread be (a thread of) that worker: several workers in one process."""
    _local.node = node
