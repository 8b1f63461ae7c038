"""Of a short outage nothing is said, of a long one now and then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.nats.connection import FIRST_REPORT, MAX_PAUSE, Outage


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
