"""Blocks go with the lease of their instance, and not because the lease comes late."""

from __future__ import annotations

from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.membership import (
    LEASE_DELAY,
    QUIET_AFTER,
    SILENCE_GRACE,
    UNKNOWN_GRACE,
    Membership,
)


def test_before_leases_are_known_every_instance_counts() -> None:
    members = Membership()

    assert members.is_known("a")
    members.update(["b"], [], 0.0)
    assert not members.is_known("a")


def test_blocks_go_at_once_with_the_lease_that_their_instance_had() -> None:
    members = Membership()
    members.update(["a", "b"], ["a", "b"], 0.0)

    assert members.update(["b"], ["a", "b"], 0.1) == ["a"]
    assert members.update(["b"], ["b"], 0.2) == []


def test_an_instance_that_never_had_a_lease_keeps_its_blocks_for_a_while() -> None:
    members = Membership()

    assert members.update([], ["a"], 0.0) == []
    assert members.update([], ["a"], UNKNOWN_GRACE) == []
    assert members.update([], ["a"], UNKNOWN_GRACE + 0.1) == ["a"]


def test_who_said_nothing_for_long_before_anybody_read_is_not_waited_for_again() -> None:
    members = Membership()
    members.heard(Rank("dead", 0), 100.0, age=3600.0)
    members.heard(Rank("late", 0), 100.0, age=UNKNOWN_GRACE - 5.0)

    noticed = members.update([], ["dead", "late"], 100.0)
    soon = members.update([], ["dead", "late"], 100.1 + LEASE_DELAY)
    later = members.update([], ["late"], 105.1)

    assert (noticed, soon, later) == ([], ["dead"], ["late"])


def test_an_old_message_does_not_cost_its_instance_the_time_that_a_lease_needs_to_get_here() -> (
    None
):
    members = Membership()
    members.heard(Rank("a", 0), 100.0, age=3600.0)

    early = members.update([], ["a"], 100.0)
    announced = members.update(["a"], ["a"], 100.0 + LEASE_DELAY)
    later = members.update(["a"], ["a"], 200.0)

    assert early == announced == later == []


def test_the_last_message_counts_and_not_the_first() -> None:
    members = Membership()
    members.heard(Rank("a", 0), 100.0, age=3600.0)
    members.heard(Rank("a", 1), 100.0, age=0.0)

    assert members.update([], ["a"], 100.0) == []
    assert members.update([], ["a"], 100.0 + UNKNOWN_GRACE) == []


def test_a_lease_in_time_ends_the_wait() -> None:
    members = Membership()
    members.update([], ["a"], 0.0)

    assert members.update(["a"], ["a"], UNKNOWN_GRACE + 1) == []
    assert members.is_known("a")


def test_an_instance_without_events_is_silent_until_it_is_heard() -> None:
    members = Membership()
    members.update(["a", "b"], ["b"], 0.0)

    early, late = members.to_ask(SILENCE_GRACE), members.to_ask(SILENCE_GRACE + 0.1)
    members.heard(Rank("a", 0), 1.2)

    assert (early, late) == ([], ["a"])
    assert not members.silent


def test_a_rank_is_quiet_when_nothing_of_it_was_heard_for_long() -> None:
    members = Membership()
    ranks = [Rank("a", 0), Rank("b", 0), Rank("gone", 0)]
    members.update(["a", "b"], ["a", "b", "gone"], 100.0)

    early = members.quiet(ranks, 100.0)
    members.heard(Rank("b", 0), 110.0)
    late = members.quiet(ranks, 100.1 + QUIET_AFTER)

    assert (early, late) == ([], [Rank("a", 0)])


def test_who_sent_events_before_its_lease_was_known_is_not_quiet() -> None:
    members = Membership()
    ranks = [Rank("a", 0)]
    members.quiet([], 100.0)
    members.update([], ["a"], 200.0)
    members.heard(Rank("a", 0), 200.0)
    members.quiet(ranks, 200.1)

    members.update(["a"], ["a"], 200.2)

    assert members.quiet(ranks, 200.3) == []
    assert members.quiet(ranks, 200.1 + QUIET_AFTER) == ranks


def test_a_time_in_which_nobody_could_be_heard_is_no_silence() -> None:
    members = Membership()
    ranks = [Rank("a", 0)]
    members.update(["a"], ["a"], 100.0)
    members.quiet(ranks, 100.0)

    members.not_listening()
    back = members.quiet(ranks, 200.0)
    still = members.quiet(ranks, 200.1 + QUIET_AFTER)

    assert (back, still) == ([], ranks)
