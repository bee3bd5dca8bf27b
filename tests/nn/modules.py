"""What the workers of these tests host and run."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from telegrad import rpc
from telegrad.nn import RemoteModule, RemoteSequential
from telegrad.rpc.current import current_node

seen: list[Any] = []


def take_seen() -> list[Any]:
    taken = seen[:]
    seen.clear()
    return taken


def linear(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs)


def mixed(seed: int) -> nn.Module:
    """Parameters, buffers of two dtypes, dropout: all that state and modes are about."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


class Attend(nn.Module):
    """Takes and gives containers."""

    def forward(self, pair: tuple[Tensor, Tensor], *, more: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sum": pair[0] + pair[1] + more["x"], "product": pair[0] * pair[1]}


class Wide(nn.Module):
    """Makes a small input large; a large one small again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x if x.numel() == 1 else (self.weight * x).mean()


class Sums(nn.Module):
    """Takes any number of tensors."""

    def forward(self, *terms: Tensor) -> Tensor:
        return torch.stack(terms).sum(0)


class GradModes(nn.Module):
    def forward(self, x: Tensor) -> tuple[bool, Tensor]:
        return torch.is_grad_enabled(), x * 2


class IsCompiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * (2 if torch.compiler.is_compiling() else 1)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("no result today")


def call_it(module: RemoteModule, x: Tensor) -> Tensor:
    result: Tensor = module(x)
    return result


class Doubles(nn.Module):
    def forward(self, x: list[Tensor] | Tensor) -> Tensor:
        return 2 * (x[0] if isinstance(x, list) else x)


def values_kept() -> int:
    """How many values this worker owns that somebody may ask for."""
    return int(rpc.debug_info()["references"]["values"])


def bytes_moved() -> int:
    """How many bytes this worker has sent to and received from all others."""
    return sum(sent + received for sent, received in rpc.debug_info()["bytes"].values())


def record_output(module: nn.Module, args: Any, output: Tensor) -> None:
    seen.append(("forward", tuple(output.shape)))


def record_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    seen.append(("backward", tuple(grad_output[0].shape)))


def register(module: nn.Module) -> None:
    module.register_forward_hook(record_output)
    module.register_full_backward_hook(record_gradient)


def fill_with_ones(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)


class Mortal(nn.Module):
    """Tells when it is gone."""

    gone = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        weakref.finalize(self, Mortal.gone.set)


def await_death() -> bool:
    return Mortal.gone.wait(20)


class Counts(nn.Module):
    """State that is no tensor."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = {"calls": [calls]}

    def forward(self) -> dict[str, list[int]]:
        return self.calls

    def get_extra_state(self) -> dict[str, list[int]]:
        return self.calls

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        self.calls = state


def stage(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Watched())


class Watched(nn.Module):
    """Knows in which order micro-batches came, and how many wait for their gradient at most."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[float] = []
        self.under_way = 0
        self.most = 0
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            self.order.append(round(float(x.detach().sum()), 4))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        if x.requires_grad:
            x.register_hook(self._left)
        return x

    def _left(self, gradient: Tensor) -> None:
        with self.lock:
            self.under_way -= 1


def most_under_way(module: nn.Sequential) -> int:
    return int(module[2].most)


def order_of(module: nn.Sequential) -> list[float]:
    return list(module[2].order)


class FailsAt(nn.Module):
    """Fails for inputs that hold a certain number."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 13).any()):
            raise ArithmeticError("thirteen")
        return x * 2


class Pairs(nn.Module):
    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        a, b = x["pair"]
        return {"sum": (a + b) * x["factor"], "list": [a, b]}


class Masked(nn.Module):
    """Takes a keyword for each row, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor, *, mask: Tensor, factor: float) -> Tensor:
        return x * self.weight * mask * factor


class InPlace(nn.Module):
    """Changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(self.weight).relu_() * self.weight


class Widen(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Narrow(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, 1) / width)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


compilations: list[int] = []


def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A backend for `torch.compile`."""
    compilations.append(len(inputs))
    return lookup_backend("aot_eager")(graph, inputs)


def take_compilations(_: nn.Module) -> int:
    taken = len(compilations)
    compilations.clear()
    return taken


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Versioned(nn.Module):
    """Doubles weights that were saved by an older version of itself, or by who knows whom."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def versioned() -> nn.Module:
    return nn.Sequential(Versioned())


class Couple(NamedTuple):
    a: Any
    b: Any


class Couples(nn.Module):
    def forward(self, couple: Couple, named: dict[str, Tensor]) -> Couple:
        return Couple(couple.a + couple.b, named["x"])


class Tagged(RemoteModule):
    """A subclass with an attribute of its own."""

    tag = "none"


def tag_and_call(module: Tagged, x: Tensor) -> tuple[str, Tensor]:
    return module.tag, module(x)


class Scaled(nn.Module):
    def forward(self, x: Tensor, *, factor: Tensor | float = 1.0) -> Tensor:
        return x * factor


class Holder(nn.Module):
    """Has a remote module inside, wherever it lives itself."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.here = linear(2, 2, 1)
        self.there = RemoteModule(worker, linear, (2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.there(self.here(x))
        return result


class HolderOfFirst(nn.Module):
    """Its remote part comes first."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.there = RemoteModule(worker, mixed, (2,))
        self.here = nn.Linear(2, 2, bias=False)


def remote_one(worker: str) -> nn.Module:
    return RemoteModule(worker, linear, (2, 2, 2))


def hold(module: nn.Module, other: RemoteModule) -> None:
    module.other = other


class Absolute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


class Pinned(NamedTuple("Pinned", [("x", Tensor), ("name", str)])):
    """A named tuple that is made otherwise than by its fields."""

    def __new__(cls, x: Tensor) -> Pinned:
        return super().__new__(cls, x, "pinned")


class Named(nn.Module):
    def forward(self, given: Any) -> Any:
        return given.x * 2, given.name


class Devices(nn.Module):
    """Says on which device it finds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> list[str]:
        tensors = x.values() if isinstance(x, dict) else [x] if isinstance(x, Tensor) else x
        return [str(tensor.device) for tensor in tensors]


class Split(nn.Module):
    """Gives two tensors, in a container of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> Any:
        a, b = x * self.weight, x + self.weight
        return {"tuple": (a, b), "list": [a, b], "dict": {"a": a, "b": b}, "named": Couple(a, b)}[
            self.kind
        ]


class Joined(nn.Module):
    """Takes what a `Split` gives, as one argument, and says what it was."""

    def forward(self, pair: Any) -> Tensor:
        assert isinstance(pair, tuple | list | dict)
        a, b = pair.values() if isinstance(pair, dict) else pair
        result: Tensor = a * b.sin()
        return result


class Awaits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 4))

    async def forward(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return x * self.weight


class GivesParameter(nn.Module):
    """Its result is a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class KeepsMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x * 2


class WaitsForWord(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert words.get(timeout=20) == "go on"
        return x


words: queue.Queue[str] = queue.Queue()


class Unsendable(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return threading.Lock()


class HolderOfSeveral(nn.Module):
    """Has a RemoteSequential inside, wherever it lives itself."""

    def __init__(self, *workers: str) -> None:
        super().__init__()
        self.here = linear(4, 4, 10)
        parts = [RemoteModule(w, linear, (4, 4, seed)) for seed, w in enumerate(workers, 11)]
        self.there = RemoteSequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.there(self.here(x))
        return result


class Halving(RemoteModule):
    """A subclass that does something here as well."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) / 2
        return result


def relays_kept() -> tuple[int, int]:
    """The relays and the contexts that this worker keeps."""
    node = current_node()
    contexts = node.services["autograd"].counts()["num_autograd_contexts"]
    return node.relays.counts(), int(contexts)
