"""Hosts for tests: network namespaces that are joined by a bridge, and can be cut from each other.

A process becomes one of a host by `enter`. All of them still see each other in /proc, which workers
on different hosts do not: `enter` hides that too.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class Hosts:
    """Namespaces named after their hosts; the process that makes them is at `gateway`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"tg{os.getpid() % 10000}x{next(_numbers)}"
        # Others may test on this machine at the same time: each has a network of its own.
        base = f"10.{100 + secrets.randbelow(150)}.{secrets.randbelow(250)}"
        self.gateway = f"{base}.254"
        self.addresses = {name: f"{base}.{number}" for number, name in enumerate(names, 1)}
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _ip("link", "add", self._tag, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._tag)
        _ip("link", "set", self._tag, "up")
        for number, (name, address) in enumerate(self.addresses.items()):
            space, port = self.namespace(name), self._port(number)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", self._tag, "up")
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _port(self, number: int) -> str:
        return f"{self._tag}p{number}"

    def cut_off(self, name: str) -> None:
        """Nothing reaches this host or leaves it: as if its cable were pulled."""
        number = list(self.addresses).index(name)
        _ip("link", "set", self._port(number), "down")

    def join(self, name: str) -> None:
        number = list(self.addresses).index(name)
        _ip("link", "set", self._port(number), "up")

    def cut(self, one: str, other: str) -> None:
        """These two do not reach each other; all others reach both."""
        for here, there in ((one, other), (other, one)):
            _ip("-n", self.namespace(here), "route", "add", "blackhole", self.addresses[there])

    def degrade(self, name: str, *netem: str) -> str | None:
        """Give what this host sends loss and latency; why not, if the kernel cannot."""
        words = ["tc", "-n", self.namespace(name), "qdisc", "add", "dev", "eth0", "root", "netem"]
        try:
            done = subprocess.run([*words, *netem], capture_output=True, text=True)
        except OSError as error:
            return str(error)
        return None if done.returncode == 0 else done.stderr.strip()

    def close(self) -> None:
        """A namespace lives on while a process is in it; its cable does not."""
        for number, name in enumerate(self.addresses):
            for words in (
                ("link", "del", self._port(number)),
                ("netns", "del", self.namespace(name)),
            ):
                subprocess.run(["ip", *words], capture_output=True)
        subprocess.run(["ip", "link", "del", self._tag], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def why_not() -> str | None:
    """Why this machine does not let us make hosts; None if it does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"tgprobe{os.getpid() % 100000}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
        _ip("link", "add", probe, "type", "bridge")
        _ip("link", "del", probe)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here ({error})"
    return None


@contextmanager
def hosts(*names: str) -> Iterator[Hosts]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Hosts(names)
    try:
        yield made
    finally:
        made.close()


def enter(namespace: str) -> None:
    """Move this process, which has one thread, to a host."""
    from telegrad.rpc import vitals

    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {namespace} failed")
    finally:
        os.close(descriptor)
    vitals._namespace = lambda: namespace  # type: ignore[assignment]
