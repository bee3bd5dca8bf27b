"""Where a worker listens, and how to get there.

Unix sockets serve workers that share a directory, TCP all others. A socket file is guarded by its
directory, which only its owner may enter: on the way to a socket the kernel asks for no more than
that, and the mode of the socket file alone is not honoured everywhere.

TCP and silence. A peer whose host vanished sends no end-of-file. Keepalive finds that out while the
connection is idle, and `stream.unheard` while data is under way, as retransmission goes on for many
minutes. TCP_USER_TIMEOUT would do both, but the kernel applies it also to a peer that lives and
does not read: a worker that computes for longer would be cut off.

TCP buffers are left to the kernel, which grows them with the path up to a larger size than a
process may ask for. Those of Unix sockets do not grow, so they are set.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

MAX_SOCKET_PATH = 107
DEFAULT_SILENCE = 10.0

_UNIX_BUFFER = 1 << 20
_ROOM_FOR_NAME = 40
_BACKLOG = 1024


class Unreachable(ConnectionError):
    """A worker's address did not accept a connection."""


class CannotListen(OSError):
    """This worker cannot listen where it was told to."""


class DirectoryGone(CannotListen, FileNotFoundError):
    """The directory of a socket is not there, or not any more."""


@dataclass(frozen=True)
class UnixAddress:
    """A socket file; its text is unix:///absolute/path."""

    path: str

    def __post_init__(self) -> None:
        size = len(os.fsencode(self.path))
        if not os.path.isabs(self.path) or "\0" in self.path:
            raise ValueError(f"the socket path {self.path!r} is not absolute")
        if size > MAX_SOCKET_PATH:
            raise ValueError(
                f"the socket path {self.path!r} has {size} bytes and the system takes "
                f"{MAX_SOCKET_PATH}: choose a shorter directory, e.g. by TMPDIR"
            )

    def __str__(self) -> str:
        return f"unix://{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    """A host and a port; its text is tcp://host:port, or tls://host:port under TLS."""

    host: str
    port: int
    tls: bool = False

    def __post_init__(self) -> None:
        if not self.host or any(c in "[]/@" or c.isspace() for c in self.host):
            raise ValueError(f"{self.host!r} is not a host name or address")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"the port {self.port} is not between 0 and 65535")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """The address that a text names; `str` of an address gives the text back."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "unix":
        return UnixAddress(rest)
    if separator and scheme in ("tcp", "tls"):
        host, _, port = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if port.isascii() and port.isdigit() and len(port) <= 5 and (bracketed or ":" not in host):
            return TcpAddress(host[1:-1] if bracketed else host, int(port), scheme == "tls")
    raise ValueError(
        f"{text!r} is not an address: write unix:///path, tcp://host:port or tls://host:port"
    )


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host stays on this one. Names are not asked: they may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def listen(address: Address) -> socket.socket:
    """A listening socket. Port 0 takes a free port, which `bound` tells."""
    if isinstance(address, UnixAddress):
        return _listen_unix(address)
    return _listen_tcp(address)


def bound(address: Address, listener: socket.socket) -> Address:
    """The address with the port that the listener was given."""
    if isinstance(address, UnixAddress):
        return address
    return replace(address, port=listener.getsockname()[1])


def connect(
    address: Address, timeout: float | None, *, silence: float | None = DEFAULT_SILENCE
) -> socket.socket:
    """A connected, blocking socket; raises `Unreachable` with a sentence.

    `silence` is how long an idle TCP peer may leave questions whether it is there unanswered.
    """
    try:
        if isinstance(address, UnixAddress):
            sock = _connect_unix(address, timeout)
        else:
            sock = socket.create_connection((address.host, address.port), timeout)
    except OSError as error:
        raise Unreachable(_why_unreachable(address, timeout, error)) from None
    sock.settimeout(None)
    prepare(sock, silence=silence)
    return sock


def prepare(sock: socket.socket, *, silence: float | None = DEFAULT_SILENCE) -> None:
    """Set a connection's options: `connect` does it itself, accepted sockets need it."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    if silence is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, min(127, round(silence))))


def private_directory(prefix: str) -> Path:
    """A new directory that only this user can enter, with a path short enough for sockets."""
    for parent in _runtime_directories(len(os.fsencode(prefix)) + len("-12345678")):
        return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
    raise CannotListen(_NO_DIRECTORY)


def job_directory(job: str) -> Path:
    """The directory that this user's workers of one job share on this host; made if missing."""
    name = "telegrad-" + hashlib.sha256(job.encode()).hexdigest()[:16]
    for parent in _runtime_directories(len(name)):
        directory = parent / name
        while True:
            directory.mkdir(mode=0o700, exist_ok=True)
            # Others of the job may remove it as they leave.
            with contextlib.suppress(DirectoryGone):
                _check_directory(directory)
                return directory
    raise CannotListen(_NO_DIRECTORY)


def host_id(directory: Path) -> str:
    """Equal for two workers if each can reach the sockets in the other's directory.

    Each worker passes the directory of its own sockets. To reach a socket file takes the same
    kernel and the same directory, and nothing else: network namespaces do not matter, and
    containers may share a directory under different paths. The boot id tells kernels apart, device
    and inode tell directories apart. Workers that share no directory count as on different hosts.
    """
    status = os.stat(directory)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{status.st_dev:x}:{status.st_ino:x}"


_NO_DIRECTORY = (
    "neither XDG_RUNTIME_DIR nor the temporary directory can hold sockets (not writable, or the "
    "path is too long): set TMPDIR to a short path"
)


def _runtime_directories(name_bytes: int) -> Iterator[Path]:
    """Existing parents for a private directory, best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for text in (*([runtime] if runtime else []), tempfile.gettempdir(), "/tmp"):
        parent = Path(text).absolute()
        size = len(os.fsencode(parent)) + 1 + name_bytes + 1 + _ROOM_FOR_NAME
        if size <= MAX_SOCKET_PATH and parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            yield parent


def _check_directory(directory: Path) -> None:
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        raise DirectoryGone(f"the socket directory {directory} does not exist") from None
    except OSError as error:
        raise CannotListen(
            f"the socket directory {directory} cannot be used: {error.strerror}"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise CannotListen(f"the socket directory {directory} is not a directory")
    if status.st_uid != os.geteuid():
        raise CannotListen(
            f"the socket directory {directory} belongs to user {status.st_uid}, who could put a "
            "socket of his own there: use a directory of your own"
        )
    if status.st_mode & 0o077:
        raise CannotListen(
            f"the socket directory {directory} can be entered by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): run `chmod 700 {directory}`"
        )


def _listen_unix(address: UnixAddress) -> socket.socket:
    _check_directory(Path(address.path).parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address.path)
        os.chmod(address.path, 0o600)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise CannotListen(
                f"{address} exists already: another worker listens there, or one that was killed "
                "left it behind; choose another name, or remove the file"
            ) from None
        kind = DirectoryGone if error.errno == errno.ENOENT else CannotListen
        raise kind(f"cannot listen at {address}: {error.strerror}") from None
    return listener


def _listen_tcp(address: TcpAddress) -> socket.socket:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise CannotListen(
            f"cannot listen at {address}: the host {address.host!r} is unknown ({error.strerror})"
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(_why_no_port(address, error)) from None
    return listener


def _why_no_port(address: TcpAddress, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen at {address}: port {address.port} is taken by another process; "
            "choose another, or port 0 for any that is free"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen at {address}: {address.host} is not an address of this host"
    if error.errno == errno.EACCES:
        return f"cannot listen at {address}: port {address.port} needs privileges; take one >= 1024"
    return f"cannot listen at {address}: {error.strerror}"


def _connect_unix(address: UnixAddress, timeout: float | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(address.path)
    except OSError:
        sock.close()
        raise
    return sock


def _why_unreachable(address: Address, timeout: float | None, error: OSError) -> str:
    # An error of name resolution carries numbers of its own that clash with those of the kernel.
    if isinstance(error, socket.gaierror):
        return f"cannot reach {address}: its host name is unknown here ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at {address}: has the worker started, or has it ended?"
    if isinstance(error, TimeoutError):
        return f"{address} did not answer within {timeout} s: is its host up and the port open?"
    if isinstance(error, BlockingIOError):
        return f"{address} is busy: its worker does not accept connections fast enough"
    if isinstance(error, FileNotFoundError):
        return f"there is no socket at {address}: has the worker started, or has it ended?"
    if isinstance(error, PermissionError):
        return f"this user may not use {address}: it belongs to another user's job"
    return f"cannot reach {address}: {error.strerror or error}"


def own_address_towards(host: str, port: int) -> str | None:
    """The address of this host on the way to another, None if that is this host itself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 9))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if is_loopback(address) else address
