"""TLS as a stream: one thread reads while others write, though OpenSSL allows one call at a time.

OpenSSL works here on memory, not on the socket: ciphertext is carried between its two memory
buffers and the socket by hand. So the lock that guards OpenSSL is held for the time of encrypting
or decrypting, never while waiting, and the socket is read in large pieces, not record by record.

Writing without blocking needs one thought. What OpenSSL has encrypted must be sent, also when the
socket takes only half of it now; and the caller, once told that its bytes are sent, may not come
back soon. So the last byte of a piece is counted as sent only when all of the piece's ciphertext
has gone to the socket. Until then the caller sees a short send, comes back with at least that
byte, and its return carries the rest of the ciphertext out. The byte itself is not encrypted twice.

A cut connection and an orderly end are not told apart by TLS's own closing message: frames carry
their lengths, and a session knows what has not arrived.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from telegrad.wire.stream import (
    DO_NOT_WAIT,
    Part,
    as_connection_error,
    close_when_collected,
    nobody_minds,
    set_receive_timeout,
    shut_down,
    unheard,
    wait_writable,
)

_READ_BYTES = 1 << 18
_PIECE_BYTES = 1 << 17
_RECORD_BYTES = 1 << 14


class TlsError(ConnectionError):
    """The two ends did not agree on TLS: most often they hold different keys."""


class TlsCutShort(TlsError):
    """The connection ended, or fell silent, before the two could agree or not."""


class TlsStream:
    """A `Stream` of bytes under TLS over a connected socket, which it owns from then on."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        timeout: float | None = None,
        peer: str = "the other end",
    ) -> None:
        """Shake hands within `timeout` seconds, or raise `TlsError`.

        The client's end finishes before the server has judged the client: only the first bytes
        that arrive say that it was accepted.
        """
        self.loss: OSError | None = None
        self.crowd: Collection[object] = ()
        self.awaited = 0
        self.about_to_sleep: Callable[[], object] = nobody_minds
        self._socket = sock
        close_when_collected(self, sock)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._openssl = threading.Lock()
        self._sending = threading.Lock()
        self._ciphertext = memoryview(b"")
        self._uncounted = 0
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._shake_hands(deadline)
        except (OSError, EOFError) as error:
            shut_down(sock)
            kind = TlsError if isinstance(error, ssl.SSLError) else TlsCutShort
            raise kind(_explain(peer, error)) from None
        sock.settimeout(None)
        # Only now: a stranger, of whom there may be many, gets no such piece of memory.
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def recv_into(self, view: memoryview) -> int:
        return self._recv_into(view, 0)

    def try_recv_into(self, view: memoryview) -> int:
        # Bytes that came may be a part of a record, which nobody can decrypt yet.
        return self._recv_into(view, DO_NOT_WAIT)

    def _recv_into(self, view: memoryview, flags: int) -> int:
        try:
            while True:
                count = self._decrypt(view)
                if count:
                    return count
                size = self._socket.recv_into(self._buffer, 0, flags)
                if size == 0:
                    return 0
                with self._openssl:
                    self._incoming.write(self._buffer[:size])
        except BlockingIOError:
            return -1
        except ssl.SSLZeroReturnError:
            return 0
        except OSError as error:
            self.loss = error.with_traceback(None)
            return 0

    def set_receive_timeout(self, seconds: float | None) -> None:
        set_receive_timeout(self._socket, seconds)

    def try_send(self, parts: Sequence[Part]) -> int:
        with self._sending:
            try:
                return self._send(parts)
            except OSError as error:
                self.loss = error.with_traceback(None)
                raise as_connection_error(error) from None

    def wait_writable(self, timeout: float | None) -> bool:
        return wait_writable(self._socket, timeout)

    def pending(self) -> int:
        """Bytes of ciphertext count as well: OpenSSL shows plaintext only for a record begun."""
        with self._openssl:
            return self._tls.pending() + self._incoming.pending

    def unheard(self) -> float:
        return unheard(self._socket)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        shut_down(self._socket)

    def _shake_hands(self, deadline: float | None) -> None:
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                # Also on failure: the alert that is left tells the peer why.
                self._set_deadline(deadline)
                self._socket.sendall(self._outgoing.read())
            self._set_deadline(deadline)
            received = self._socket.recv(_RECORD_BYTES)
            if not received:
                raise EOFError("the connection was closed")
            self._incoming.write(received)

    def _set_deadline(self, deadline: float | None) -> None:
        if deadline is None:
            self._socket.settimeout(None)
            return
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)

    def _decrypt(self, view: memoryview) -> int:
        """Fill `view` from records that are here already: one record at a time is all they give."""
        filled = 0
        with self._openssl:
            while filled < view.nbytes:
                rest = view[filled:]
                try:
                    # With a buffer to read into the answer is a count, unlike its annotation.
                    count: int = self._tls.read(rest.nbytes, rest)  # type: ignore[assignment]
                except ssl.SSLWantReadError:
                    break
                except ssl.SSLError:
                    if filled:
                        break
                    raise
                if count == 0:
                    break
                filled += count
        return filled

    def _send(self, parts: Sequence[Part]) -> int:
        sent = self._uncounted
        if not self._flush():
            return 0
        self._uncounted = 0
        for piece in _pieces(parts, skip=sent):
            self._ciphertext = self._encrypt(piece)
            if not self._flush():
                self._uncounted = 1
                return sent + len(piece) - 1
            sent += len(piece)
        return sent

    def _encrypt(self, piece: memoryview) -> memoryview:
        with self._openssl:
            done = 0
            while done < len(piece):
                done += self._tls.write(piece[done:])
            return memoryview(self._outgoing.read())

    def _flush(self) -> bool:
        """Carry ciphertext to the socket; tell whether all of it went."""
        while self._ciphertext:
            try:
                count = self._socket.send(self._ciphertext, DO_NOT_WAIT)
            except BlockingIOError:
                return False
            self._ciphertext = self._ciphertext[count:]
        return True


def _pieces(parts: Sequence[Part], skip: int) -> Iterator[memoryview]:
    """The parts after the first `skip` bytes, large ones cut and small neighbours joined."""
    small = bytearray()
    for part in parts:
        view = memoryview(part)
        if view.nbytes <= skip:
            skip -= view.nbytes
            continue
        view = view.cast("B")[skip:]
        skip = 0
        if len(small) + view.nbytes <= _RECORD_BYTES:
            small += view
            continue
        if small:
            yield memoryview(small)
            small = bytearray()
        for start in range(0, view.nbytes, _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
    if small:
        yield memoryview(small)


def _explain(peer: str, error: OSError | EOFError) -> str:
    if isinstance(error, TimeoutError):
        return f"{peer} did not finish the TLS handshake in time: is it a worker, and does it run?"
    if isinstance(error, ssl.SSLError):
        return (
            f"{peer} and this worker did not accept each other over TLS ({error.reason}): compare "
            "TELEGRAD_KEY or TELEGRAD_KEY_FILE on both sides, and whether both expect TLS"
        )
    return (
        f"{peer} closed the connection during the TLS handshake ({error}): compare TELEGRAD_KEY "
        "or TELEGRAD_KEY_FILE on both sides, and whether both expect TLS"
    )
