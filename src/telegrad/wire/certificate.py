"""A self-signed Ed25519 certificate that follows from a seed alone: same seed, same bytes.

Every worker of a job derives the same certificate, so pinning it needs no exchange of files. Its
subject and its dates say nothing (they must be the same everywhere and for ever): who holds the
private key is a worker of the job, and that is all the certificate is asked.

It is an end-entity certificate: as the only trust anchor it vouches for itself and for no other.
"""

from __future__ import annotations

import base64
import hashlib

from telegrad.wire import ed25519

_BOOLEAN, _INTEGER, _BITS, _OCTETS, _OID, _UTF8, _TIME = 0x01, 0x02, 0x03, 0x04, 0x06, 0x0C, 0x18
_SEQUENCE, _SET = 0x30, 0x31
_CONTEXT_0, _CONTEXT_3 = 0xA0, 0xA3
_KEY_ID = 0x80

_TRUE = b"\xff"
_NO_UNUSED_BITS = b"\0"
_DIGITAL_SIGNATURE = b"\x07\x80"
_VERSION_3 = b"\x02"


def certificate(seed: bytes, name: str = "telegrad") -> bytes:
    """The DER of the certificate whose private key is `seed`."""
    public = ed25519.public_key(seed)
    subject = _name(name)
    body = _der(
        _SEQUENCE,
        _der(_CONTEXT_0, _der(_INTEGER, _VERSION_3)),
        _der(_INTEGER, b"\x01"),
        _ED25519,
        subject,
        _der(_SEQUENCE, _der(_TIME, b"20200101000000Z"), _der(_TIME, b"99991231235959Z")),
        subject,
        _der(_SEQUENCE, _ED25519, _der(_BITS, _NO_UNUSED_BITS, public)),
        _der(_CONTEXT_3, _extensions(public)),
    )
    signature = ed25519.sign(seed, body)
    return _der(_SEQUENCE, body, _ED25519, _der(_BITS, _NO_UNUSED_BITS, signature))


def private_key(seed: bytes) -> bytes:
    """The DER (PKCS #8, RFC 8410) of the private key."""
    return _der(_SEQUENCE, _der(_INTEGER, b"\0"), _ED25519, _der(_OCTETS, _der(_OCTETS, seed)))


def pem(kind: str, der: bytes) -> str:
    """Armour: `kind` is what stands behind BEGIN and END."""
    body = base64.encodebytes(der).decode("ascii")
    return f"-----BEGIN {kind}-----\n{body}-----END {kind}-----\n"


def _der(tag: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(digits))) + digits + content


def _name(common_name: str) -> bytes:
    oid = _der(_OID, bytes((0x55, 4, 3)))
    attribute = _der(_SEQUENCE, oid, _der(_UTF8, common_name.encode()))
    return _der(_SEQUENCE, _der(_SET, attribute))


def _extensions(public: bytes) -> bytes:
    key_id = hashlib.sha1(public, usedforsecurity=False).digest()
    return _der(
        _SEQUENCE,
        _extension(19, _der(_SEQUENCE), critical=True),
        _extension(15, _der(_BITS, _DIGITAL_SIGNATURE), critical=True),
        _extension(14, _der(_OCTETS, key_id)),
        _extension(35, _der(_SEQUENCE, _der(_KEY_ID, key_id))),
    )


def _extension(number: int, value: bytes, critical: bool = False) -> bytes:
    oid = _der(_OID, bytes((0x55, 0x1D, number)))
    flag = _der(_BOOLEAN, _TRUE) if critical else b""
    return _der(_SEQUENCE, oid, flag, _der(_OCTETS, value))


_ED25519 = _der(_SEQUENCE, _der(_OID, bytes((0x2B, 0x65, 0x70))))
