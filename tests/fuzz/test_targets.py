"""The fuzzer's targets for a short while; `make fuzz` gives them longer, and coverage to go by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.seeds import kept
from tests.fuzz.targets import ALL

pytestmark = pytest.mark.filterwarnings("ignore")
TARGETS = pytest.mark.parametrize("name", list(ALL))


@TARGETS
def test_the_corpus_does_no_harm(name: str) -> None:
    inputs = kept(name)
    assert inputs
    for data in inputs:
        ALL[name](data)


def changed(inputs: list[bytes]) -> st.SearchStrategy[bytes]:
    """A kept input with a few bytes set, dropped, inserted, or taken from another one."""

    @st.composite
    def draw_changed(draw: st.DrawFn) -> bytes:
        data = bytearray(draw(st.sampled_from(inputs)))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(len(data) - 1, 0)))
            match draw(st.integers(0, 4)):
                case 0 if data:
                    data[at] = draw(st.integers(0, 255))
                case 1:
                    data[at:at] = draw(st.binary(max_size=9))
                case 2:
                    del data[at : at + draw(st.integers(1, 9))]
                case 3:
                    other = draw(st.sampled_from(inputs))
                    data[at:] = other[draw(st.integers(0, len(other))) :]
                case 4:
                    data[at : at + 8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
        return bytes(data)

    return draw_changed()


def driven(target: Callable[[bytes], None], inputs: list[bytes]) -> Callable[[], None]:
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(changed(inputs), st.binary(max_size=200)))
    def drive(data: bytes) -> None:
        target(data)

    return drive


@TARGETS
def test_changed_inputs_do_no_harm(name: str) -> None:
    driven(ALL[name], kept(name))()
