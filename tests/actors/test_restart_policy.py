"""An instance that ends is started again, for ever, after a growing pause."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.declaring.restart_policy import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    SETTLED_AFTER,
    RestartPolicy,
    check_on_crash,
)
from dynbus.bus.errors import ConfigError


def test_pauses_double_up_to_the_longest() -> None:
    policy = RestartPolicy()

    pauses = [policy.pause_after(lived=0.0, jitter=1.0) for _ in range(10)]

    assert pauses == [FIRST_PAUSE * 2.0**n for n in range(8)] + [LONGEST_PAUSE, LONGEST_PAUSE]
    assert (policy.crashes, LONGEST_PAUSE) == (10, 30.0)


def test_jitter_takes_up_to_half_of_a_pause() -> None:
    assert RestartPolicy().pause_after(0.0, 0.0) == FIRST_PAUSE / 2
    assert RestartPolicy().pause_after(0.0, 1.0) == FIRST_PAUSE


def test_one_that_had_settled_begins_anew() -> None:
    policy = RestartPolicy()
    for _ in range(5):
        policy.pause_after(0.0, 1.0)

    pause = policy.pause_after(SETTLED_AFTER, 1.0)

    assert (pause, policy.crashes) == (FIRST_PAUSE, 1)


def test_a_lasting_fault_never_ends_the_restarts() -> None:
    policy = RestartPolicy()

    pauses = {policy.pause_after(0.0, 1.0) for _ in range(10_000)}

    assert max(pauses) == LONGEST_PAUSE


@given(st.lists(st.floats(0, SETTLED_AFTER, exclude_max=True), max_size=40))
def test_pauses_only_grow_until_one_has_settled(lives: list[float]) -> None:
    policy = RestartPolicy()

    pauses = [policy.pause_after(lived, 1.0) for lived in lives]

    assert all(former <= later for former, later in pairwise(pauses))


@pytest.mark.parametrize("value", ["halt", "", None, 1])
def test_what_cannot_follow_a_crash_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^x = .*: write restart, stop or escalate$"):
        check_on_crash(value, "x")
