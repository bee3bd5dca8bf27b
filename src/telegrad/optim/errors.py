"""What the optimizer has to say when something is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from telegrad.rpc.errors import TelegradError


class OptimizerError(TelegradError):
    """Something that the distributed optimizer itself has to report."""


class GroupRefused(OptimizerError, ValueError):
    """torch makes no optimizer of such parameters and options on some worker."""


class StepFailed(OptimizerError):
    """A step could not be made on every worker.

    `failed` has the error of each worker that could not make it, `stepped` names those that did;
    None if nobody knows, because the pass that the step was a part of failed. With `atomic=True`
    they have undone it: `undone` is true, and `stepped` is empty.
    """

    def __init__(
        self, failed: Mapping[str, BaseException], stepped: Sequence[str] | None, undone: bool
    ) -> None:
        self.failed = dict(failed)
        self.stepped = None if stepped is None else tuple(stepped)
        self.undone = undone
        super().__init__(self._text())

    def _text(self) -> str:
        causes = " ".join(
            f"On worker {name!r}: {type(error).__name__}: {error}"
            for name, error in self.failed.items()
        )
        return f"The optimizer step failed. {causes} {self._state()}"

    def _state(self) -> str:
        if self.undone:
            return "No worker kept the step."
        if self.stepped is None:
            stepped = "Some workers may have stepped before the backward pass failed"
        else:
            stepped = f"Stepped: {', '.join(self.stepped) or 'no other'}"
        return (
            f"{stepped}. Parameters may be from different "
            "steps now: load a checkpoint. With atomic=True all workers take back a step that one "
            "of them cannot make."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (StepFailed, (self.failed, self.stepped, self.undone))
