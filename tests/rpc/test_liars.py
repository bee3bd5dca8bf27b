"""The lying member's battery, its short part (see `make liars`)."""

from __future__ import annotations

from tests.rpc.fleet import Nursery
from tests.rpc.liars import Battery

SEED = 100


def test_members_that_lie_harm_no_one_else_and_leave_nothing(nursery: Nursery) -> None:
    print(f"seed {SEED}")
    battery = Battery(nursery, "tcp")
    try:
        for number in range(4):
            battery.withstand(SEED + number, 0.7)
        battery.check()
    finally:
        battery.close()
