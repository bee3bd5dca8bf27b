"""The end of a process that has a thread inside of torch.

A function that hangs, or only takes long, must not keep its process from ending: our threads are
daemons. But CPython before 3.14 ends such a thread when it comes back from C++ to an interpreter
that is on its way out, by unwinding its stack; C++ does not let its destructors be unwound so, and
aborts the whole process, whatever exit code that should have had. And a thread that stays in C++
sees the library's globals destroyed under it.

So once nobody wants to wait for it any longer, such a thread is put to sleep at the place where
C++ would abort, and the process ends without the destructors of globals, with its own exit code.
What Python itself does at the end (exit handlers, flushing) is done as ever.
"""

from __future__ import annotations

import contextlib
import ctypes

_LIBRARY = "libstdc++.so.6"
_SET_TERMINATE = "_ZSt13set_terminatePFvvE"


def leave_threads_behind() -> None:
    """Some thread does not come back in time: let the process end as if there were none.

    To be called while the process is ending, and only then. Where the C library has no such ways,
    nothing is changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        # Called with the exit code, in reverse order of their being given, before all destructors.
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
        getattr(ctypes.CDLL(_LIBRARY), _SET_TERMINATE)(libc.pause)
