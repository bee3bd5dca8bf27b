"""A value may be asked for before the request that makes it has come: it is promised meanwhile."""

from __future__ import annotations

from telegrad import rpc
from telegrad.rpc.current import current_node
from telegrad.rpc.reference_messages import ReferenceId
from telegrad.rpc.values import PATIENCE_WITH_PROMISE
from telegrad.testing import Faults, now, simulate, sleep

A, B, C = range(3)


def fetch(reference: rpc.RRef[int]) -> int:
    return reference.to_here(timeout=0)


def test_a_value_is_waited_for_as_long_as_who_makes_it_may_be_cut_off() -> None:
    def main() -> int:
        sleep(2.0)
        made = rpc.remote("b", int, args=(7,), timeout=0)
        number: int = rpc.rpc_sync("c", fetch, args=(made,), timeout=0)
        return number

    cut_off = Faults(liveness=200.0).cut("a", "b", after=1.0, lasting=150.0)
    result = simulate(main, faults=cut_off, timeout=0)
    assert result.value == 7
    assert result.leaks == {}


def test_who_comes_later_waits_as_long_as_who_came_first() -> None:
    """Also if the first one is gone, and the end of its patience still to come."""

    def main() -> list[float]:
        values, promised = current_node().values, ReferenceId(B, A, 5)
        ended: list[float] = []
        values.when_ready(promised, lambda *_: ended.append(now()), asked_by=C)
        sleep(50.0)
        assert len(ended) == 1
        values.when_ready(promised, lambda *_: ended.append(now()), asked_by=A)
        values.when_ready(promised, lambda *_: ended.append(now()), asked_by=A)
        sleep(500.0)
        return ended

    [_, second, third] = simulate({"b": main}, faults=Faults().kill("c", after=1.0)).values["b"]
    assert second >= 50.0 + PATIENCE_WITH_PROMISE
    assert third >= 50.0 + PATIENCE_WITH_PROMISE
