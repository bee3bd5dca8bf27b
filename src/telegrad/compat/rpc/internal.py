"""Stands for `torch.distributed.rpc.internal`.

Telegrad's codec does the work of the RPC pickler. Here is the pickler for those who call it: what
it gives is a string of bytes and a table, and the table holds the references beside the tensors,
so that both travel as themselves when the result is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad.compat import stock
from telegrad.compat.stock import PythonUDF, RemoteException, RPCExecMode
from telegrad.wire.codec import extend

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_build_rpc_profiling_key = stock._build_rpc_profiling_key
_handle_exception = stock._handle_exception
_start_record_function = stock._start_record_function
_thread_local_tensor_tables = stock.internal._thread_local_tensor_tables


class _InternalRPCPickler(stock.RpcPickler):  # type: ignore[misc]
    """Pickles with tensors and references set aside in a table."""

    def serialize(self, obj: object) -> tuple[bytes, list[Any]]:
        outer = getattr(_thread_local_tensor_tables, "send_tables", None)
        try:
            return super().serialize(obj)  # type: ignore[no-any-return]
        except BaseException:
            # Stock leaves the table of a message that could not be pickled behind, for ever.
            _thread_local_tensor_tables.send_tables = outer
            if outer is None:
                del _thread_local_tensor_tables.send_tables
            raise

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        super()._register_reducer(obj_class, reducer)
        _teach_codec(obj_class, reducer)

    def _tensor_reducer(self, tensor: Any) -> Any:
        table = _thread_local_tensor_tables.send_tables
        table.append(tensor)
        return (_from_table, (len(table) - 1,))

    def _py_rref_reducer(self, py_rref: Any) -> Any:
        py_rref._check_can_fork()
        return self._tensor_reducer(py_rref)


def _from_table(index: int) -> Any:
    return _thread_local_tensor_tables.recv_tables[index]


def _teach_codec(cls: type, reducer: Callable[[Any], Any]) -> None:
    """Let instances of a class travel as its reducer says: as a function and its arguments."""

    def reduce(obj: Any, scope: object) -> Any:
        return reducer(obj)

    def rebuild(data: Any, scope: object) -> Any:
        function, args = data
        return function(*args)

    extend(f"reduced {cls.__module__}.{cls.__qualname__}", cls, reduce, rebuild)


_internal_rpc_pickler: Any = _InternalRPCPickler()


def take_over_reducers() -> None:
    """Classes that were registered with stock's pickler, by modules loaded before this one."""
    for cls, reducer in stock.internal._internal_rpc_pickler._class_reducer_dict.items():
        _internal_rpc_pickler._register_reducer(cls, reducer)


def serialize(obj: object) -> tuple[bytes, list[Any]]:
    return _internal_rpc_pickler.serialize(obj)  # type: ignore[no-any-return]


def deserialize(binary_data: bytes, tensor_table: list[Any]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)
