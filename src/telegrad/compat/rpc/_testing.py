"""Stands for `torch.distributed.rpc._testing`: the backend FAULTY_TENSORPIPE.

It is telegrad with `telegrad.testing.interfere`, under torch's names for messages. As in stock,
importing this registers the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from telegrad.autograd.censuses import TOPIC_RELEASE
from telegrad.compat import stock
from telegrad.compat.rpc import backend_registry
from telegrad.compat.rpc.agent import TensorPipeAgent, start
from telegrad.compat.rpc.calls import Udf
from telegrad.compat.stock import Store, _TensorPipeRpcBackendOptionsBase
from telegrad.rpc.current import current_node
from telegrad.rpc.reference_mail import TOPIC as TOPIC_REFERENCE
from telegrad.testing.interference import Delay, Interference, Lose, Message


def is_available() -> bool:
    return True


class FaultyTensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Options of the backend, with the messages that it loses and those that it holds back."""

    def __init__(
        self,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: list[str],
        messages_to_delay: dict[str, float],
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads, None, None, rpc_timeout, init_method)
        self.messages_to_fail = messages_to_fail
        self.messages_to_delay = messages_to_delay
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent whose messages are lost and late."""


def _construct_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int,
    messages_to_fail: list[str],
    messages_to_delay: dict[str, float],
    num_fail_sends: int,
    **kwargs: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads,
        rpc_timeout,
        init_method,
        messages_to_fail,
        messages_to_delay,
        num_fail_sends,
    )


def _start_troubled(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: Any,
) -> TensorPipeAgent:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`. "
            f"{rpc_backend_options}"
        )
    rules = _rules(rpc_backend_options)
    agent = start(store, name, rank, world_size, rpc_backend_options, FaultyTensorPipeAgent)
    Interference(*rules).begin(current_node())
    return agent


def _rules(options: FaultyTensorPipeRpcBackendOptions) -> list[Lose | Delay]:
    rules: list[Lose | Delay] = []
    for name in options.messages_to_fail:
        # Stock fails each attempt to send a message so many times, and repeats only its own.
        own = name in _OWN
        rules.append(Lose(_which(name), options.num_fail_sends if own else None))
    for name, seconds in options.messages_to_delay.items():
        rules.append(Delay(_which(name), seconds))
    return rules


def _which(name: str) -> Callable[[Message], bool]:
    if name in _OWN:
        topic = _OWN[name]
        return lambda message: message.kind == "own" and message.subject == topic
    if name in _FETCHES:
        return lambda message: message.kind == "fetch"
    if name in _CALLS:
        kind, compiled = _CALLS[name]
        return lambda message: message.kind == kind and _is_compiled(message.subject) is compiled
    known = ", ".join([*_CALLS, *_FETCHES, *_OWN])
    raise ValueError(f"telegrad has no message {name}: there are {known}.")


def _is_compiled(subject: object) -> bool:
    """Whether torch would send a call without pickle: operators and functions of TorchScript."""
    function = subject.function if isinstance(subject, Udf) else subject
    return isinstance(function, torch.jit.ScriptFunction) or stock.is_operator(function)


_CALLS = {
    "SCRIPT_CALL": ("call", True),
    "PYTHON_CALL": ("call", False),
    "SCRIPT_REMOTE_CALL": ("remote", True),
    "PYTHON_REMOTE_CALL": ("remote", False),
}
_FETCHES = ("SCRIPT_RREF_FETCH_CALL", "PYTHON_RREF_FETCH_CALL")
_OWN = {
    "RREF_FORK_REQUEST": TOPIC_REFERENCE,
    "RREF_CHILD_ACCEPT": TOPIC_REFERENCE,
    "RREF_USER_DELETE": TOPIC_REFERENCE,
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": TOPIC_RELEASE,
}

if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend("FAULTY_TENSORPIPE", _construct_options, _start_troubled)
