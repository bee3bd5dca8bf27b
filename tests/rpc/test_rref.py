"""References between real processes: what they do, and that nothing is left of them."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import rpc
from telegrad.rpc.current import current_node
from tests.rpc import functions
from tests.rpc.fleet import Job
from tests.rpc.functions import Account

MakeJob = Callable[..., Job]
COUNTED = ("owned", "forks", "held", "unconfirmed", "pins", "values")


def references() -> dict[str, int]:
    gc.collect()
    found: dict[str, int] = rpc.debug_info()["references"]
    return {name: found[name] for name in COUNTED}


def left_on_all() -> dict[str, dict[str, int]]:
    """What workers hold, of those that hold anything."""
    found = {name: rpc.rpc_sync(name, references) for name in ("main", "worker1", "worker2")}
    return {name: left for name, left in found.items() if any(left.values())}


@pytest.fixture
def clean(workers: Any) -> Any:
    yield
    until = time.monotonic() + 20
    while left := left_on_all():
        # The last messages may still be on their way.
        assert time.monotonic() < until, str(left)
        time.sleep(0.01)


pytestmark = pytest.mark.usefixtures("workers")


def fetch(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


def facts(rref: rpc.RRef[Any]) -> dict[str, Any]:
    return {
        "is owner": rref.is_owner(),
        "owner": rref.owner(),
        "name": rref.owner_name(),
        "confirmed": rref.confirmed_by_owner(),
    }


def give_own(value: Any) -> rpc.RRef[Any]:
    return rpc.RRef(value)


def pass_on(rref: rpc.RRef[Any], path: list[str]) -> Any:
    if not path:
        return rref.to_here()
    return rpc.rpc_sync(path[0], pass_on, args=(rref, path[1:]))


def same(a: rpc.RRef[Any], b: rpc.RRef[Any]) -> bool:
    return a == b and hash(a) == hash(b) and len({a, b}) == 1


def add_in_place(rref: rpc.RRef[Any], amount: float) -> None:
    rref.local_value().add_(amount)


@pytest.mark.usefixtures("clean")
class TestUse:
    def test_a_reference_is_made_here_and_read_here_and_there(self) -> None:
        rref = rpc.RRef(torch.ones(2))
        assert rref.is_owner()
        assert rref.local_value() is rref.to_here()
        assert rref.confirmed_by_owner()
        assert rpc.rpc_sync("worker1", fetch, args=(rref,)).tolist() == [1, 1]

    def test_remote_gives_a_reference_to_the_result(self) -> None:
        rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
        assert rref.to_here().tolist() == [2, 2]
        assert not rref.is_owner()
        assert rref.owner() == rpc.get_worker_info("worker1")
        assert rref.owner_name() == "worker1"
        until = time.monotonic() + 20
        while not rref.confirmed_by_owner():
            # The owner's word comes by itself, and may be later than the value.
            assert time.monotonic() < until
            time.sleep(0.001)

    def test_the_value_is_reached_only_on_its_owner(self) -> None:
        rref = rpc.remote("worker1", torch.ones, args=(2,))
        with pytest.raises(rpc.TelegradError, match=r"to_here\(\)"):
            rref.local_value()
        rpc.rpc_sync("worker1", add_in_place, args=(rref, 1.0))
        assert rref.to_here().tolist() == [2, 2]

    def test_facts_of_a_reference_on_owner_and_users(self) -> None:
        rref = rpc.remote("worker1", torch.ones, args=(2,))
        owner = rpc.get_worker_info("worker1")
        for to in ("main", "worker1", "worker2"):
            found = rpc.rpc_sync(to, facts, args=(rref,))
            assert found["is owner"] == (to == "worker1")
            assert found["owner"] == owner
            assert found["name"] == "worker1"
            assert found["confirmed"]

    def test_references_come_back_as_results_and_inside_of_containers(self) -> None:
        rref = rpc.rpc_sync("worker1", give_own, args=(5,))
        assert rref.to_here() == 5
        assert rref.owner_name() == "worker1"
        inside = rpc.rpc_sync("worker2", functions.echo, args=({"a": [rref, (rref,)]},))
        assert inside["a"][0].to_here() == 5
        assert inside["a"][0] == inside["a"][1][0] == rref

    def test_references_are_passed_on_along_any_path(self) -> None:
        rref = rpc.remote("worker1", functions.echo, args=("value",))
        path = ["worker2", "main", "worker1", "worker2", "worker1"]
        assert rpc.rpc_sync("worker2", pass_on, args=(rref, path)) == "value"

    def test_a_reference_to_a_reference_works(self) -> None:
        inner = rpc.remote("worker1", functions.echo, args=(3,))
        outer = rpc.remote("worker2", functions.echo, args=(inner,))
        del inner
        assert outer.to_here().to_here() == 3

    def test_equal_references_are_equal_everywhere(self) -> None:
        a = rpc.remote("worker1", functions.echo, args=(1,))
        b = rpc.remote("worker1", functions.echo, args=(1,))
        assert rpc.rpc_sync("worker1", same, args=(a, a))
        assert rpc.rpc_sync("worker2", same, args=(a, a))
        assert not rpc.rpc_sync("worker2", same, args=(a, b))
        assert a != b
        assert a != 1

    def test_a_reference_is_pickled_only_over_the_wire(self) -> None:
        rref = rpc.RRef(1)
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(RuntimeError, match="rref"):
                attempt(rref)

    def test_methods_are_called_through_references(self) -> None:
        account = rpc.remote("worker1", Account, args=(1.0,))
        assert account.rpc_sync().add(1.0) == 2.0
        assert account.rpc_async().add(1.0).wait() == 3.0
        assert account.remote().add(1.0).to_here() == 4.0
        assert account.rpc_sync().double(3.0) == 6.0
        assert account.to_here().balance == 4.0
        with pytest.raises(LookupError, match="no such account"):
            account.rpc_sync().fail()
        with pytest.raises(LookupError, match="no such account"):
            account.rpc_async().fail().wait()
        with pytest.raises(LookupError, match="no such account"):
            account.remote().fail().to_here()
        with pytest.raises(AttributeError):
            account.rpc_sync().no_such_method()

    def test_methods_are_called_on_ones_own_values(self) -> None:
        account = rpc.RRef(Account(1.0))
        assert account.rpc_sync().add(1.0) == 2.0
        assert account.rpc_async().add(1.0).wait() == 3.0
        assert account.remote().add(1.0).to_here() == 4.0
        assert account.local_value().balance == 4.0

    def test_a_value_that_is_still_being_made_is_waited_for(self) -> None:
        rref = rpc.remote("worker1", functions.wait_event, args=("made",))
        with pytest.raises(rpc.CallTimeout):
            rref.to_here(timeout=0.1)
        other = rpc.rpc_async("worker2", fetch, args=(rref,))
        rpc.rpc_sync("worker1", functions.set_event, args=("made",))
        assert rref.to_here() == "made"
        assert other.wait() == "made"

    def test_the_error_of_a_value_is_raised_wherever_it_is_asked_for(self) -> None:
        rref = rpc.remote("worker1", functions.raise_value_error, args=("not made",))
        for _ in range(2):
            with pytest.raises(ValueError, match="not made"):
                rref.to_here()
        with pytest.raises(ValueError, match="not made"):
            rpc.rpc_sync("worker2", fetch, args=(rref,))

    def test_a_value_that_cannot_travel_stays_usable_through_its_owner(self) -> None:
        rref = rpc.remote("worker1", functions.give_unsendable)
        with pytest.raises(Exception, match="lock"):
            rref.to_here()
        assert rref.rpc_sync().locked() is False

    def test_an_argument_that_cannot_be_sent_leaves_no_reference(self) -> None:
        import threading

        with pytest.raises(TypeError):
            rpc.remote("worker1", functions.echo, args=(threading.Lock(),))
        rref = rpc.remote("worker1", functions.echo, args=(1,))
        with pytest.raises(TypeError):
            rpc.rpc_sync("worker2", functions.echo_all, args=(rref, threading.Lock()))
        assert rref.to_here() == 1


def keep(name: str, rref: rpc.RRef[Any]) -> None:
    functions.shelf[name] = rref


def kept(name: str) -> Any:
    return functions.shelf[name].to_here()


def drop(name: str) -> None:
    functions.shelf.pop(name, None)


def owned_values() -> int:
    gc.collect()
    count: int = rpc.debug_info()["references"]["values"]
    return count


@pytest.mark.usefixtures("clean")
class TestLifetime:
    def test_a_value_lives_while_any_worker_refers_to_it_and_no_longer(self) -> None:
        rref = rpc.remote("worker1", functions.echo, args=("alive",))
        rpc.rpc_sync("worker2", keep, args=("x", rref))
        del rref
        gc.collect()
        assert rpc.rpc_sync("worker2", kept, args=("x",)) == "alive"
        assert rpc.rpc_sync("worker1", owned_values) == 1
        rpc.rpc_sync("worker2", drop, args=("x",))
        until = time.monotonic() + 10
        while rpc.rpc_sync("worker1", owned_values):
            assert time.monotonic() < until

    def test_the_owner_may_be_a_holder_too(self) -> None:
        rref = rpc.RRef("mine")
        rpc.rpc_sync("worker1", keep, args=("y", rref))
        del rref
        gc.collect()
        assert rpc.rpc_sync("worker1", kept, args=("y",)) == "mine"
        rpc.rpc_sync("worker1", drop, args=("y",))

    def test_references_that_time_out_or_fail_are_let_go(self) -> None:
        for _ in range(20):
            with pytest.raises(rpc.CallTimeout):
                rpc.rpc_sync("worker1", give_later, args=("given",), timeout=0.01)
        rpc.rpc_sync("worker1", functions.set_event, args=("given",))

    def test_ten_thousand_references_leave_nothing(self) -> None:
        numbers = random.Random(7)
        names = ["main", "worker1", "worker2"]
        held: list[rpc.RRef[Any]] = []
        for n in range(10_000):
            held.append(rpc.remote(numbers.choice(names), functions.echo, args=(n,)))
            if len(held) > 500:
                numbers.shuffle(held)
                third = rpc.rpc_async(numbers.choice(names), functions.echo, args=(held[:50],))
                del held[100:]
                third.wait()


def give_later(name: str) -> rpc.RRef[Any]:
    functions.wait_event(name)
    return rpc.RRef(torch.ones(3))


# Workers that die.


def make_there(to: str, value: Any) -> None:
    functions.shelf["made"] = rpc.remote(to, functions.echo, args=(value,))


def send_there(to: str, name: str, value: Any) -> None:
    """Own a value and let another worker hold a reference to it."""
    rpc.rpc_sync(to, keep, args=(name, rpc.RRef(value)))


def pass_made(to: str, name: str) -> None:
    rpc.rpc_sync(to, keep, args=(name, functions.shelf["made"]))


def fetch_made() -> Any:
    return functions.shelf["made"].to_here()


def wait_until_owned(count: int) -> int:
    until = time.monotonic() + 10
    while (found := owned_values()) != count and time.monotonic() < until:
        time.sleep(0.01)
    return found


def test_what_a_killed_holder_held_is_dropped(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["a"].do(send_there, "b", "x", torch.ones(3))
    assert job["a"].do(owned_values) == 1
    job["b"].kill()
    assert job["a"].do(wait_until_owned, 0) == 0


def test_what_a_killed_holder_passed_on_lives(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["b"].do(make_there, "a", "passed on")
    job["b"].do(pass_made, "c", "x")
    job["b"].kill()
    assert job["c"].do(kept, "x") == "passed on"
    assert job["a"].do(owned_values) == 1
    job["c"].do(drop, "x")
    assert job["a"].do(wait_until_owned, 0) == 0


def test_a_reference_whose_owner_was_killed_says_so(make_job: MakeJob) -> None:
    job = make_job("a", "b", "c")
    job["a"].do(make_there, "b", "gone")
    assert job["a"].do(fetch_made) == "gone"
    job["b"].kill()
    with pytest.raises((rpc.WorkerLost, rpc.ReferenceLost), match=r"'b'"):
        job["a"].do(fetch_made)


_gate = threading.Event()


def open_gate() -> None:
    _gate.set()


def read_slowly() -> SlowToRead:
    _gate.wait(30)
    return SlowToRead()


class SlowToRead:
    def __reduce__(self) -> Any:
        return read_slowly, ()


def give_at_gate() -> rpc.RRef[int]:
    _gate.wait(30)
    return rpc.RRef(1)


def make_of_slow(to: str) -> None:
    made = rpc.remote(to, type, args=(SlowToRead(),), timeout=0.1)
    with pytest.raises(rpc.CallTimeout):
        made.to_here(timeout=0.5)


def ask_in_vain(to: str) -> None:
    with pytest.raises(rpc.CallTimeout):
        rpc.rpc_sync(to, give_at_gate, timeout=0.1)


@pytest.mark.parametrize("give_up", [make_of_slow, ask_in_vain])
def test_what_comes_of_a_call_after_its_deadline_is_let_go(
    make_job: MakeJob, give_up: Callable[[str], None]
) -> None:
    """A request that is read when its caller has dropped the reference; a late answer with one."""
    job = make_job("a", "b")
    job["a"].do(give_up, "b")
    job["b"].do(open_gate)
    assert job["b"].do(wait_until_served, 1 if give_up is ask_in_vain else 2)
    for name in "ab":
        until = time.monotonic() + 20
        while (left := job[name].do(references)) and any(left.values()):
            assert time.monotonic() < until, f"{name} has {left}"


def wait_until_served(count: int) -> bool:
    until = time.monotonic() + 20
    while current_node().calls_finished() < count and time.monotonic() < until:
        time.sleep(0.01)
    return current_node().calls_finished() >= count
