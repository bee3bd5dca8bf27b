"""What distributed autograd has to say when something is wrong."""

from __future__ import annotations

from telegrad.rpc.errors import TelegradError, WorkerLost


class AutogradError(TelegradError):
    """Something that distributed autograd itself has to report."""


class UnknownContext(AutogradError):
    """A context id that this worker does not hold: never made, or released."""

    def __init__(self, context_id: int) -> None:
        super().__init__(
            f"Could not find autograd context with id: {context_id}. A context lives from "
            "`with telegrad.autograd.context()` to the end of that block."
        )
        self.context_id = context_id

    def __reduce__(self) -> tuple[type[UnknownContext], tuple[int]]:
        # By default an error is rebuilt from its text, which would be taken for the id.
        return UnknownContext, (self.context_id,)


class UnusedResult(AutogradError):
    """FAST mode was asked for, and a tensor that crossed to another worker was never used."""


class BadGradient(AutogradError):
    """A gradient came that does not fit what was sent."""


class PassFailed(AutogradError):
    """A backward pass ended with an error on some worker."""

    worker: str = ""
    """Whose error it was; of a loss: who is gone."""


class PassLost(PassFailed, WorkerLost):
    """A backward pass failed because some worker that took part found another one gone."""


class ContextLost(AutogradError, WorkerLost):
    """The worker that made a context is gone, and the context with it."""
