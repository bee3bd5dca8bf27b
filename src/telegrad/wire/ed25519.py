"""Ed25519 signatures (RFC 8032, section 5.1), as far as one certificate needs them.

The standard library can speak TLS with an Ed25519 certificate but cannot make one. A worker signs
one certificate when it starts, always the same for the same key, so plain integers are fast enough
(some ten milliseconds) and their varying time tells an observer nothing that repeats. Everything
that happens per connection is done by OpenSSL.

A point is (X, Y, Z, T) in extended coordinates: x = X/Z, y = Y/Z, x*y = T/Z.
"""

from __future__ import annotations

import hashlib

_Point = tuple[int, int, int, int]

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P

_BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE_Y = 4 * pow(5, -1, _P) % _P
_BASE: _Point = (_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _P)
_NEUTRAL: _Point = (0, 1, 1, 0)


def public_key(seed: bytes) -> bytes:
    """The 32 byte public key of a 32 byte private seed."""
    scalar, _ = _expand(seed)
    return _encode(_multiply(scalar, _BASE))


def sign(seed: bytes, message: bytes) -> bytes:
    """The 64 byte signature of a message under a private seed."""
    scalar, prefix = _expand(seed)
    public = _encode(_multiply(scalar, _BASE))
    nonce = _hash_to_scalar(prefix, message)
    commitment = _encode(_multiply(nonce, _BASE))
    challenge = _hash_to_scalar(commitment, public, message)
    response = (nonce + challenge * scalar) % _ORDER
    return commitment + response.to_bytes(32, "little")


def _expand(seed: bytes) -> tuple[int, bytes]:
    if len(seed) != 32:
        raise ValueError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
    digest = hashlib.sha512(seed).digest()
    scalar = int.from_bytes(digest[:32], "little")
    # Clamping: a multiple of the cofactor 8, with bit 254 as its highest.
    scalar &= (1 << 254) - 8
    scalar |= 1 << 254
    return scalar, digest[32:]


def _hash_to_scalar(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _add(a: _Point, b: _Point) -> _Point:
    """Complete for all pairs of points, equal ones included: so it doubles as well."""
    ax, ay, az, at = a
    bx, by, bz, bt = b
    low = (ay - ax) * (by - bx) % _P
    high = (ay + ax) * (by + bx) % _P
    cross = 2 * at * bt * _D % _P
    scale = 2 * az * bz % _P
    e, f, g, h = high - low, scale - cross, scale + cross, high + low
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _multiply(scalar: int, point: _Point) -> _Point:
    total = _NEUTRAL
    while scalar:
        if scalar & 1:
            total = _add(total, point)
        point = _add(point, point)
        scalar >>= 1
    return total


def _encode(point: _Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, _P)
    x, y = x * inverse % _P, y * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")
