from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad.wire.address import (
    MAX_SOCKET_PATH,
    Address,
    CannotListen,
    TcpAddress,
    UnixAddress,
    Unreachable,
    bound,
    connect,
    host_id,
    job_directory,
    listen,
    parse_address,
    prepare,
    private_directory,
)
from telegrad.wire.stream import unheard

SO_ATTACH_FILTER = 26
"""Of Linux; Python has no name for it."""


@pytest.fixture
def directory() -> Iterator[Path]:
    path = private_directory("test")
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


HOSTS = st.one_of(
    st.from_regex(r"[a-z0-9][a-z0-9.-]{0,30}", fullmatch=True),
    st.ip_addresses().map(str),
)


@given(st.builds(TcpAddress, HOSTS, st.integers(0, 65535), st.booleans()))
def test_a_tcp_address_survives_its_text(address: TcpAddress) -> None:
    assert parse_address(str(address)) == address


@given(st.from_regex(r"/[ -~]{1,60}", fullmatch=True))
def test_a_unix_address_survives_its_text(path: str) -> None:
    assert parse_address(str(UnixAddress(path))) == UnixAddress(path)


NO_ADDRESSES = """
    bob  tcp://  tcp://bob  tcp://bob:  tcp://:1  tcp://b:70000  tcp://b:-1  tcp://::1:80
    http://b:80  unix://relative  unix://  tcp://b:8²  tcp://[b:1  tcp://a/b:1
"""


@pytest.mark.parametrize("text", ["", "tcp://a b:1", *NO_ADDRESSES.split()])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|host|port|path"):
        parse_address(text)


def test_a_socket_path_has_a_limit() -> None:
    UnixAddress("/" + "x" * (MAX_SOCKET_PATH - 1))
    with pytest.raises(ValueError, match="has 108 bytes"):
        UnixAddress("/" + "x" * MAX_SOCKET_PATH)


def exchange(address: Address) -> socket.socket:
    with listen(address) as listener:
        client = connect(bound(address, listener), 5)
        server, _ = listener.accept()
    prepare(server)
    with server:
        client.sendall(b"there")
        assert server.recv(9) == b"there"
        server.sendall(b"back")
        assert client.recv(9) == b"back"
    return client


def test_a_unix_address_is_listened_at_and_reached(directory: Path) -> None:
    exchange(UnixAddress(str(directory / "socket"))).close()
    assert stat.S_IMODE((directory / "socket").stat().st_mode) == 0o600


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_tcp_address_is_listened_at_and_reached(host: str) -> None:
    try:
        client = exchange(TcpAddress(host, 0))
    except CannotListen:
        pytest.skip(f"{host} is not available here")
    with client:
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 10
        assert client.gettimeout() is None


def test_a_socket_directory_that_others_can_enter_is_refused(directory: Path) -> None:
    directory.chmod(0o750)
    with pytest.raises(CannotListen, match=r"mode 0750.*chmod 700"):
        listen(UnixAddress(str(directory / "socket")))


def test_a_socket_directory_that_is_missing_is_named(directory: Path) -> None:
    with pytest.raises(CannotListen, match="none does not exist"):
        listen(UnixAddress(str(directory / "none" / "socket")))


def test_a_link_in_place_of_a_socket_directory_is_refused(directory: Path) -> None:
    (directory / "link").symlink_to(directory)
    with pytest.raises(CannotListen, match="not a directory"):
        listen(UnixAddress(str(directory / "link" / "socket")))


def test_an_address_that_is_taken_is_named(directory: Path) -> None:
    unix = UnixAddress(str(directory / "socket"))
    with listen(unix), pytest.raises(CannotListen, match=r"socket exists already"):
        listen(unix)
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} is taken"):
            listen(TcpAddress("127.0.0.1", port))


def test_a_foreign_address_is_no_place_to_listen() -> None:
    with pytest.raises(CannotListen, match=r"192.0.2.1 is not an address of this host"):
        listen(TcpAddress("192.0.2.1", 0))


def test_why_an_address_is_out_of_reach_is_said(directory: Path) -> None:
    path = directory / "socket"
    with pytest.raises(Unreachable, match="there is no socket at unix://"):
        connect(UnixAddress(str(path)), 1)
    address = UnixAddress(str(path))
    listen(address).close()
    with pytest.raises(Unreachable, match="nobody listens at unix://"):
        connect(address, 1)
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        tcp = bound(TcpAddress("127.0.0.1", 0), listener)
    with pytest.raises(Unreachable, match=r"nobody listens at tcp://127"):
        connect(tcp, 1)
    with pytest.raises(Unreachable, match="host name is unknown"):
        connect(TcpAddress("no-such-host.invalid", 1), 1)


def test_silence_is_settable() -> None:
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        address = bound(TcpAddress("127.0.0.1", 0), listener)
        with connect(address, 5, silence=3.2) as client:
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3


def test_private_directories_are_private_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [private_directory("telegrad") for _ in range(2)]
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        UnixAddress(str(path / ("n" * 40)))
        path.rmdir()
    assert made[0] != made[1]


def test_a_private_directory_avoids_a_long_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    path = private_directory("telegrad")
    path.rmdir()
    assert path.parent != long
    UnixAddress(str(path / ("n" * 40)))


def test_a_private_directory_prefers_the_users_runtime_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    path = private_directory("t")
    path.rmdir()
    assert path.parent == directory


def test_workers_of_one_job_share_a_directory_and_so_a_host() -> None:
    first = job_directory("a job")
    try:
        assert job_directory("a job") == first
        assert host_id(job_directory("a job")) == host_id(first)
        first.chmod(0o777)
        with pytest.raises(CannotListen, match="chmod 700"):
            job_directory("a job")
    finally:
        first.rmdir()


def test_workers_with_directories_of_their_own_are_on_different_hosts(directory: Path) -> None:
    other = private_directory("other")
    assert host_id(directory) != host_id(other)
    other.rmdir()


def test_a_directory_has_one_host_id_under_all_its_paths(directory: Path) -> None:
    other = private_directory("other")
    (other / "link").symlink_to(directory)
    assert host_id(other / "link") == host_id(directory)
    (other / "link").unlink()
    other.rmdir()


NO_RIGHT = 77


def connect_from_another_network(address: UnixAddress, expected: str) -> None:
    clone_newnet = 0x40000000
    if ctypes.CDLL(None).unshare(clone_newnet):
        os._exit(NO_RIGHT)
    same = host_id(Path(address.path).parent) == expected
    with connect(address, 5) as client:
        client.sendall(b"y" if same else b"n")


def test_a_shared_directory_reaches_across_network_namespaces(directory: Path) -> None:
    address = UnixAddress(str(directory / "socket"))
    with listen(address) as listener:
        child = multiprocessing.get_context("fork").Process(
            target=connect_from_another_network, args=(address, host_id(directory))
        )
        child.start()
        closer = threading.Thread(target=lambda: (child.join(10), listener.shutdown(2)))
        closer.start()
        try:
            server, _ = listener.accept()
        except OSError:
            closer.join()
            if child.exitcode == NO_RIGHT:
                pytest.skip("no right to make a network namespace here")
            raise
        with server:
            assert server.recv(1) == b"y"
        closer.join()


def fill(sock: socket.socket) -> None:
    try:
        while True:
            sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return


def drop_all(sock: socket.socket) -> None:
    """Have the kernel drop whatever comes for a socket, by a filter that lets nothing pass."""
    reject = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(reject))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def test_a_peer_that_lives_but_does_not_read_is_not_cut_off() -> None:
    """It may compute for minutes, and its system says meanwhile that it is there."""
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        client = connect(bound(TcpAddress("127.0.0.1", 0), listener), 5, silence=0.3)
        server, _ = listener.accept()
    with server, client:
        fill(client)
        hang_up = select.poll()
        hang_up.register(client, select.POLLHUP)
        assert not hang_up.poll(3_000), "the connection was cut"
        assert unheard(client) < 1.0


def test_how_long_a_host_has_acknowledged_nothing_is_known() -> None:
    with listen(TcpAddress("127.0.0.1", 0)) as listener:
        client = connect(bound(TcpAddress("127.0.0.1", 0), listener), 5)
        server, _ = listener.accept()
    with server, client:
        assert unheard(client) == 0.0
        drop_all(server)
        client.sendall(b"nobody hears this")
        until = time.monotonic() + 20
        while unheard(client) < 1.0:
            assert time.monotonic() < until, "silence was not noticed"
            time.sleep(0.02)
