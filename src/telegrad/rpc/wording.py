"""What cannot be packed, in the words of who made the call or returned the value."""

from __future__ import annotations

from typing import Any

from telegrad.rpc.calls import describe_target
from telegrad.rpc.methods import CREATE_BY_METHOD, METHOD
from telegrad.wire.errors import Unpackable
from telegrad.wire.parcel import Parcel


def of_call(problem: Unpackable, request: tuple[Any, ...], to: str) -> Unpackable:
    """The same problem in the caller's words: of the function, `args` or `kwargs` of a call."""
    target, prefix, first = request[0], "value", 0
    if type(request) is Parcel:
        if target not in (METHOD, CREATE_BY_METHOD):
            return problem
        path = problem.path.replace("value.tensors", "args", 1)
        return problem.saying(path, f" for the call of a method on worker {to!r}")
    if type(target) is str:
        if target not in ("create", "fill", "invoke"):
            return problem
        # The operation's arguments are a reference, and what the user gave.
        target, prefix, first = request[1][1], "value[1]", 1
    path = "the arguments" if problem.path == "value" else "a part of func, args or kwargs"
    for number, name in enumerate(("func", "args", "kwargs"), first):
        place = f"{prefix}[{number}]"
        if problem.path.startswith(place):
            path = name + problem.path.removeprefix(place)
    return problem.saying(path, f" for the call of {describe_target(target)} on worker {to!r}")


def of_result(problem: Unpackable, target: object, worker: str) -> Unpackable:
    """The same problem in the callee's words: of the result of a call."""
    path = problem.path.replace("value", "result", 1)
    if target == "fetch":
        whose = "the value of a reference"
    elif type(target) is str:
        whose = "the result of a method"
    else:
        whose = f"the result of {describe_target(target)}"
    return problem.saying(path, f" in {whose} on worker {worker!r}")


def of_relayed(problem: Unpackable, whose: str) -> Unpackable:
    """The same problem in the words of who passes a value on, which is no call of the user's."""
    path = problem.path
    for place in ("value.tensors[0]", "value[1][1]"):
        path = path.replace(place, "value", 1)
    return problem.saying(path, f" in {whose}")
