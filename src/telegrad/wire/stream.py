"""A byte stream as a link needs it: one thread reads, another may write at the same time.

The calls are few and each is cheap: on a plain socket, `recv_into` and `try_send` are one system
call each. Reading blocks and is bounded by the kernel (`SO_RCVTIMEO`), not by a poll before each
read. Only who sleeps for the bytes of a Unix socket polls: in a read it would be woken each time
that the other end has read what was sent before. Writing never blocks: a writer that finds the
stream full has better things to do than to wait, above all to read, or two ends that write at once
would wait for each other for ever.

Closing. `close` shuts the connection down, which wakes the reader and tells the peer. The
descriptor itself is closed when the stream is collected: a thread that is just entering a system
call still holds the stream, so the number it holds cannot come to mean another file.

A crowd. Python lets go of the interpreter around each system call, and a thread that waits for it
takes it: the caller has it back when that one sleeps, and each of these hand-overs costs more than
a short message. So while others wait at this end, a short message is written by a call that keeps
the interpreter (it cannot block), and the reader does not look for bytes but sleeps for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from telegrad.wire.lookout import Lookout, looking_at

DO_NOT_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_MAX_PARTS = os.sysconf("SC_IOV_MAX")
_TIMEVAL = struct.Struct("@ll")
_TCP_INFO = struct.Struct("@24xI28xI")
"""Of `struct tcp_info`: segments that are not acknowledged, and since when nothing was."""
SHORT = 1 << 13
_send_at_once = ctypes.PyDLL(None).send
_send_at_once.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send_at_once.restype = ctypes.c_ssize_t

Part = bytes | memoryview
"""What can be sent: bytes, or a C-contiguous memoryview."""


class Stream(Protocol):
    """One reading thread at a time, one writing thread at a time; the two may differ."""

    awaited: int
    """What the next read waits for, if that is known: some things take longer than others."""
    crowd: Collection[object]
    """Threads that wait for what comes by this stream, beside the one that reads."""
    about_to_sleep: Callable[[], object]
    """Called before a read that has looked for bytes sleeps for them; not by all streams."""

    @property
    def loss(self) -> OSError | None:
        """Why the stream ended, when the kernel gave a reason other than end-of-file."""

    def recv_into(self, view: memoryview) -> int:
        """Wait for bytes and read some; 0 when the stream has ended, -1 after the timeout."""

    def try_recv_into(self, view: memoryview) -> int:
        """As `recv_into`, but wait for nothing: -1 if there are no bytes."""

    def set_receive_timeout(self, seconds: float | None) -> None:
        """How long `recv_into` may wait; None for ever."""

    def try_send(self, parts: Sequence[Part]) -> int:
        """Send what fits now and return how many bytes that was, 0 if none.

        The next call must begin with the first byte that was not sent. Raises ConnectionError
        when the stream has ended.
        """

    def wait_writable(self, timeout: float | None) -> bool:
        """Wait until `try_send` may have something to do: room, or an error to raise."""

    def pending(self) -> int:
        """More than 0 if a read may give bytes although the descriptor is not readable."""

    def unheard(self) -> float:
        """Seconds for which the other host has not acknowledged what it was sent."""

    def fileno(self) -> int:
        """The descriptor, for poll."""

    def close(self) -> None:
        """End the stream for both ends. Any thread may do so, more than once."""


class PlainStream:
    """A stream over a connected socket, which it owns from then on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self.loss: OSError | None = None
        self.crowd: Collection[object] = ()
        self.awaited = 0
        self.about_to_sleep: Callable[[], object] = nobody_minds
        self._socket = sock
        self._poll = looking_at(sock)
        self._lookout = Lookout(self._poll)
        self._polls = sock.family == socket.AF_UNIX
        self._timeout: float | None = None
        close_when_collected(self, sock)

    def recv_into(self, view: memoryview) -> int:
        if self.crowd or not self._lookout.wait(self.awaited):
            return self.sleep_for(view)
        try:
            return self._socket.recv_into(view)
        except BlockingIOError:
            return -1
        except OSError as error:
            self.loss = error.with_traceback(None)
            return 0

    def sleep_for(self, view: memoryview) -> int:
        """As `recv_into`, by who has looked for bytes and seen none, or is not to look: that may
        have been done by `_native.cpp`."""
        came = True
        try:
            self.about_to_sleep()
            # In a crowd every further call is one more at which the interpreter is lost.
            if self._polls and not self.crowd and not self._poll(self._timeout):
                came = False
                return -1
            return self._socket.recv_into(view)
        except BlockingIOError:
            came = False
            return -1
        except OSError as error:
            self.loss = error.with_traceback(None)
            return 0
        finally:
            if not self.crowd:
                self._lookout.ended(came)

    def try_recv_into(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view, 0, DO_NOT_WAIT)
        except BlockingIOError:
            return -1
        except OSError as error:
            self.loss = error.with_traceback(None)
            return 0

    def set_receive_timeout(self, seconds: float | None) -> None:
        self._timeout = None if seconds is None else 1000 * seconds
        set_receive_timeout(self._socket, seconds)

    def try_send(self, parts: Sequence[Part]) -> int:
        try:
            if len(parts) == 1:
                part = parts[0]
                if self.crowd and type(part) is bytes and len(part) < SHORT:
                    sent: int = _send_at_once(self._socket.fileno(), part, len(part), DO_NOT_WAIT)
                    if sent >= 0:
                        return sent
                return self._socket.send(part, DO_NOT_WAIT)
            if len(parts) > _MAX_PARTS:
                parts = parts[:_MAX_PARTS]
            return self._socket.sendmsg(parts, (), DO_NOT_WAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            self.loss = error.with_traceback(None)
            raise as_connection_error(error) from None

    def wait_writable(self, timeout: float | None) -> bool:
        return wait_writable(self._socket, timeout)

    def pending(self) -> int:
        return 0

    def unheard(self) -> float:
        return unheard(self._socket)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        shut_down(self._socket)


def nobody_minds() -> None:
    """Who sets `Stream.about_to_sleep` is told when its reader has nothing to do."""


def close_when_collected(stream: Stream, sock: socket.socket) -> None:
    """At exit the system closes what is left, when no thread can be surprised by it any more."""
    weakref.finalize(stream, sock.close).atexit = False


def set_receive_timeout(sock: socket.socket, seconds: float | None) -> None:
    """Let the kernel bound a blocking read. The smallest bound is a microsecond: 0 means none."""
    micros = 0 if seconds is None else max(1, round(seconds * 1e6))
    value = _TIMEVAL.pack(*divmod(micros, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


def wait_writable(sock: socket.socket, timeout: float | None) -> bool:
    """Wait for room in the socket's buffer, or for its end."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def unheard(sock: socket.socket) -> float:
    """Seconds for which the other host has not acknowledged what it was sent; 0 if it has all.

    A peer that does not read acknowledges all the same, if only that it has no room.
    """
    if sock.family == socket.AF_UNIX:
        return 0.0
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return 0.0
    unacknowledged, milliseconds = _TCP_INFO.unpack(info)
    return milliseconds / 1000 if unacknowledged else 0.0


def shut_down(sock: socket.socket) -> None:
    """End a connection so that both ends notice; one that has ended already is left alone."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def as_connection_error(error: OSError) -> ConnectionError:
    """The kernel reports a peer that fell silent as a timeout: to a writer it is a lost one."""
    if isinstance(error, ConnectionError):
        return error
    return ConnectionError(error.errno, error.strerror)
