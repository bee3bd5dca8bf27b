"""What a worker needs in order to be met, while it leaves."""

from __future__ import annotations

import socket

import pytest

from telegrad.rpc.meeting import Meeting
from telegrad.wire.keys import JobKey


def test_a_visitor_who_comes_while_the_door_closes_finds_a_closed_connection() -> None:
    """An OSError is what a greeting expects of a visitor who is gone; anything else is reported."""
    meeting = Meeting(JobKey(bytes(32)), "job", 1, "host")
    with socket.socket() as listener, pytest.raises(OSError, match="closed before"):
        meeting.address_of(listener)
