"""The stranger's battery, once each and without a look at the clock (see `make strangers`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rpc.fleet import Nursery
from tests.rpc.strangers import ATTACKS, TRANSPORTS, Battery


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def battery(request: pytest.FixtureRequest, nursery: Nursery) -> Iterator[Battery]:
    battery = Battery(nursery, request.param)
    yield battery
    battery.close()


@pytest.mark.parametrize("name", list(ATTACKS))
def test_a_stranger_is_refused_and_disturbs_nobody(battery: Battery, name: str) -> None:
    assert battery.check_refused(name, 0.3) > 0
