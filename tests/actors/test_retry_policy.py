"""What follows a failed attempt, decided without a clock or a network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Draining,
    DynbusError,
    HandlerError,
    InvalidRequest,
    Migrate,
    NoInstances,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    StreamLost,
    Unavailable,
    UnknownOutcome,
)
from dynbus.actors.calling.retry_policy import (
    DEFAULT_RETRIES,
    FIRST_BACKOFF,
    MAX_ATTEMPTS,
    MAX_BACKOFF,
    MAX_EXCUSED,
    Decision,
    FailedAttempt,
    GiveUp,
    Move,
    PauseThenRetry,
    RetryNow,
    RetryPolicy,
    is_away,
)
from dynbus.bus.errors import ERRORS


def policy(
    *,
    idempotent: bool = False,
    retries: int | None = None,
    migration_limit: int = 0,
    continues: bool = False,
) -> RetryPolicy:
    return RetryPolicy(
        idempotent=idempotent,
        retries=retries,
        migration_limit=migration_limit,
        continues=continues,
    )


def failed(error: DynbusError, **changes: Any) -> FailedAttempt:
    """A first attempt at the only instance, which answered with `error`."""
    return FailedAttempt(
        error,
        1,
        sent=True,
        routed=True,
        unreachable=False,
        lost=False,
        own=True,
        settling=False,
        others=False,
        waits=False,
        cut_off=False,
    )._replace(**changes)


REFUSED = Overloaded("full", started=False)
UNKNOWN = UnknownOutcome("gone")
LOST = Unavailable("lost on its way", started=False)


def test_decisions_of_different_kinds_are_not_equal() -> None:
    decisions: list[Decision] = [RetryNow(), GiveUp(), PauseThenRetry(1.0)]

    equal = [(one, other) for one in decisions for other in decisions if one == other]

    assert equal == [(one, one) for one in decisions]


@pytest.mark.parametrize("error", [StreamLost("gone"), Migrate("not here"), Draining("I go")])
def test_the_loss_of_a_call_that_the_handler_made_moves_nothing(error: DynbusError) -> None:
    attempt = failed(error, others=True, own=False)

    assert not is_away(attempt)
    for continues in (False, True):
        assert policy(migration_limit=3, continues=continues).decide(attempt) == GiveUp()


def test_what_a_stream_ends_with_names_its_loss_and_what_keeps_it_from_going_on() -> None:
    rule = policy(migration_limit=1, continues=True)
    lost = Migrate("not here", hop="n.C.e@a", request_id="1", started=True)
    rule.note(lost)
    late = Overloaded("full", started=False)
    rule.note(late)

    ends = rule.given_up(late, "it moved once", own=True, delivered=True)

    assert isinstance(ends, StreamLost)
    assert (ends.message, ends.hop, ends.request_id, ends.retryable, ends.__cause__) == (
        "not here; the stream cannot go on: it moved once", "n.C.e@a", "1", False, late
    )  # fmt: skip
    assert rule.given_up(late, "it moved once", own=True, delivered=False) is late
    assert "a call that its handler made was given up" in str(
        rule.stream_lost(lost, "it moved once", own=False)
    )


def test_what_never_started_goes_on_at_the_next_instance_at_once() -> None:
    assert policy().decide(failed(REFUSED, others=True)) == RetryNow()


@pytest.mark.parametrize("changes", [{"others": False}, {"others": True, "routed": False}])
def test_without_another_instance_it_is_repeated_only_when_asked_for(
    changes: dict[str, bool],
) -> None:
    attempt = failed(REFUSED, **changes)

    assert policy().decide(attempt) == GiveUp()
    assert policy(retries=1).decide(attempt) == PauseThenRetry(FIRST_BACKOFF)


def test_a_pause_is_as_long_as_the_instance_asks_at_least() -> None:
    attempt = failed(Overloaded("full", retry_after=9.0, started=False))

    assert policy(retries=1).decide(attempt) == PauseThenRetry(FIRST_BACKOFF, least=9.0)


def test_what_may_have_started_is_repeated_only_where_that_is_harmless() -> None:
    attempt = failed(UNKNOWN, others=True)

    assert policy(retries=5).decide(attempt) == GiveUp()
    assert policy(idempotent=True).decide(attempt) == PauseThenRetry(FIRST_BACKOFF)


def test_an_error_of_the_handler_is_never_repeated() -> None:
    attempt = failed(HandlerError("no"), others=True)

    assert policy(idempotent=True, retries=5).decide(attempt) == GiveUp()


def test_a_request_that_was_lost_goes_on_at_the_next_instance_at_once() -> None:
    """What is between that one and us may lose the next one too."""
    assert policy().decide(failed(LOST, lost=True, others=True)) == RetryNow()


@pytest.mark.parametrize("changes", [{"others": False}, {"others": True, "routed": False}])
def test_without_another_instance_a_request_that_was_lost_is_sent_again_where_it_was(
    changes: dict[str, bool],
) -> None:
    lost = failed(LOST, lost=True, **changes)
    rule = policy()

    decisions = [rule.decide(lost) for _ in range(DEFAULT_RETRIES + 1)]

    assert decisions == [
        PauseThenRetry(FIRST_BACKOFF),
        PauseThenRetry(FIRST_BACKOFF * 2),
        GiveUp(),
    ]


def test_right_after_an_outage_an_absent_instance_is_asked_again_without_counting() -> None:
    gone = Unavailable("gone", started=False)
    attempt = failed(gone, unreachable=True, settling=True)
    rule = policy(retries=0)

    assert rule.decide(attempt) == PauseThenRetry(FIRST_BACKOFF, counted=False)
    assert rule.decide(attempt._replace(others=True)) == RetryNow(counted=False)


def test_where_nobody_listens_is_passed_over_without_counting_while_there_are_others() -> None:
    gone = Unavailable("gone", started=False)
    attempt = failed(gone, number=MAX_ATTEMPTS, unreachable=True, others=True)
    rule = policy(retries=0)

    decisions = [rule.decide(attempt) for _ in range(100)]
    last = rule.decide(attempt._replace(others=False))

    assert decisions == [RetryNow(counted=False)] * 100
    assert last == GiveUp()


@pytest.mark.parametrize(
    ("error", "unreachable"),
    [(Unavailable("gone", started=False), True), (Draining("going", started=False), False)],
)
def test_a_caller_that_waits_is_given_the_instance_that_follows_one_that_is_away(
    error: DynbusError, unreachable: bool
) -> None:
    attempt = failed(error, unreachable=unreachable)

    assert policy().decide(attempt) == GiveUp()
    assert policy().decide(attempt._replace(waits=True)) == RetryNow()
    assert policy().decide(attempt._replace(waits=True, routed=False)) == GiveUp()


@pytest.mark.parametrize(
    "error", [REFUSED, UNKNOWN, Draining("going"), HandlerError("no"), LOST], ids=repr
)
def test_waiting_for_an_instance_repeats_nothing_that_one_has_answered(error: DynbusError) -> None:
    assert policy(retries=0).decide(failed(error, waits=True)) == GiveUp()


@pytest.mark.parametrize("error", [Migrate("not here"), Draining("going")])
def test_a_call_moves_as_often_as_it_may(error: DynbusError) -> None:
    rule = policy(migration_limit=2)

    decisions = [rule.decide(failed(error, others=True)) for _ in range(3)]

    assert decisions == [Move(), Move(), GiveUp()]


@pytest.mark.parametrize("error", [StreamLost("gone"), Migrate("not here")], ids=repr)
@pytest.mark.parametrize("others", [False, True])
def test_a_stream_that_goes_on_moves_as_often_as_it_may(error: DynbusError, others: bool) -> None:
    rule = policy(migration_limit=2, continues=True)

    decisions = [rule.decide(failed(error, number=9, others=others)) for _ in range(3)]

    assert decisions == [
        Move(),
        Move(),
        GiveUp("it moved 2 times, which is its migration_limit"),
    ]


def test_a_move_counts_for_nothing_where_this_process_hears_nobody() -> None:
    rule = policy(migration_limit=1, continues=True)
    alone = failed(StreamLost("gone"), cut_off=True)

    decisions = [rule.decide(alone) for _ in range(MAX_EXCUSED)]
    later = [rule.decide(failed(StreamLost("gone"))) for _ in range(2)]

    assert decisions == [Move()] * MAX_EXCUSED
    assert later == [Move(), GiveUp("it moved once, which is its migration_limit")]


def test_what_is_lost_while_nobody_is_heard_moves_a_bounded_number_of_times() -> None:
    rule = policy(migration_limit=1, continues=True)
    alone = failed(StreamLost("gone"), cut_off=True)

    decisions = [rule.decide(alone) for _ in range(MAX_EXCUSED + 2)]

    assert decisions[-2:] == [Move(), GiveUp("it moved once, which is its migration_limit")]


def test_a_stream_at_an_instance_that_its_caller_named_does_not_move() -> None:
    rule = policy(migration_limit=2, continues=True)

    assert rule.decide(failed(StreamLost("gone"), routed=False)) == GiveUp(
        "the caller named the instance"
    )


def test_a_stream_that_does_not_go_on_moves_for_no_loss() -> None:
    assert policy(migration_limit=2).decide(failed(StreamLost("gone"), others=True)) == GiveUp()


def test_a_stream_that_moved_waits_for_a_place_where_all_refuse_it() -> None:
    rule = policy(migration_limit=2, continues=True)
    refused = failed(REFUSED, waits=True)

    before = rule.decide(refused)
    rule.decide(failed(StreamLost("gone")))
    after = [rule.decide(refused._replace(waits=waits)) for waits in (True, False)]

    assert before == GiveUp()
    assert after == [PauseThenRetry(FIRST_BACKOFF), GiveUp()]


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("wrong", started=False),
        DeadlineExceeded("late"),
        NoInstances("none", started=False),
        InvalidRequest("no number", started=False),
        PayloadTooLarge("too long", started=False),
        PermissionDenied("not you", started=False),
        Cancelled("given up", started=False),
    ],
)
def test_what_another_attempt_cannot_change_is_final(error: DynbusError) -> None:
    generous = policy(idempotent=True, retries=9, migration_limit=9)

    assert generous.decide(failed(error, others=True)) == GiveUp()


def test_an_instance_of_the_other_kind_is_passed_over_and_never_asked_again() -> None:
    other_kind = failed(InvalidRequest("other kind", started=False), sent=False)

    assert policy().decide(other_kind._replace(others=True)) == RetryNow()
    assert policy(retries=9).decide(other_kind) == GiveUp()


@st.composite
def attempts(draw: st.DrawFn) -> FailedAttempt:
    error = ERRORS[draw(st.sampled_from(sorted(ERRORS)))]("", started=draw(st.booleans()))
    flags = {
        name: draw(st.booleans())
        for name in ("sent", "routed", "unreachable", "lost", "others", "waits", "cut_off")
    }
    return failed(error, **flags)


@given(
    st.lists(attempts(), min_size=MAX_ATTEMPTS + 1, max_size=MAX_ATTEMPTS + 1),
    st.booleans(),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_every_call_comes_to_an_end_and_every_pause_is_bounded(
    failures: list[FailedAttempt], idempotent: bool, retries: int, migration_limit: int
) -> None:
    rule = policy(idempotent=idempotent, retries=retries, migration_limit=migration_limit)

    decisions: list[Decision] = [
        rule.decide(one._replace(number=number)) for number, one in enumerate(failures, 1)
    ]

    assert isinstance(decisions[-1], GiveUp) or decisions[-1] == RetryNow(counted=False)
    pauses = [one for one in decisions if isinstance(one, PauseThenRetry)]
    assert all(0 < one.backoff <= MAX_BACKOFF for one in pauses)


@given(st.lists(attempts(), min_size=30, max_size=30), st.integers(0, 5))
def test_a_stream_moves_no_more_often_than_it_may_and_is_asked_for_a_bounded_number_of_times(
    failures: list[FailedAttempt], migration_limit: int
) -> None:
    rule = policy(migration_limit=migration_limit, continues=True)

    decisions: list[Decision] = []
    number = 0
    for one in failures:
        number += 1
        decisions.append(rule.decide(one._replace(number=number)))
        if decisions[-1] == RetryNow(counted=False):
            number -= 1
        if isinstance(decisions[-1], GiveUp):
            break

    moves = [one for one, made in zip(failures, decisions, strict=False) if made == Move()]
    excused = sum(one.cut_off or isinstance(one.error, Draining) for one in moves)
    assert len(moves) - excused <= migration_limit
    counted = [one for one in decisions if one != RetryNow(counted=False)]
    assert len(counted) <= MAX_ATTEMPTS + len(moves)


@given(attempts(), st.integers(0, 100), st.integers(0, 100))
def test_what_may_have_had_an_effect_is_never_repeated_unasked(
    failure: FailedAttempt, retries: int, migration_limit: int
) -> None:
    rule = policy(retries=retries, migration_limit=migration_limit)

    decision = rule.decide(failure)

    asked = isinstance(failure.error, Migrate | Draining)
    assert not failure.error.started or asked or decision == GiveUp()
