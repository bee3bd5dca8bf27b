"""Stands for `torch.distributed.rpc.options`: options are plain data, and stock's own serve."""

from telegrad.compat.stock import TensorPipeRpcBackendOptions
from telegrad.compat.stock import options as _options

DeviceType = _options.DeviceType
_to_device = _options._to_device
_to_device_map = _options._to_device_map
_to_device_list = _options._to_device_list

__all__ = ["TensorPipeRpcBackendOptions"]
