"""The node that a function sees while its owner runs it on fake tensors.

Calls that the function makes are not made: their owners are asked what they would return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from telegrad.rpc.errors import TelegradError
from telegrad.rpc.worker import WorkerInfo

if TYPE_CHECKING:
    from telegrad.rpc.node import Node


class Answered:
    """A call that is done before it begins."""

    done = True
    error: BaseException | None = None

    def __init__(self, result: Any) -> None:
        self.result = result

    def complete(self) -> None:
        return None


class NodeOfFakes:
    """The part of a node that `rpc_sync` and `rpc_async` need."""

    closed = False

    def __init__(self, node: Node) -> None:
        self._node = node
        self.info = node.info
        self.members = node.members
        self.timeout = node.timeout
        self.services = node.services

    def call(
        self,
        to: WorkerInfo,
        target: Any,
        args: Any,
        kwargs: dict[str, Any] | None,
        timeout: float | None = None,
        on_settled: Callable[[Any], None] | None = None,
    ) -> Answered:
        if isinstance(target, str):
            raise TelegradError(
                f"A function that a compiled function calls uses references ({target!r}), so what "
                "it returns cannot be found out on fake tensors. Declare it with "
                "telegrad.compile.declare_fake, or call it outside of the compiled function."
            )
        from telegrad.compile.traced import result_on_fakes

        pending = Answered(result_on_fakes(self._node, to, target, args, kwargs or {}))
        if on_settled is not None:
            on_settled(pending)
        return pending

    def __getattr__(self, name: str) -> Any:
        raise TelegradError(
            "A function that a compiled function calls makes references, or asks its worker for "
            f"more than to call others ({name!r}), so what it returns cannot be found out on fake "
            "tensors. Declare it with telegrad.compile.declare_fake, or call it outside of the "
            "compiled function."
        )

    def wait(self, pending: Answered) -> Any:
        return pending.result

    def outcome(self, pending: Answered) -> Any:
        return pending.result
