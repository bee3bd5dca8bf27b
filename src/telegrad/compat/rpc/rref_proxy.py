"""Stands for `torch.distributed.rpc.rref_proxy`: methods of a value, by any function of RPC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from telegrad.compat.rpc.constants import UNSET_RPC_TIMEOUT
from telegrad.compat.rpc.rref import RRef
from telegrad.rpc.rref import call_method


class RRefProxy:
    """`RRefProxy(rref, rpc_sync).method(...)`: as `rref.rpc_sync().method(...)`."""

    def __init__(
        self, rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT
    ) -> None:
        self.rref = rref
        self.rpc_api = rpc_api
        self.rpc_timeout = timeout

    def __getattr__(self, func_name: str) -> Callable[..., Any]:
        return partial(_invoke_rpc, self.rref, self.rpc_api, func_name, self.rpc_timeout)


def _invoke_rpc(
    rref: RRef[Any],
    rpc_api: Callable[..., Any],
    func_name: str,
    timeout: float,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = (rref, func_name, args, kwargs)
    return rpc_api(rref.owner(), call_method, args=call, timeout=timeout)
