"""An instance that ends is started again after a growing pause, until it has ended too often."""

from __future__ import annotations

from dynbus.actors.restart_policy import FIRST_PAUSE, LONGEST_PAUSE, RestartPolicy


def test_pauses_double_up_to_the_longest() -> None:
    policy = RestartPolicy(limit=10)

    pauses = [policy.pause_after(now=0.0, jitter=1.0) for _ in range(8)]

    assert pauses == [FIRST_PAUSE * 2.0**n for n in range(6)] + [LONGEST_PAUSE, LONGEST_PAUSE]


def test_jitter_takes_up_to_half_of_a_pause() -> None:
    assert RestartPolicy().pause_after(0.0, 0.0) == FIRST_PAUSE / 2
    assert RestartPolicy().pause_after(0.0, 1.0) == FIRST_PAUSE


def test_too_many_ends_within_the_window_are_the_end() -> None:
    policy = RestartPolicy(limit=2, window=60.0)

    pauses = [policy.pause_after(now, 1.0) for now in (0.0, 10.0, 20.0)]

    assert pauses[2] is None
    assert None not in pauses[:2]


def test_ends_outside_of_the_window_are_forgotten() -> None:
    policy = RestartPolicy(limit=2, window=60.0)

    pauses = [policy.pause_after(100.0 * n, 1.0) for n in range(10)]

    assert pauses == [FIRST_PAUSE] * 10
