"""What the codec does not know is pickled; what it does know inside of that is taken out again.

All opaque objects of a message go through one pickler, so that what two of them share is one
object on arrival. Whatever it meets that is a tensor, an extension, or an object which the tree
holds already is not pickled: the pickle holds a number, and the tree holds the object under that
number in front of the pickle. So tensors of a module travel raw, and references inside of user
objects are counted like any others.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from telegrad.wire.errors import CodecError
from telegrad.wire.names import EXTENSIONS, imported

# Smaller buffers cost more as buffers than as part of the pickle.
_OUT_OF_BAND = 1024


class TreePickler(pickle.Pickler):
    """Pickles objects one after the other and collects what has to go into the tree."""

    def __init__(self, known: Callable[[int], object]) -> None:
        self.stream = io.BytesIO()
        self.attached: list[object] = []
        self._buffers: list[memoryview] = []
        self._known = known
        self._numbers: dict[int, int] = {}
        # Not a method: as a circle, it would keep all that it pickled until a garbage collection.
        keep = partial(_keep_buffer, self._buffers)
        super().__init__(self.stream, protocol=5, buffer_callback=keep)

    def take_buffers(self) -> list[memoryview]:
        """What is to travel beside the pickle, of what was pickled since the last time."""
        taken = self._buffers.copy()
        self._buffers.clear()
        return taken

    def persistent_id(self, obj: Any) -> int | None:
        cls = type(obj)
        is_tensor = cls is Tensor or cls is Parameter
        if not is_tensor and cls not in EXTENSIONS and self._known(id(obj)) is None:
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._numbers)
            self.attached.append(obj)
        return number


def _keep_buffer(kept: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Whether it is to be a part of the pickle after all."""
    view = buffer.raw()
    if view.nbytes < _OUT_OF_BAND:
        return True
    kept.append(view)
    return False


class TreeUnpickler(pickle.Unpickler):
    """The inverse: `attached` is filled from the tree before each load."""

    def __init__(self, data: bytes, buffers: Iterable[Any]) -> None:
        self.stream = io.BytesIO(data)
        self.attached: list[object] = []
        super().__init__(self.stream, buffers=buffers)

    def find_class(self, module: str, name: str) -> Any:
        with contextlib.suppress(Exception):  # pickle says what is wrong with it
            imported(module)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> object:
        if type(pid) is not int or not 0 <= pid < len(self.attached):
            raise CodecError(f"a pickled object refers to attachment {pid!r}, which is not there")
        return self.attached[pid]
