"""What benchmark programs conclude from their numbers, and where they write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import many, pages, scaling


def test_the_exponent_is_that_of_the_upper_half_of_the_range() -> None:
    start_up = 0.01
    linear = {count: start_up + 1e-3 * count for count in (1, 4, 16, 64, 256, 1024, 4096)}
    square = {count: start_up + 1e-6 * count**2 for count in (1, 4, 16, 64, 256, 1024, 4096)}
    assert scaling.exponent(linear) <= scaling.LINEAR
    assert scaling.exponent(square) > 1.5


def test_the_power_is_that_of_the_sum_over_all_workers() -> None:
    same, grown = {100: 9.0, 1_000: 4.0, 10_000: 4.0}, {100: 9.0, 1_000: 999.0, 10_000: 9_999.0}
    assert many.power("messages", same) == pytest.approx(1.0)
    assert many.power("messages", grown) == pytest.approx(2.0, abs=0.01)
    assert many.power("messages, most of any", grown) == pytest.approx(1.0, abs=0.01)


def test_a_section_is_replaced_and_what_people_wrote_around_it_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x begins -->\nold\n<!-- x ends -->\nafter\n")
    pages.write_section("x", "new", page)
    pages.write_section("x", "newer", page)
    assert page.read_text() == "before\n<!-- x begins -->\nnewer\n<!-- x ends -->\nafter\n"
    with pytest.raises(ValueError, match="no section 'y'"):
        pages.write_section("y", "new", page)


def test_every_program_finds_its_section_in_the_page() -> None:
    text = pages.PAGE.read_text()
    for section in ("comparison", "tensors", "streams", "lanes", "scaling", "many workers"):
        assert f"<!-- {section} begins -->" in text
        assert f"<!-- {section} ends -->" in text
