"""Ten thousand references, passed around at random over a bad network, leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from telegrad import rpc
from telegrad.rpc.references import Post, References
from telegrad.testing import Faults, now, seeds, simulate, sleep, worker_globals

WORKERS = ("a", "b", "c", "d")
REFERENCES = 10_000
ROUNDS = 50
BAD_NETWORK = Faults(drop=0.05, duplicate=0.05, reorder=0.2, delay=0.02)


def make(count: int) -> list:
    return [rpc.RRef(number) for number in range(count)]


def mix(references: list, seed: int) -> list:
    """Keep some of what came, give back some of what was kept, and drop some for good."""
    draw = random.Random(seed)
    kept = worker_globals().setdefault("kept", [])
    kept.extend(references)
    draw.shuffle(kept)
    del kept[: len(kept) // 8]
    return kept[:40]


def pass_around(seed: int) -> int:
    """Each round makes references on one worker, and lets others exchange some of theirs."""
    draw = random.Random(seed)
    share = REFERENCES // (2 * ROUNDS)
    made = 0
    for number in range(ROUNDS):
        owner, first, second = draw.choices(WORKERS, k=3)
        fresh = rpc.rpc_sync(owner, make, args=(share,))
        own = [rpc.remote(owner, int, args=(n,)) for n in range(share)]
        made += len(fresh) + len(own)
        given = rpc.rpc_sync(first, mix, args=(fresh, seed + number))
        rpc.rpc_async(second, mix, args=(given + own, seed - number)).wait()
    return made


def test_ten_thousand_references_leave_nothing_under_loss():
    def main() -> int:
        made = pass_around(0)
        for worker in WORKERS:
            rpc.rpc_sync(worker, forget)
        return made

    result = simulate(main, WORKERS, faults=BAD_NETWORK, timeout=0)
    assert result.value == REFERENCES
    assert result.leaks == {}


def forget() -> None:
    worker_globals().clear()


def hold_until(time: float) -> None:
    """Hold what is kept, see that all of it can still be had, and let go."""
    sleep(time - now())
    for rref in worker_globals().get("kept", []):
        try:
            rref.to_here(timeout=0)
        except (rpc.WorkerLost, rpc.ReferenceLost) as error:
            if dropped_too_early(error):
                raise AssertionError(f"{rref!r} is gone while its holder and owner live") from error
    forget()


def dropped_too_early(error: BaseException) -> bool:
    """Whether a live owner dropped a value that someone could still ask for."""
    signs = ("does not have this value any more", "were dropped", "was dropped")
    return any(sign in str(error) for sign in signs)


# Many small runs with kills find what one large one does not.


def trade(seed: int) -> None:
    draw = random.Random(seed)
    held = [rpc.RRef(torch.ones(1))]
    for _ in range(6):
        held.append(rpc.remote(draw.choice(WORKERS), torch.ones, args=(1,)))
        draw.shuffle(held)
        first, second = draw.choices(WORKERS, k=2)
        traded = rpc.remote(first, swap, args=(held[: len(held) // 2 + 1], draw.random()))
        held.extend(rpc.rpc_sync(second, swap, args=(held[:1], draw.random())))
        held.extend(traded.to_here())
        del held[4:]


def swap(references: list, chance: float) -> list:
    """Keep what came, and give back what was kept longest."""
    kept = worker_globals().setdefault("kept", [])
    kept.extend(references)
    given, kept[:] = kept[: int(chance * 4)], kept[int(chance * 4) :]
    for rref in given:
        assert rref.to_here() is not None
    return given


def run_program(
    program: Callable[[int], None], seed: int, faults: Faults, timeout: float = 60.0
) -> dict:
    """Run a program of a seed, check what all survivors hold in the end, and tell what is left."""

    def main() -> None:
        try:
            program(seed)
        finally:
            hold_until(1000.0)

    result = simulate(
        {"a": main, **dict.fromkeys(WORKERS[1:], lambda: hold_until(1000.0))},
        WORKERS,
        seed=seed,
        faults=faults,
        allow=(rpc.WorkerLost, rpc.ReferenceLost, rpc.CallTimeout),
        timeout=timeout,
        deadline=5000.0,
    )
    assert result.error is None or not dropped_too_early(result.error), seed
    return dict(result.leaks)


def test_references_that_workers_trade_are_neither_lost_early_nor_kept():
    for seed in seeds(40):
        assert run_program(trade, seed, BAD_NETWORK) == {}, seed


def test_references_of_killed_workers_go():
    for seed in seeds(100):
        draw = random.Random(seed)
        faults = Faults(drop=draw.choice((0.0, 0.1)), delay=draw.choice((0.0, 0.05)))
        for _ in range(draw.randint(1, 3)):
            faults = faults.kill(draw.choice(WORKERS), at=int(10 ** draw.uniform(0, 2.3)))
        assert run_program(trade, seed, faults) == {}, seed


def test_references_in_replies_that_come_too_late_go():
    late = Faults(delay=0.4)
    for seed in seeds(100):
        assert run_program(trade, seed, late, timeout=0.5) == {}, seed


# A reference that only one worker has at a time, and that is passed on just before that one dies.


def hand_on(rref: rpc.RRef, path: list) -> None:
    if path:
        rpc.remote(path[0], hand_on, args=(rref, path[1:]))
    else:
        worker_globals().setdefault("kept", []).append(rref)


def hand_round(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(4):
        owner, *path = draw.choices(WORKERS, k=draw.randint(3, 6))
        rpc.rpc_sync(owner, make_and_hand_on, args=(path,))


def make_and_hand_on(path: list) -> None:
    hand_on(rpc.RRef(torch.ones(1)), path)


def test_a_reference_that_a_dying_worker_passed_on_is_not_lost():
    for seed in seeds(200):
        draw = random.Random(seed)
        faults = Faults(drop=draw.choice((0.0, 0.1)), delay=draw.choice((0.0, 0.5)), detect=0.3)
        faults = faults.kill(draw.choice(WORKERS[1:]), at=draw.randint(5, 60))
        assert run_program(hand_round, seed, faults) == {}, seed


# What the protocol stands on.


def test_the_messages_of_the_protocol_take_effect_in_order(monkeypatch):
    given: dict[tuple[int, int], list] = {}
    taken: dict[tuple[int, int], list] = {}
    take_actions, receive = References.take_actions, References.receive

    def watched_actions(core):
        actions = take_actions(core)
        for action in actions:
            if isinstance(action, Post):
                given.setdefault((core._me, action.to), []).append(action.message)
        return actions

    def watched_receive(core, sender, message):
        if sender != core._me:
            taken.setdefault((sender, core._me), []).append(message)
        receive(core, sender, message)

    monkeypatch.setattr(References, "take_actions", watched_actions)
    monkeypatch.setattr(References, "receive", watched_receive)
    for seed in seeds(40):
        given.clear()
        taken.clear()
        assert run_program(trade, seed, Faults()) == {}
        assert taken == given, seed
