"""The server's time of day, as its messages tell it."""

from __future__ import annotations

import pytest

from dynbus.bus.protocol.server_clock import ServerClock


def test_the_server_s_time_goes_on_by_the_own_clock() -> None:
    clock = ServerClock()

    clock.set(5000.0, 10.0)

    assert clock.unix(10.0) == 5000.0
    assert clock.unix(70.0) == 5060.0
    assert clock.age(70.0) == 60.0


def test_a_message_that_was_stored_later_than_thought_sets_it_right() -> None:
    clock = ServerClock()
    clock.set(5000.0, 10.0)

    clock.stored(4000.0, 11.0)
    assert clock.unix(11.0) == 5001.0
    clock.stored(5003.0, 12.0)

    assert clock.unix(12.0) == 5003.0


def test_an_answer_counts_though_it_sets_the_clock_back() -> None:
    clock = ServerClock()
    clock.set(5000.0, 10.0)

    clock.set(4000.0, 20.0)

    assert clock.unix(21.0) == 4001.0


def test_a_server_that_has_said_nothing_has_no_time() -> None:
    with pytest.raises(ValueError, match="has not told its time"):
        ServerClock().unix(1.0)
