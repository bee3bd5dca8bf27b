"""Gatherings: who comes, who does not, and who is told."""

from __future__ import annotations

import threading

import pytest

from telegrad.compat.rpc.gather import Gatherings


def test_workers_count_the_gatherings_of_a_group_alike() -> None:
    one, other = Gatherings(), Gatherings()
    assert [one.begin({"a", "b"}), one.begin({"a"}), one.begin({"b", "a"})] == [
        other.begin({"b", "a"}),
        other.begin({"a"}),
        other.begin({"a", "b"}),
    ]
    assert one.begin({"a", "b"}) != one.begin({"a", "b"})


def test_the_leader_has_all_objects_when_the_last_one_came() -> None:
    gatherings = Gatherings()
    gatherings.add("g", "a", 1, {"a", "b"})
    gatherings.add("g", "b", 2, {"a", "b"})
    assert gatherings.wait("g", {"a", "b"}, None) == {"a": 1, "b": 2}
    assert gatherings.end("g") == {"a": 1, "b": 2}


def test_no_worker_comes_twice() -> None:
    gatherings = Gatherings()
    gatherings.add("g", "a", 1, {"a", "b"})
    with pytest.raises(RuntimeError, match="twice"):
        gatherings.add("g", "a", 1, {"a", "b"})


def test_a_worker_that_is_lost_is_not_waited_for() -> None:
    gatherings = Gatherings()
    gatherings.add("g", "a", 1, {"a", "b"})
    waits = threading.Thread(target=gatherings.lose, args=("b", "it died"))
    waits.start()
    with pytest.raises(RuntimeError, match=r"'b' is gone .it died"):
        gatherings.wait("g", {"a", "b"}, None)
    waits.join()


def test_a_worker_that_was_lost_before_is_not_waited_for() -> None:
    gatherings = Gatherings()
    gatherings.lose("b", "it died")
    with pytest.raises(RuntimeError, match="is gone"):
        gatherings.wait("g", {"a", "b"}, None)


def test_a_worker_may_go_when_its_object_is_there() -> None:
    gatherings = Gatherings()
    gatherings.add("g", "a", 1, {"a", "b"})
    gatherings.add("g", "b", 2, {"a", "b"})
    gatherings.lose("b", "it left")
    assert gatherings.wait("g", {"a", "b"}, None) == {"a": 1, "b": 2}


def test_followers_hear_that_the_leader_gave_up() -> None:
    gatherings = Gatherings()
    gatherings.fail("g", "worker 'c' is gone")
    with pytest.raises(RuntimeError, match="'c' is gone"):
        gatherings.wait("g", {"a"}, None)
