"""Of a short outage nothing is said, of a long one now and then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.nats.connection import (
    FIRST_RECONNECT_DELAY,
    FIRST_REPORT,
    MAX_PATIENCE,
    MAX_PAUSE,
    MAX_RECONNECT_DELAY,
    MAX_SLOW_DELAY,
    RECONNECT_PATIENCE,
    Outage,
    ReconnectPace,
)


def test_a_short_outage_is_not_spoken_of() -> None:
    outage = Outage(100.0)

    due = [outage.is_report_due(100.0 + step / 10) for step in range(50)]

    assert not any(due)


def test_an_outage_that_lasts_is_told_at_pauses_that_double() -> None:
    outage = Outage(0.0)

    told = [now for now in range(200) if outage.is_report_due(float(now))]

    assert told == [5, 15, 35, 75, 155]


@given(st.lists(st.floats(0.01, 1000.0), min_size=1, max_size=200))
def test_however_long_it_is_the_reports_are_neither_frequent_nor_absent(steps: list[float]) -> None:
    outage, now, told = Outage(0.0), 0.0, 0.0

    for step in steps:
        now += step
        is_due = outage.is_report_due(now)

        assert not is_due or now - told >= FIRST_REPORT
        assert is_due or now - told < MAX_PAUSE
        told = now if is_due else told
    assert outage.lasted(now) == now


def test_a_server_that_is_not_there_is_asked_again_soon() -> None:
    pace = ReconnectPace(FIRST_RECONNECT_DELAY)
    for _ in range(20):
        pace.failed(is_slow=False)

    assert pace.delay == MAX_RECONNECT_DELAY
    assert pace.patience == RECONNECT_PATIENCE


def test_servers_that_do_not_get_round_to_their_clients_are_given_more_time_with_each_try() -> None:
    pace, tries = ReconnectPace(FIRST_RECONNECT_DELAY), 0
    asked = [RECONNECT_PATIENCE + FIRST_RECONNECT_DELAY]
    while pace.delay < MAX_SLOW_DELAY and tries < 20:
        pace.failed(is_slow=True)
        asked.append(pace.patience + pace.delay)
        tries += 1

    # What a client asks of them in a second becomes less by this much.
    assert asked == sorted(asked)
    assert (pace.delay, pace.patience) == (MAX_SLOW_DELAY, MAX_PATIENCE)


def test_a_server_that_is_gone_after_a_slow_one_keeps_the_pace() -> None:
    pace = ReconnectPace(0.0)
    pace.failed(is_slow=True)
    before = pace.patience
    pace.failed(is_slow=False)

    assert pace.patience == before == 2 * RECONNECT_PATIENCE
