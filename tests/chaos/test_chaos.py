"""The short part of `make chaos`."""

from __future__ import annotations

from tests.chaos import __main__ as chaos

SEED = 20261116


def test_steps_under_faults_end_right_or_with_a_named_error_and_nothing_is_left() -> None:
    print(f"seed {SEED}")
    tally = chaos.run(steps=25, seed=SEED, liveness=1.5, seconds=90.0)
    assert not tally.wrong
    assert not tally.leaks
    assert tally.right > 0
    assert tally.struck
