"""A companion that says how its worker is, to peers that cannot see the worker's process.

On one host a worker asks the kernel how another is (`vitals.py`). Between hosts somebody has to be
asked who is not the worker itself: an interpreter that computes for a minute in C answers nobody,
though it is well; and one that was stopped keeps its connections, because the kernel goes on to
acknowledge what is sent to it. So each worker that listens for other hosts has a companion: a small
process that looks at the worker's entry in /proc and answers by UDP. A busy worker's companion says
that it runs, a stopped one's that it is stopped, and that of a host that is gone says nothing.

Question and answer are one datagram each, of the same size (nobody can use a companion in order to
send someone more than they sent), under an HMAC with a key that follows from the job's. The answer
holds the random number of its question: an old one is worth nothing. A question that does not prove
the key is not answered.

A companion may be killed while its worker is well. The worker keeps the socket, so it can start
another one that answers at the same address, and what was asked meanwhile waits there for it:
nobody has to be told.

This file is run by itself, by an interpreter that loads nothing else: a companion takes about ten
megabytes. So it imports no other part of telegrad.
"""

from __future__ import annotations

import enum
import hmac
import os
import socket
import struct
import subprocess
import sys
import threading

_WORDS = struct.Struct("<4s1sQ16sB")
_PROOF = 32
SIZE = _WORDS.size + _PROOF
_MAGIC = b"tgpl"
_QUESTION, _ANSWER = b"?", b"!"
_BEGINNING = struct.Struct("<32sQQQ")
_LOOK_FOR_PARENT = 1.0


class Condition(enum.IntEnum):
    """How a worker's process is."""

    RUNS = 0
    STOPPED = 1
    GONE = 2


def question(key: bytes, incarnation: int, nonce: bytes) -> bytes:
    return _prove(key, _WORDS.pack(_MAGIC, _QUESTION, incarnation, nonce, 0))


def read_question(key: bytes, data: bytes) -> tuple[int, bytes] | None:
    """Whom it is for, and its number. None: it does not prove the key."""
    words = _proven(key, data, _QUESTION)
    return None if words is None else (words[0], words[1])


def answer(key: bytes, incarnation: int, nonce: bytes, condition: Condition) -> bytes:
    return _prove(key, _WORDS.pack(_MAGIC, _ANSWER, incarnation, nonce, condition))


def read_answer(key: bytes, data: bytes) -> tuple[int, bytes, Condition] | None:
    """Whose answer it is, the number of its question, and what it says."""
    words = _proven(key, data, _ANSWER)
    if words is None or words[2] not in set(Condition):
        return None
    return words[0], words[1], Condition(words[2])


def _prove(key: bytes, words: bytes) -> bytes:
    return words + hmac.digest(key, words, "sha256")


def _proven(key: bytes, data: bytes, kind: bytes) -> tuple[int, bytes, int] | None:
    if len(data) != SIZE:
        return None
    words = data[: _WORDS.size]
    if not hmac.compare_digest(hmac.digest(key, words, "sha256"), data[_WORDS.size :]):
        return None
    magic, found, incarnation, nonce, condition = _WORDS.unpack(words)
    return (incarnation, nonce, condition) if (magic, found) == (_MAGIC, kind) else None


def look_at(pid: int, born: int) -> Condition:
    """What the kernel says of a process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return Condition.GONE
    except OSError:
        # The system has no room to look. Its child is still asked, so it is there.
        return Condition.RUNS
    if fields[0] in "ZXx" or int(fields[19]) != born:
        return Condition.GONE
    return Condition.STOPPED if fields[0] in "Tt" else Condition.RUNS


class Companion:
    """The worker's end: starts the process, again if it was killed, and ends it."""

    def __init__(self, host: str, key: bytes, incarnation: int, pid: int, born: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._beginning = _BEGINNING.pack(key, incarnation, pid, born)
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._listener.bind((host, 0))
            self.address: tuple[str, int] = self._listener.getsockname()[:2]
            self._start()
        except BaseException:
            self._listener.close()
            raise

    def _start(self) -> None:
        # A session of its own: neither Ctrl-C nor Ctrl-Z of the terminal is meant for it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._listener.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._listener.fileno(),),
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("TELEGRAD")},
        )
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(self._beginning)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether nobody answers, though somebody should. Never waits."""
        return not self._closed and self._process.poll() is not None

    def revive(self) -> None:
        """Start another process in the place of one that has ended. Raises `OSError` if the system
        gives none: try again later."""
        with self._lock:
            if self.has_ended:
                self._start()

    def close(self) -> None:
        # Under the lock: a process that is just being started would be left behind.
        with self._lock:
            self._closed = True
            self._process.kill()
            self._process.wait()
            self._listener.close()


def _keep_company(listener: socket.socket, beginning: bytes) -> None:
    """The companion's life: answer until the worker is gone."""
    key, incarnation, pid, born = _BEGINNING.unpack(beginning)
    listener.settimeout(_LOOK_FOR_PARENT)
    while os.getppid() == pid:
        try:
            data, sender = listener.recvfrom(SIZE + 1)
        except OSError:
            continue
        asked = read_question(key, data)
        if asked is not None and asked[0] == incarnation:
            reply = answer(key, incarnation, asked[1], look_at(pid, born))
            try:
                listener.sendto(reply, sender)
            except OSError:
                continue


if __name__ == "__main__":
    _keep_company(socket.socket(fileno=int(sys.argv[1])), sys.stdin.buffer.read(_BEGINNING.size))
