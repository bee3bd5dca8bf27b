from __future__ import annotations

import os
import pickle
import socket
import ssl
import threading
from pathlib import Path

import pytest

from telegrad.wire import ed25519
from telegrad.wire.certificate import certificate, pem
from telegrad.wire.keys import (
    JobKey,
    JobKeyError,
    key_from_environment,
    new_key,
    parse_key,
    tls_contexts,
)

KEY = JobKey(b"sixteen bytes or more")

# RFC 8032, section 7.1: tests 1, 2, 3 and SHA(abc).
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b"
        "46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11"
        "d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc"
        "6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    (
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3fee"
        "bbd454d4423643ce80e2a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e"
        "0303dca179c138ac17ad9bef1177331a704",
    ),
]


@pytest.mark.parametrize(("seed", "public", "message", "signature"), VECTORS)
def test_signatures_agree_with_rfc_8032(
    seed: str, public: str, message: str, signature: str
) -> None:
    assert ed25519.public_key(bytes.fromhex(seed)).hex() == public
    assert ed25519.sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature


def test_a_seed_has_32_bytes() -> None:
    with pytest.raises(ValueError, match="32 bytes, not 31"):
        ed25519.public_key(bytes(31))


def test_a_key_is_shown_nowhere() -> None:
    key = JobKey(b"very secret words")
    assert "secret words" not in f"{key!r} {key} {[key]}"


def test_a_key_survives_its_way_to_a_child_process() -> None:
    key = new_key()
    assert pickle.loads(pickle.dumps(key)) == key
    assert parse_key(key.hex()) == key
    assert len({key, parse_key(key.hex()), new_key()}) == 2


def test_a_short_key_is_refused() -> None:
    with pytest.raises(JobKeyError, match="15 bytes and needs at least 16"):
        JobKey(b"x" * 15)


def test_uses_of_a_key_do_not_share_bytes() -> None:
    assert KEY.derive("one") != KEY.derive("two")
    assert bytes(KEY) not in KEY.derive("one")


def test_the_environment_gives_hex_or_text() -> None:
    assert key_from_environment({}) is None
    assert key_from_environment({"TELEGRAD_KEY": "00ff" * 8}) == JobKey(b"\0\xff" * 8)
    text = "not hexadecimal, but long"
    assert key_from_environment({"TELEGRAD_KEY": text}) == JobKey(text.encode())
    with pytest.raises(JobKeyError, match="8 bytes"):
        key_from_environment({"TELEGRAD_KEY": "0123456789abcdef"})


def test_a_key_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("ab" * 32 + "\n")
    file.chmod(0o600)
    assert key_from_environment({"TELEGRAD_KEY_FILE": str(file)}) == JobKey(b"\xab" * 32)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_key_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text("ab" * 32)
    file.chmod(mode)
    with pytest.raises(JobKeyError, match=f"mode {mode:04o}.*chmod 600") as caught:
        key_from_environment({"TELEGRAD_KEY_FILE": str(file)})
    assert "abab" not in str(caught.value)


def test_a_key_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobKeyError, match="No such file"):
        key_from_environment({"TELEGRAD_KEY_FILE": str(tmp_path / "none")})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(JobKeyError, match="not a regular file"):
        key_from_environment({"TELEGRAD_KEY_FILE": str(pipe)})
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff" * 32)
    binary.chmod(0o600)
    with pytest.raises(JobKeyError, match="not text"):
        key_from_environment({"TELEGRAD_KEY_FILE": str(binary)})


def test_two_sources_of_a_key_are_one_too_many() -> None:
    with pytest.raises(JobKeyError, match="both set"):
        key_from_environment({"TELEGRAD_KEY": "ab" * 32, "TELEGRAD_KEY_FILE": "/key"})


def test_a_certificate_follows_from_its_seed_alone() -> None:
    assert certificate(b"a" * 32) == certificate(b"a" * 32)
    assert certificate(b"a" * 32) != certificate(b"b" * 32)


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[Exception | str, Exception | str]:
    """What each end got: the TLS version it speaks, or its error."""
    here, there = socket.socketpair()
    outcome: list[Exception | str] = []

    def run(sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> Exception | str:
        try:
            with context.wrap_socket(sock, server_side=server_side) as tls:
                tls.sendall(b"x")
                assert tls.recv(1) == b"x"
                return tls.version() or ""
        except (OSError, AssertionError) as error:
            sock.close()
            return error

    thread = threading.Thread(target=lambda: outcome.append(run(there, server, True)))
    thread.start()
    mine = run(here, client, False)
    thread.join(30)
    return outcome[0], mine


def test_workers_of_one_job_accept_each_other_by_tls_1_3() -> None:
    server, _ = tls_contexts(KEY)
    _, client = tls_contexts(JobKey(bytes(KEY)))
    assert shake_hands(server, client) == ("TLSv1.3", "TLSv1.3")


@pytest.mark.parametrize("stranger", ["server", "client"])
def test_another_key_is_refused_on_both_ends(stranger: str) -> None:
    server, client = tls_contexts(KEY)
    other_server, other_client = tls_contexts(new_key())
    pair = (other_server, client) if stranger == "server" else (server, other_client)
    for outcome in shake_hands(*pair):
        assert isinstance(outcome, Exception)


def test_a_client_without_a_certificate_is_refused() -> None:
    server, _ = tls_contexts(KEY)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname = False
    stranger.verify_mode = ssl.CERT_NONE
    outcome, _ = shake_hands(server, stranger)
    assert isinstance(outcome, ssl.SSLError)


def test_a_server_with_a_certificate_of_the_same_name_is_refused() -> None:
    """The name says nothing: only the key does."""
    _, client = tls_contexts(KEY)
    impostor, _ = tls_contexts(new_key())
    impostor.verify_mode = ssl.CERT_NONE
    _, outcome = shake_hands(impostor, client)
    assert isinstance(outcome, ssl.SSLCertVerificationError)


def test_older_tls_is_refused() -> None:
    server, _ = tls_contexts(KEY)
    _, client = tls_contexts(KEY)
    client.minimum_version = ssl.TLSVersion.TLSv1_2
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert all(isinstance(outcome, OSError) for outcome in shake_hands(server, client))


def test_making_contexts_leaves_no_descriptor_behind() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    tls_contexts(KEY)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_openssl_reads_the_certificate(tmp_path: Path) -> None:
    file = tmp_path / "certificate.pem"
    file.write_text(pem("CERTIFICATE", certificate(b"a" * 32)))
    context = ssl.create_default_context(cafile=str(file))
    der = ssl.PEM_cert_to_DER_cert(file.read_text())
    assert der == certificate(b"a" * 32)
    assert context.cert_store_stats()["x509"] >= 1
