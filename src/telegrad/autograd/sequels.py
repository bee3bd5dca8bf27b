"""What follows a pass on each worker, before the pass is over.

The caller of `backward` may name a *sequel*, by a key: whoever has something under that key is
called as soon as its own part of the pass is complete, with the context that holds its gradients.
Only then does it say that its part has ended. So what follows costs no message of its own, and on
one worker it runs while others still compute: the step of an optimizer, above all.

A worker's part is complete when each node of its graph has run. So nothing of this pass will use
there what the sequel changes; but for calls that leave no trace in the graph and are made during
the pass, by a hook or by a recomputation under `no_grad`. The gradients that others wait for leave
before it runs, or share no memory with what it may change.

What must never happen: a sequel in a pass that is known to have failed, also if that was said while
the engine ran; or twice in one pass. A pass may still fail after it, elsewhere: who asks for a
sequel has to say what is then.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

from telegrad.autograd.context import Context
from telegrad.autograd.messages import Sequel


class Follower(Protocol):
    """Something that is called when a worker's part of a pass is complete."""

    @property
    def brief(self) -> bool:
        """Whether it takes no longer than a message: then gradients for the parent wait for it,
        and for the acknowledgement that they can carry."""

    def follow(self, context: Context, data: bytes) -> None: ...


class Sequels:
    """The followers on one worker, while anything else keeps them."""

    def __init__(self) -> None:
        self._followers: WeakValueDictionary[int, Follower] = WeakValueDictionary()

    def add(self, key: int, follower: Follower) -> None:
        self._followers[key] = follower

    def follower(self, sequel: Sequel) -> Follower | None:
        """Who is called here; None: nobody."""
        return self._followers.get(sequel.key)
