"""The job's key: where it comes from, and the TLS certificate that follows from it.

Whoever holds the key may run code on every worker of the job, so the key is shown nowhere: not by
`repr`, not in an error, not in a file that others can read. What is needed from it (the key of the
handshake, the seed of the certificate) is derived under a label, so that no use of the key tells
anything about another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import ssl
import stat
from collections.abc import Mapping

from telegrad.wire.certificate import certificate, pem, private_key

KEY_VARIABLE = "TELEGRAD_KEY"
KEY_FILE_VARIABLE = "TELEGRAD_KEY_FILE"
MIN_KEY_BYTES = 16
_MAX_FILE_BYTES = 4096


class JobKeyError(ValueError):
    """The job's key is missing, too short, or kept where others can read it."""


class JobKey:
    """The secret that the workers of one job share."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, bytes | bytearray):
            raise TypeError(
                f"the job's key is a {type(secret).__name__}: give bytes, as from "
                "secrets.token_bytes(32)"
            )
        if len(secret) < MIN_KEY_BYTES:
            raise JobKeyError(
                f"the job's key has {len(secret)} bytes and needs at least {MIN_KEY_BYTES}: "
                "make one with `openssl rand -hex 32`"
            )
        self._secret = bytes(secret)

    def __bytes__(self) -> bytes:
        return self._secret

    def __repr__(self) -> str:
        return "JobKey(<secret>)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JobKey):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash((JobKey, self._secret))

    def hex(self) -> str:
        """The text form that `TELEGRAD_KEY` takes: for the environment of a worker, no log."""
        return self._secret.hex()

    def derive(self, label: str) -> bytes:
        """32 bytes for one use of the key."""
        return hmac.digest(self._secret, label.encode(), hashlib.sha256)


def new_key() -> JobKey:
    """A random key for a new job."""
    return JobKey(secrets.token_bytes(32))


def parse_key(text: str) -> JobKey:
    """A key from text: hexadecimal where it can be read so, else the text itself."""
    text = text.strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = text.encode()
    return JobKey(secret)


def key_from_environment(environment: Mapping[str, str] = os.environ) -> JobKey | None:
    """The key that TELEGRAD_KEY holds or TELEGRAD_KEY_FILE points to; None if neither is set."""
    text = environment.get(KEY_VARIABLE)
    path = environment.get(KEY_FILE_VARIABLE)
    if text is not None and path is not None:
        raise JobKeyError(
            f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set: unset one, so that it is "
            "clear which key the job uses"
        )
    if text is not None:
        return parse_key(text)
    if path is not None:
        return parse_key(_read_private_file(path))
    return None


def _read_private_file(path: str) -> str:
    try:
        # Without O_NONBLOCK a pipe in the file's place would hold the worker up for ever.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            return file.read(_MAX_FILE_BYTES).decode()
    except OSError as error:
        raise JobKeyError(
            f"the key file {path} named by {KEY_FILE_VARIABLE} cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise JobKeyError(f"the key file {path} is not text: write the key as hex") from None


def _check_private(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise JobKeyError(f"the key file {path} is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise JobKeyError(
            f"the key file {path} belongs to user {status.st_uid}, who could change it: "
            "own it yourself"
        )
    if status.st_mode & 0o077:
        raise JobKeyError(
            f"the key file {path} can be read by others (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"run `chmod 600 {path}`"
        )


def tls_contexts(key: JobKey) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts for the server's and the client's end of TLS between workers of this job.

    Both ends present the job's certificate, and trust that certificate alone.
    """
    seed = key.derive("telegrad tls 1")
    public = pem("CERTIFICATE", certificate(seed))
    private = pem("PRIVATE KEY", private_key(seed))
    server, client = ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT
    return _context(server, public, private), _context(client, public, private)


def _context(protocol: int, public: str, private: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Workers are known by the key, not by the names of their hosts.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=public)
    _load_identity(context, public + private)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # A resumed TLS session would save little and skip the certificates.
        context.num_tickets = 0
    return context


def _load_identity(context: ssl.SSLContext, text: str) -> None:
    """OpenSSL is given a path here, so the private key passes through memory that has one."""
    descriptor = os.memfd_create("telegrad-identity", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
