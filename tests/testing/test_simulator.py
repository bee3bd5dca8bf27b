"""The simulator keeps its promises: it replays, it ends, and it hurts where it is told to."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from telegrad import autograd, rpc
from telegrad.testing import (
    Delay,
    Faults,
    Lose,
    SimulationFailed,
    WorkerKilled,
    now,
    seeds,
    simulate,
    simulation,
    sleep,
    worker_globals,
)

BAD_NETWORK = Faults(drop=0.2, duplicate=0.2, reorder=0.3, delay=0.05)


def double(x):
    return x * 2


def double_via(worker, x):
    return rpc.rpc_sync(worker, double, args=(x,)) + 1


def fan_out():
    tensor = torch.arange(3.0)
    first = rpc.rpc_sync("b", double_via, args=("c", tensor))
    futures = [rpc.rpc_async(w, double, args=(i,)) for i, w in enumerate(("a", "b", "c"))]
    rref = rpc.remote("c", double, args=(tensor,))
    return first.tolist(), torch.futures.wait_all(futures), rref.to_here().tolist()


FAN_OUT = ([1.0, 3.0, 5.0], [0, 2, 4], [0.0, 2.0, 4.0])


@pytest.mark.parametrize("faults", [Faults(), BAD_NETWORK])
def test_calls_give_what_they_give_in_production_and_leave_nothing(faults):
    for seed in seeds(50):
        result = simulate(fan_out, seed=seed, faults=faults)
        assert result.value == FAN_OUT
        assert result.leaks == {}


@pytest.mark.parametrize("faults", [Faults(), BAD_NETWORK, BAD_NETWORK.kill("b", at=9)])
def test_a_seed_replays_exactly(faults):
    def runs(seed):
        return simulate(fan_out, seed=seed, faults=faults, allow=rpc.TelegradError).trace

    for seed in seeds(20):
        assert runs(seed) == runs(seed)


def test_seeds_differ():
    assert len({simulate(fan_out, seed=seed).trace for seed in range(20)}) > 10


def note(sequence, x):
    worker_globals().setdefault(sequence, []).append(x)


def noted(sequence):
    return worker_globals().get(sequence, [])


def one_at_a_time():
    for x in range(5):
        rpc.rpc_sync("b", note, args=("seen", x))
    return rpc.rpc_sync("b", noted, args=("seen",)), noted("seen")


def test_messages_take_effect_once_and_in_order_on_a_bad_network():
    for seed in seeds(30):
        there, here = simulate(one_at_a_time, seed=seed, faults=BAD_NETWORK).value
        assert there == list(range(5))
        assert here == []


def race():
    futures = [rpc.rpc_async(w, note_at, args=("a", w)) for w in ("b", "c")]
    torch.futures.wait_all(futures)
    return tuple(noted("order"))


def note_at(worker, x):
    rpc.rpc_sync(worker, note, args=("order", x))


def test_calls_of_different_workers_come_in_any_order():
    assert {simulate(race, seed=seed).value for seed in range(30)} == {("b", "c"), ("c", "b")}


def take():
    return worker_globals().setdefault("parcel", torch.futures.Future()).wait()


def bring(x):
    worker_globals().setdefault("parcel", torch.futures.Future()).set_result(x)


def test_a_request_that_waits_lets_the_next_one_begin():
    def main():
        taken = rpc.rpc_async("b", take)
        rpc.rpc_sync("b", bring, args=(3,))
        return taken.wait()

    for seed in seeds(20):
        assert simulate(main, seed=seed).value == 3


# Time.


def test_virtual_time_costs_none():
    def main():
        before = now()
        sleep(3600.0)
        return now() - before

    assert simulate(main, deadline=1e6).value == pytest.approx(3600.0)


def sleep_there(seconds):
    sleep(seconds)


def test_a_call_that_takes_too_long_times_out_at_its_deadline():
    def main():
        with pytest.raises(rpc.CallTimeout, match="sleep_there"):
            rpc.rpc_sync("b", sleep_there, args=(100.0,), timeout=2.0)
        return now()

    result = simulate(main)
    assert result.value == pytest.approx(2.0)
    assert result.leaks == {}


def test_a_main_that_passes_its_deadline_fails_the_run():
    with pytest.raises(SimulationFailed, match="deadline of 5 s"):
        simulate(lambda: sleep(10.0), deadline=5.0)


# What must be reported.


def call_back_for_ever(depth):
    future = torch.futures.Future()
    future.wait()


def test_a_deadlock_says_who_waits_for_what_and_how_to_replay():
    with pytest.raises(SimulationFailed) as caught:
        simulate(lambda: rpc.rpc_sync("b", call_back_for_ever, args=(1,), timeout=0), seed=7)
    text = str(caught.value)
    assert "seed=7" in text
    assert "a: main waits for call 1" in text
    assert "call_back_for_ever on worker 'b'" in text
    assert "b: request call 1" in text
    assert "waits for a torch.futures.Future" in text
    assert "future.wait()" in text
    assert "b        receives   call 1" in text


def fail():
    raise KeyError("lost key")


def test_an_error_of_main_is_raised_with_the_seed():
    with pytest.raises(KeyError, match="lost key") as caught:
        simulate(lambda: rpc.rpc_sync("b", fail), seed=11)
    assert "seed=11" in "".join(caught.value.__notes__)


def test_an_error_that_is_allowed_is_in_the_result():
    result = simulate(lambda: rpc.rpc_sync("b", fail), allow=KeyError)
    assert isinstance(result.error, KeyError)
    with pytest.raises(KeyError):
        _ = result.value


def keep(rref):
    worker_globals()["kept"] = rref


def test_what_is_left_is_reported():
    result = simulate(lambda: rpc.rpc_sync("b", keep, args=(rpc.RRef(1),)))
    assert result.leaks["a"]["references: forks"] == 1
    assert result.leaks["b"]["references: held"] == 1


def test_a_function_that_never_ends_is_a_leak():
    def main():
        with pytest.raises(rpc.CallTimeout):
            rpc.rpc_sync("b", call_back_for_ever, args=(1,), timeout=1.0)

    leaks = simulate(main).leaks
    assert list(leaks) == ["b"]
    assert "call_back_for_ever" in leaks["b"]["activities"][0]


def test_a_function_that_blocks_in_earnest_is_found(monkeypatch):
    monkeypatch.setattr(simulation, "REAL_PATIENCE", 0.2)
    lock = threading.Lock()
    lock.acquire()
    try:
        with pytest.raises(SimulationFailed, match=r"not simulated(.|\n)*lock.acquire\(\)"):
            simulate(lambda: lock.acquire())
    finally:
        lock.release()


def test_an_error_that_nobody_waits_for_fails_the_run():
    def main():
        rpc.on_worker_lost(lambda worker, reason: fail())
        sleep(10.0)

    with pytest.raises(KeyError, match="lost key"):
        simulate(main, faults=Faults().kill("b", after=1.0))


# Kills and cuts.


def test_a_killed_worker_is_lost_for_its_callers():
    def main():
        with pytest.raises(rpc.WorkerLost, match="'b' is gone"):
            rpc.rpc_sync("b", sleep_there, args=(30.0,))
        return rpc.rpc_sync("c", double, args=(3,)), now()

    for seed in seeds(30):
        result = simulate(main, seed=seed, faults=Faults(detect=2.0).kill("b", after=1.0))
        value, time = result.value
        assert value == 6
        assert 1.0 <= time <= 3.0
        assert result.leaks == {}


def test_a_kill_at_every_message_ends_in_the_value_or_in_a_named_error():
    total = simulate(fan_out).messages
    ends = set()
    for victim in ("a", "b", "c"):
        for at in range(1, total + 1):
            faults = Faults().kill(victim, at=at)
            result = simulate(fan_out, seed=at, faults=faults, allow=rpc.TelegradError)
            ends.add("value" if result.error is None else type(result.error).__name__)
            assert result.leaks == {}, (victim, at)
            if result.error is None:
                assert result.value == FAN_OUT
    assert {"WorkerKilled", "WorkerLost"} <= ends


def test_the_first_worker_can_be_killed():
    result = simulate(lambda: sleep(10.0), faults=Faults().kill("a", after=1.0))
    assert isinstance(result.error, WorkerKilled)


def test_cleaning_up_cannot_hold_up_a_kill():
    def main():
        try:
            sleep(10.0)
        finally:
            rpc.rpc_sync("b", double, args=(1,))

    result = simulate(main, faults=Faults().kill("a", after=1.0))
    assert isinstance(result.error, WorkerKilled)
    assert result.messages == 0


def test_a_kill_during_messages_of_a_kind():
    result = simulate(
        fan_out, faults=Faults().kill("c", during="double_via", nth=1), allow=rpc.TelegradError
    )
    what = [event.what for event in result.trace]
    assert what.index("dies") == 1


def test_a_short_cut_is_mended_without_notice():
    for seed in seeds(30):
        faults = BAD_NETWORK.cut("a", "b", at=3 + seed % 5, lasting=2.0)
        result = simulate(fan_out, seed=seed, faults=faults)
        assert result.value == FAN_OUT
        assert result.leaks == {}


def test_a_long_cut_is_the_loss_of_the_other():
    def main():
        with pytest.raises(rpc.WorkerLost):
            rpc.rpc_sync("b", sleep_there, args=(30.0,))
        return now()

    result = simulate(main, faults=Faults(liveness=5.0).cut("a", "b", after=1.0))
    assert 6.0 <= result.value <= 7.0
    assert result.leaks == {}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Faults(drop=1.0),
        lambda: Faults(delay=-1.0),
        lambda: Faults().kill("a"),
        lambda: Faults().kill("a", at=1, after=2.0),
        lambda: Faults().kill("a", at=1, nth=2),
        lambda: simulate(fan_out, faults=Faults().kill("nobody", at=1)),
    ],
)
def test_faults_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError):  # noqa: PT011
        wrong()


# Several mains, coroutines.


def test_several_workers_can_have_mains():
    mains = {name: (lambda me=name: rpc.rpc_sync("c", double, args=(me,))) for name in ("a", "b")}
    result = simulate(mains)
    assert result.values == {"a": "aa", "b": "bb"}


async def double_later(worker, x, seconds):
    await asyncio.sleep(seconds)
    return await rpc.rpc_async(worker, double, args=(x,))


def test_coroutines_run_in_virtual_time():
    def main():
        futures = [rpc.rpc_async("b", double_later, args=("c", x, 3600.0)) for x in range(3)]
        return torch.futures.wait_all(futures), now()

    for seed in seeds(20):
        result = simulate(main, seed=seed, timeout=0, deadline=1e6, faults=BAD_NETWORK)
        values, time = result.value
        assert values == [0, 2, 4]
        assert 3600.0 <= time < 3610.0
        assert result.leaks == {}


async def block_the_loop(worker):
    return rpc.rpc_sync(worker, call_back_async, args=("b",))


def call_back_async(worker):
    return rpc.rpc_sync(worker, answer_async)


async def answer_async():
    return 42


def test_a_coroutine_that_blocks_does_not_hold_up_others():
    for seed in seeds(20):
        result = simulate(lambda: rpc.rpc_sync("b", block_the_loop, args=("c",)), seed=seed)
        assert result.value == 42
        assert result.leaks == {}


def test_threads_outside_are_told_that_they_do_not_take_part():
    caught = []

    def outside():
        try:
            rpc.get_worker_info()
        except rpc.NotInitialized as error:
            caught.append(error)

    def main():
        thread = threading.Thread(target=outside)
        thread.start()
        thread.join()

    simulate(main)
    assert caught


# Backward.


def weigh(x):
    weight = worker_globals().setdefault("weight", torch.full((2,), 3.0, requires_grad=True))
    return x * weight


def weigh_via(worker, x):
    return rpc.rpc_sync(worker, weigh, args=(x,))


def gradient_of_weight(context_id):
    return autograd.get_gradients(context_id)[worker_globals()["weight"]].tolist()


def forward_and_backward():
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        far = rpc.rpc_async("b", weigh_via, args=("c", x))
        near = rpc.rpc_sync("c", weigh, args=(x,))
        autograd.backward(context_id, [(far.wait() * near).sum()])
        there = rpc.rpc_sync("c", gradient_of_weight, args=(context_id,))
        return autograd.get_gradients(context_id)[x].tolist(), there


def test_backward_gives_the_gradients_of_one_process_and_replays():
    for seed in seeds(20):
        result = simulate(forward_and_backward, seed=seed, faults=BAD_NETWORK)
        assert result.value == ([18.0, 18.0], [6.0, 6.0])
        assert result.leaks == {}
        assert result.trace == simulate(forward_and_backward, seed=seed, faults=BAD_NETWORK).trace


def test_a_kill_during_backward_ends_it_by_name():
    for seed in seeds(20):
        faults = Faults().kill("c", during="backward")
        result = simulate(forward_and_backward, seed=seed, faults=faults, allow=rpc.TelegradError)
        assert any(event.what == "dies" for event in result.trace)
        assert isinstance(result.error, rpc.TelegradError)
        assert result.leaks == {}


# What would test nothing is refused.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: seeds(0), "count=0: .* at least 1"),
        (lambda: seeds(-1), "count=-1: .* at least 1"),
        (lambda: Faults().kill("b", at=0), "at=0: .* at least 1"),
        (lambda: Faults().kill("b", at=-1), "at=-1: .* at least 1"),
        (lambda: Faults().kill("b", during="x", nth=0), "nth=0: .* at least 1"),
        (lambda: Faults().kill("b", after=float("nan")), "after is a time .* but is nan"),
        (lambda: Faults().kill("b", during=""), "during='': give a part of the label"),
        (lambda: Faults().cut("a", "a", at=1), "'a' has no connection to itself"),
        (lambda: Faults().cut("a", "b", at=1, lasting=-2), "lasting is a time .* but is -2"),
        (lambda: Faults(delay=float("nan")), "delay is a time .* but is nan"),
        (lambda: Faults(drop="x"), "drop is a chance .* but is 'x'"),
        (lambda: Lose("call", times=0), "times=0: .* at least 1"),
        (lambda: Delay("call", float("inf")), "cannot be inf seconds late"),
        (lambda: simulate(fan_out, timeout=-1), "timeout=-1: give a number of seconds"),
        (lambda: simulate(fan_out, deadline=float("nan")), "deadline=nan: give a number"),
        (lambda: simulate(fan_out, ("a", "a")), "'a' is given twice"),
        (lambda: simulate(fan_out, ()), r"workers=\(\): give a list of names"),
        (lambda: simulate(fan_out, 2), "workers=2: give a list of names"),
        (lambda: simulate(fan_out, "abc"), "workers='abc': give a list of names"),
        (lambda: simulate({}), "main={}: give a function for at least one"),
        (lambda: simulate({"b": None}), "on worker 'b' is None, which cannot be called"),
        (lambda: simulate(fan_out, allow="KeyError"), "allow='KeyError': give a class of errors"),
        (lambda: simulate(fan_out, seed=None), "seed=None is a NoneType: give a whole number"),
    ],
)
def test_what_would_test_nothing_is_refused_in_a_sentence(make, words, monkeypatch):
    monkeypatch.delenv("TELEGRAD_SEEDS", raising=False)
    with pytest.raises((ValueError, TypeError), match=words):
        make()


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TELEGRAD_SEEDS", "-5", "TELEGRAD_SEEDS=-5: .* at least 1"),
        ("TELEGRAD_SEEDS", "many", "TELEGRAD_SEEDS='many' is in the environment"),
        ("TELEGRAD_SEED", "abc", "TELEGRAD_SEED='abc' is in the environment"),
    ],
)
def test_an_environment_that_asks_for_no_seed_is_refused(variable, value, words, monkeypatch):
    monkeypatch.delenv("TELEGRAD_SEED", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=words):
        seeds(3)


def test_a_fault_that_names_what_the_program_never_does_is_refused():
    misspelt = Faults().kill("b", during="bakcward")
    with pytest.raises(ValueError, match=r"kill\('b', during='bakcward'\) never struck"):
        simulate(fan_out, faults=misspelt)
    both = simulate(fan_out, faults=misspelt.kill("c", at=1), allow=rpc.TelegradError)
    assert both.error is not None, "the other fault may be why it was not done"
    assert simulate(fan_out, faults=Faults().kill("b", during="backward")).value == FAN_OUT


def test_shutdown_in_a_simulation_says_how_its_job_ends():
    with pytest.raises(rpc.TelegradError, match="'a' is simulated: its job ends by itself"):
        simulate(rpc.shutdown)
