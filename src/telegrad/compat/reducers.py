"""DDP's reducer never takes down a process group: it would wait for gloo with the lock held.

A process group waits for its threads when it goes, and a thread of gloo needs the interpreter lock
to let go of the tensors of its last collective. So torch destroys a group without the lock when
the last reference to it is a Python object. But a reducer, which is C++ and holds the group too,
is destroyed with the lock. If it was the last to hold the group, as after
`destroy_process_group()` and then the end of the function that made the model, the two wait for
each other for ever. Stock does so now and then; where other Python threads want the lock, as
telegrad's do, it does so often.

So each reducer gets a companion that holds the group and is let go after it. Pybind calls weak
references when the C++ object is gone, which is exactly that moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any


def outliving(make_reducer: Callable[..., Any]) -> Callable[..., Any]:
    """`DistributedDataParallel._ddp_init_helper`, after which the group outlives the reducer."""

    @wraps(make_reducer)
    def make(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = make_reducer(self, *args, **kwargs)
        # The logger owns the reducer as well, and either may be the last to go.
        for holder in (self.reducer, self.logger):
            weakref.finalize(holder, _let_go, self.process_group).atexit = False
        return made

    return make


def _let_go(process_group: object) -> None:
    """The arguments of a finalizer are let go after it was called."""
