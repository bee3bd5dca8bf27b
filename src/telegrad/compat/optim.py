"""What `torch.distributed.optim.DistributedOptimizer` runs on the owners of parameters.

For most classes of `torch.optim` stock does not run the class itself but a "functional" one, which
it compiles with TorchScript: its defaults differ (SGD steps by 1e-2 and not by 1e-3), it takes
arguments that the class refuses, and it leaves `.grad` alone. Compiled it would call the C++ of
stock autograd. But it is Python as well, so here the same classes run uncompiled: every step is
stock's, whatever torch's version makes of it.
"""

from __future__ import annotations

from typing import Any

from telegrad.compat.rpc.rref import RRef
from telegrad.compat.stock import optimizer


def _new_script_local_optimizer(
    optim_cls: Any, local_params_rref: list[RRef[Any]], /, *args: Any, **kwargs: Any
) -> RRef[Any]:
    make: Any = optimizer._ScriptLocalOptimizer
    return RRef(make(optim_cls, local_params_rref, *args, **kwargs))


def _script_local_optimizer_step(local_optim_rref: RRef[Any], autograd_ctx_id: int) -> None:
    # Compiled code held no lock. Here two steps of one parameter would mix their operations.
    with optimizer._LocalOptimizer.global_lock:
        local_optim_rref.local_value().step(autograd_ctx_id)
