"""What the layer relies on in torch beyond its documented names."""

from __future__ import annotations

import io

import torch

from telegrad.compat import stock


def test_a_compiled_function_is_found_by_its_qualified_name() -> None:
    name = stock.script_function_name(halve)
    assert stock.script_function(name)(torch.ones(1)).item() == 0.5


@torch.jit.script
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


def test_a_script_module_survives_its_bytes() -> None:
    module = torch.jit.script(torch.nn.Linear(2, 2))
    assert type(module) is stock.RecursiveScriptModule
    stream = io.BytesIO()
    torch.jit.save(module, stream)
    stream.seek(0)
    again = stock.load_script_module(stream)
    assert torch.equal(again(torch.ones(2)), module(torch.ones(2)))


def test_stock_keeps_its_reducers_where_they_are_taken_from() -> None:
    registered = stock.internal._internal_rpc_pickler._class_reducer_dict
    assert stock.remote_module.RemoteModule in registered


def test_a_pickler_puts_tensors_into_the_table_of_its_thread() -> None:
    pickler = stock.RpcPickler()
    data, table = pickler.serialize([torch.ones(1), 2])
    assert len(table) == 1
    assert pickler.deserialize(data, table)[1] == 2
    assert not hasattr(stock.internal._thread_local_tensor_tables, "send_tables")


def test_the_optimizer_looks_up_compiled_variants_in_one_map() -> None:
    assert torch.optim.SGD in stock.optimizer.functional_optim_map


def test_device_maps_of_the_cpu_ask_for_nothing() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert stock.is_cpu_only({})
    assert stock.is_cpu_only({"w": {cpu: cpu}})
    assert not stock.is_cpu_only({"w": {cpu: gpu}})
