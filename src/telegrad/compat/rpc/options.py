"""Stands for `torch.distributed.rpc.options`: options are plain data, and stock's own serve."""

from telegrad.compat import stock
from telegrad.compat.stock import TensorPipeRpcBackendOptions

DeviceType = stock.options.DeviceType
_to_device = stock.options._to_device
_to_device_map = stock.options._to_device_map
_to_device_list = stock.options._to_device_list

__all__ = ["TensorPipeRpcBackendOptions"]
