"""An error that a call ends with, as data that anyone can read, and back.

The words always travel: worker, type, message, traceback. In a job that trusts with code the error
travels as well, in up to two forms, of which the caller takes the first that gives the same words:

- *whole*, as it pickles. Pickle calls the class with `args` again, which fails, or garbles the
  message, for a class whose `__init__` takes something else.
- *in parts*: class, `args` and attributes, taken apart and put together without code of the class.
  Attributes that cannot travel stay behind, and a note on the error names them.

If neither can be had, or in a job that takes data only, a `RemoteError` has the words. So it is for
`KeyboardInterrupt`, `SystemExit` and whatever else is no `Exception`: it must not end the caller.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

from telegrad.rpc.errors import RemoteError, RemoteTraceback, in_few_words
from telegrad.wire.codec import CodecError, Trust, Unpackable, pack, unpack

# An error that holds more than this in tensors is described instead.
MAX_TENSOR_BYTES = 1 << 26

# Py_TPFLAGS_HEAPTYPE: of classes that Python itself comes with, none has it.
_MADE_BY_A_STATEMENT = 1 << 9

UNREADABLE = "(its message could not be read)"

Form = tuple[bytes, list[bytes]]


def describe_error(worker: str, error: BaseException, trust: Trust) -> dict[str, object]:
    kind = type(error)
    return {
        "worker": worker,
        "type": f"{kind.__module__}.{kind.__qualname__}",
        "message": words_of(error),
        "traceback": traceback_of(error),
        "forms": _forms_of(error, trust),
    }


def in_brief(told: dict[str, object]) -> dict[str, object]:
    """An error that is too long for a message, in a few of its words."""
    words = {name: in_few_words(str(text)) for name, text in told.items() if name != "forms"}
    return {**words, "forms": []}


def told_error(value: Any) -> dict[str, Any]:
    match value:
        case {
            "worker": str(),
            "type": str(),
            "message": str(),
            "traceback": str(),
            "forms": list(),
        }:
            return dict(value)
    raise CodecError("an error came in a form that cannot be read")


def rebuild_error(data: dict[str, Any], trust: Trust) -> Exception:
    rebuilt = (_rebuilt(form, trust) for form in data["forms"][:2])
    errors = [error for error in rebuilt if error is not None]
    fitting = (error for error in errors if words_of(error) == data["message"])
    error = next(fitting, errors[0] if errors else None)
    if error is None:
        error = RemoteError(
            f"A call failed on worker {data['worker']!r}. Original exception on remote side was "
            f"{data['type']}: {data['message']}"
        )
    error.__cause__ = RemoteTraceback(data["worker"], data["traceback"])
    return error


def words_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return UNREADABLE


def traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:
        # Of what it was raised from, or by a method of its class.
        return "".join(traceback.format_tb(error.__traceback__))


def _forms_of(error: BaseException, trust: Trust) -> list[Form]:
    if words_of(error) == UNREADABLE:
        # Whoever printed it would fail too.
        return []
    whole = _form(error, trust)
    if whole is not None and not _is_made_its_own_way(type(error)):
        return [whole]
    in_parts = None
    if trust is Trust.CODE and isinstance(error, Exception):
        args, state = parts_of(error)
        in_parts = _form((type(error), args, sendable(state)), trust)
    return [form for form in (whole, in_parts) if form is not None]


def _form(value: object, trust: Trust) -> Form | None:
    # BaseException: whatever the code of the error's class does, the call has to be answered.
    try:
        packed = pack(value, None, trust)
        if sum(buffer.nbytes for buffer in packed.buffers) > MAX_TENSOR_BYTES:
            return None
        return packed.meta, [bytes(buffer) for buffer in packed.buffers]
    except BaseException:
        return None


def _is_made_its_own_way(kind: type[BaseException]) -> bool:
    return any(isinstance(getattr(kind, made), FunctionType) for made in ("__new__", "__init__"))


def _written_in_c(kind: Any) -> Any:
    """The class that makes the instances and that Python itself fills: `Exception`, `OSError` and
    so on. Of several such bases it is the one that has most to fill."""
    while kind.__flags__ & _MADE_BY_A_STATEMENT:
        kind = kind.__base__
    return kind


def parts_of(error: Exception) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Arguments and attributes, without asking code of the error's own class."""
    _, args, *state = _written_in_c(type(error)).__reduce__(error)
    return args, state[0] if state else {}


def sendable(state: dict[str, object]) -> dict[str, object]:
    kept, left_out = {}, []
    for name, value in state.items():
        try:
            pack(value)
            kept[name] = value
        except Unpackable:
            left_out.append(name)
    if left_out:
        note = f"telegrad left out what cannot be sent of this error: {', '.join(left_out)}"
        notes = state.get("__notes__")
        kept["__notes__"] = [*(notes if isinstance(notes, list) else ()), note]
    return kept


def _rebuilt(form: Any, trust: Trust) -> Exception | None:
    try:
        meta, buffers = form
        if type(meta) is not bytes or any(type(buffer) is not bytes for buffer in buffers):
            return None
        value = unpack(meta, [bytearray(buffer) for buffer in buffers], None, trust)
        if trust is Trust.CODE and type(value) is tuple:
            value = put_together(*value)
    except Exception:
        return None
    return value if isinstance(value, Exception) else None


def put_together(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    if not issubclass(kind, Exception):
        raise TypeError(f"{kind!r} is no class of errors")
    built_in = _written_in_c(kind)
    error: Exception = built_in.__new__(kind, *args)
    built_in.__init__(error, *args)
    BaseException.__setstate__(error, state)
    return error


def _print_error(where: str) -> None:
    print(f"telegrad: an error in {where}:", file=sys.stderr)
    traceback.print_exc()


tell_background_error: Callable[[str], None] = _print_error
"""Where errors go that no caller waits for. The simulator has another place for them."""


def report_background_error(where: str) -> None:
    """Tell of the error that is being handled, which no caller waits for: it must not vanish."""
    tell_background_error(where)
