"""A schedule of faults is a function of its seed, and keeps to what it was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.chaos.schedule import (
    SECONDS,
    Kind,
    Step,
    parse_kinds,
    parse_pauses,
    schedule,
)
from dynbus.bus.errors import ConfigError

KINDS = st.lists(st.sampled_from(list(Kind)), unique=True)
PAUSES = st.tuples(st.floats(0.05, 2), st.floats(0, 3)).map(lambda two: (two[0], sum(two)))


def test_a_seed_gives_the_same_faults_in_every_version() -> None:
    steps = schedule(7, [Kind.KILL, Kind.FREEZE], 6.0, (1.0, 2.0))

    assert steps == [
        Step(1.324, Kind.KILL, 0.650934, 0.0, 0.535882),
        Step(2.690, Kind.KILL, 0.507436, 0.0, 0.433646),
        Step(3.759, Kind.KILL, 0.424519, 0.0, 0.123802),
        Step(4.983, Kind.FREEZE, 0.947709, 1.017, 0.39668),
    ]


@given(st.integers(0), KINDS, st.floats(0, 30), PAUSES)
def test_faults_come_in_order_with_their_pauses_and_are_healed_at_the_end(
    seed: int, kinds: list[Kind], seconds: float, pauses: tuple[float, float]
) -> None:
    steps = schedule(seed, kinds, seconds, pauses)

    assert steps == schedule(seed, kinds, seconds, pauses)
    assert all(step.kind in kinds for step in steps)
    assert all(step.at + step.lasts <= seconds + 0.002 for step in steps)
    assert all(step.lasts <= SECONDS.get(step.kind, (0.0, 0.0))[1] for step in steps)
    ats = [0.0, *(step.at for step in steps)]
    between = [after - before for before, after in zip(ats, ats[1:], strict=False)]
    assert all(pauses[0] - 0.002 <= each <= pauses[1] + 0.002 for each in between)


@given(st.floats(0, 1), st.integers(1, 100))
def test_a_step_hits_one_of_those_that_are_there(pick: float, count: int) -> None:
    assert 0 <= Step(0.0, Kind.KILL, pick).among(count) < count


def test_kinds_and_pauses_are_read_as_they_are_written() -> None:
    assert parse_kinds("kill, half-open") == [Kind.KILL, Kind.HALF_OPEN]
    assert parse_pauses("0.5-3") == (0.5, 3.0)
    assert parse_pauses("2") == (2.0, 2.0)


@pytest.mark.parametrize("text", ["", ",", "kil", "kill,frost"])
def test_faults_that_do_not_exist_are_refused_with_those_that_do(text: str) -> None:
    with pytest.raises(ConfigError, match="there are kill, kill-third, freeze, join"):
        parse_kinds(text)


@pytest.mark.parametrize("text", ["", "-", "0", "3-1", "nan", "inf", "-1", "1-2-3", "a"])
def test_a_pause_that_is_none_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError, match="write seconds, for example 2 or 0.5-3"):
        parse_pauses(text)
