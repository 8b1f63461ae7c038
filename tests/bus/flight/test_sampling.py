"""Where there is too much, a share of the requests is recorded: the same ones everywhere."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.bus.flight import MOST_ONE_IN, SAMPLED, Event, SampledTimes, Sampling
from dynbus.bus.flight.records import Entry, decode_message, encode_records, entries_of
from dynbus.bus.flight.sampling import MOST_TIMES

MOST = 100


def at_a_rate(sampling: Sampling, rate: int, seconds: int, *, since: float = 0.0) -> list[int]:
    """The records of each second while so many requests come in it, each with one record, which
    are counted four times a second."""
    counts: list[int] = []
    for second in range(seconds):
        counts.append(0)
        for quarter in range(4):
            # Ids are digests: all of their bits are drawn.
            numbers = range(quarter * rate // 4, (quarter + 1) * rate // 4)
            kept = sum(bool(sampling.share((one * 0x9E3779B97F4A7C15) >> 7)) for one in numbers)
            sampling.count(kept, since + second + (quarter + 1) / 4)
            counts[-1] += kept
    return counts


def test_all_requests_are_recorded_while_they_are_not_too_many() -> None:
    sampling = Sampling(MOST)

    counts = at_a_rate(sampling, MOST, 10)

    assert counts == [MOST] * 10
    assert sampling.one_in == 1


@given(st.integers(MOST + 1, 30 * MOST))
def test_what_is_recorded_of_too_many_stays_below_the_bound(rate: int) -> None:
    sampling = Sampling(MOST)

    counts = at_a_rate(sampling, rate, 12)

    # What is too many is known a quarter of a second later.
    assert counts[0] <= rate / 2 + MOST
    assert sum(counts[1:]) <= 11 * MOST * 1.5
    assert sampling.one_in > 1


def test_all_are_recorded_again_some_time_after_they_are_few() -> None:
    sampling = Sampling(MOST)
    at_a_rate(sampling, 10 * MOST, 3)
    assert sampling.one_in == 16

    at_a_rate(sampling, 2, 30, since=3.0)

    assert sampling.one_in == 1


def test_a_process_that_had_nothing_to_record_begins_with_all() -> None:
    sampling = Sampling(MOST)
    at_a_rate(sampling, 10 * MOST, 3)

    sampling.count(1, 1000.0)

    assert sampling.one_in == 1


def test_records_that_are_of_no_request_leave_a_share() -> None:
    sampling = Sampling(MOST)

    sampling.count(MOST_ONE_IN * MOST * 10, 0.0)

    assert sampling.one_in == MOST_ONE_IN


@given(st.integers(0, 2**64 - 1), st.integers(0, 12), st.integers(0, 12))
def test_who_keeps_fewer_keeps_a_part_of_what_others_keep(
    digest: int, one: int, other: int
) -> None:
    few, many = Sampling(MOST), Sampling(MOST)
    few.one_in, many.one_in = 2 ** max(one, other), 2 ** min(one, other)

    if few.share(digest):
        assert few.share(digest) == few.one_in
        assert many.share(digest) == many.one_in


def told(recorder: str, *shares: tuple[float, int | None]) -> list[Entry]:
    """What a recorder has recorded: a share at a time, or something else."""
    records = [
        (at, Event(SAMPLED, recorder, "", {"one_in": one_in}) if one_in else Event("x", "", "", {}))
        for at, one_in in shares
    ]
    message = decode_message(encode_records(recorder, 0, 0.0, list(records)))
    assert message is not None
    return list(entries_of([message]))


@pytest.mark.parametrize(
    ("entries", "times"),
    [
        (told("a", (1.0, None), (2.0, 1)), []),
        (told("a", (10.0, 4), (70.0, 4), (90.0, 1), (95.0, None)), [(10.0, 90.0, 4)]),
        # It has said nothing of an end: so far it is known.
        (told("a", (10.0, 4), (30.0, None)), [(10.0, 30.0, 4)]),
        (told("a", (10.0, 2), (20.0, 4), (30.0, 1)), [(10.0, 20.0, 2), (20.0, 30.0, 4)]),
        (
            [*told("a", (10.0, 2), (40.0, 1)), *told("b", (20.0, 8), (30.0, 1))],
            [(10.0, 20.0, 2), (20.0, 30.0, 8), (30.0, 40.0, 2)],
        ),
        (
            [*told("a", (10.0, 4), (20.0, 1)), *told("b", (30.0, 4), (40.0, 1))],
            [(10.0, 20.0, 4), (30.0, 40.0, 4)],
        ),
    ],
)
def test_the_times_of_a_share_are_those_that_its_recorders_tell(
    entries: list[Entry], times: list[tuple[float, float, int]]
) -> None:
    sampled = SampledTimes()

    for entry in entries:
        sampled.take(entry)

    assert sampled.times == times


def test_the_times_of_many_recorders_are_merged_soon_and_those_of_the_latest_are_kept() -> None:
    sampled = SampledTimes()
    for number in range(4 * MOST_TIMES):
        for entry in told(f"r{number}", (float(number), 4), (number + 1.0, None)):
            sampled.take(entry)

    before = process_time()
    times = sampled.times

    # That of each pair of times and recorders took seconds.
    assert process_time() - before < 0.5
    assert times == [(2.0 * MOST_TIMES, 4.0 * MOST_TIMES, 4)]
