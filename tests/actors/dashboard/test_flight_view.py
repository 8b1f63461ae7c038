"""The picture of a flight: rates, parts and times of what its records say, and who serves."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynbus.actors.dashboard.flight_view import MOST_INSTANCES, FlightView, view_json
from dynbus.actors.dashboard.happenings import LONGEST, MOST_DETAILS, FlightReader
from dynbus.bus.flight.records import Event, decode_message, encode_records, entries_of

from .happened import answered, at, moved_request, view_of


def test_the_time_line_has_what_happened_once_though_several_tell_of_it() -> None:
    view = view_of(moved_request())
    span = view.span(100.0, 102.0, 10)

    lanes, totals = view.lanes(span), view.totals(span)

    assert lanes["begun"] == [1.0, 0.0]
    assert lanes["ended"] == [0.0, 1.0]
    assert lanes["failed"] == [0.0, 0.0]
    assert lanes["hits"] == [16 / 40, None]
    assert lanes["moved"] == [1.0, 0.0]
    assert lanes["ttft_p50"] == [pytest.approx(0.3, rel=0.03), None]
    assert totals["output"] == pytest.approx(9)
    assert totals["ended"] == 1


def test_the_time_line_reaches_to_what_happened_when_nothing_was_asked() -> None:
    view = view_of([*moved_request(), at(200.0, "pool.decided", who="llm.Engine", desired=0)])

    begin, end = view.range or (0.0, 0.0)

    assert begin == 100.0
    assert [one.happened.what for one in view.marks(begin, end)][-1] == "pool.decided"


def test_without_a_front_end_routers_say_how_requests_ended() -> None:
    view = view_of([one for one in moved_request() if one.what != "request.ended"])

    totals = view.totals(view.span(100.0, 102.0, 10))

    # The first attempt failed; of a front end's request that is no failure.
    assert (totals["begun"], totals["ended"], totals["failed"]) == (1, 2, 1)
    assert totals["ttft_p50"] == pytest.approx(0.2, rel=0.03)


def test_what_clients_asked_wrongly_did_not_fail() -> None:
    view = view_of(
        [
            answered(100.0, "a", status=400, error="InvalidRequest"),
            answered(100.0, "b", status=503, error="Unavailable"),
            answered(100.0, "c", status=200, error="StreamLost"),
        ]
    )

    totals = view.totals(view.span(99.0, 101.0, 1))

    assert (totals["refused"], totals["failed"], totals["ended"]) == (1, 2, 3)


def test_what_was_not_admitted_is_refused_with_whatever_status() -> None:
    view = view_of(
        [
            answered(100.0, "a", status=429, error="RateLimited", why="requests_per_minute"),
            answered(100.0, "b", status=503, error="NoInstances", why="model"),
        ]
    )

    totals = view.totals(view.span(99.0, 101.0, 1))

    assert (totals["refused"], totals["failed"], totals["ended"]) == (2, 0, 2)


def test_without_a_front_end_instances_and_routers_say_what_was_refused() -> None:
    view = view_of(
        [
            at(100.0, "call.refused", "a", who="llm.Engine.generate@a", error="Overloaded"),
            at(100.1, "route.refused", "b", error="Overloaded"),
        ]
    )

    totals = view.totals(view.span(99.0, 101.0, 1))

    assert (totals["refused"], totals["failed"]) == (2, 0)


def test_the_life_of_an_instance_is_its_state_and_marks() -> None:
    who = "llm.Engine@a"
    view = view_of(
        [
            at(100.0, "instance.ready", who=who),
            at(101.0, "instance.draining", who=who, load=2),
            at(102.0, "instance.stopped", who=who, well=True),
            at(103.0, "instance.lost", who=who, calls=1),
            at(103.1, "instance.lost", who=who, calls=4),
            at(104.0, "process.ended", who="llm.Engine/1", code=-9),
            at(105.0, "node.scaled", who="llm.Engine", before=1, count=2),
            at(106.0, "something.else", who="x"),
        ]
    )

    marks = view.marks(0.0, 200.0)

    assert [(one.happened.what, one.kind, one.count) for one in marks] == [
        ("instance.ready", "instance", 1),
        ("instance.draining", "instance", 1),
        ("instance.stopped", "instance", 1),
        ("instance.lost", "fault", 2),
        ("process.ended", "fault", 1),
        ("node.scaled", "scaling", 1),
    ]
    [instance] = view.instances
    # It had said itself that it stops.
    assert (instance.address, instance.state, instance.is_gone) == (who, "stopped", True)


def test_a_killed_instance_is_gone_when_a_router_has_seen_it_leave() -> None:
    view = view_of(
        [
            at(100.0, "instance.ready", who="llm.Engine@a"),
            at(101.0, "route.sent", "r", instance="a/0"),
            at(150.0, "route.gone", who="llm.Engine@a"),
        ]
    )

    [instance] = view.instances

    assert (instance.state, instance.running, instance.sent) == ("gone", 0, 1)


def test_records_that_are_missing_are_a_gap() -> None:
    event = Event("instance.ready", "llm.Engine@a", "", {})
    first = decode_message(encode_records("one", 0, 0.0, [(100.0, event)]))
    later = decode_message(encode_records("one", 5, 0.0, [(101.0, event)]))
    assert first is not None
    assert later is not None
    view = FlightView(reader=FlightReader([]))

    for entry in entries_of([first, later]):
        view.take(entry)

    [mark] = [one for one in view.marks(0.0, 200.0) if one.kind == "gap"]
    assert (mark.happened.time, dict(mark.happened.details)) == (101.0, {"count": 4})
    assert view.lanes(view.span(100.0, 102.0, 2))["missing"] == [0.0, 4.0]


@given(st.sets(st.integers(1, 18)))
def test_each_record_that_is_missing_is_counted_once(missing: set[int]) -> None:
    event = Event("instance.ready", "llm.Engine@a", "", {})
    messages = [
        decode_message(encode_records("one", number, 0.0, [(100.0 + number, event)]))
        for number in range(20)
        if number not in missing
    ]
    view = FlightView(reader=FlightReader([]))

    for entry in entries_of([message for message in messages if message is not None]):
        view.take(entry)

    totals = view.totals(view.span(100.0, 120.0, 20))
    assert totals["missing"] == len(missing)
    gaps = [one for one in view.marks(0.0, 200.0) if one.kind == "gap"]
    assert bool(gaps) == bool(missing)


def test_what_is_of_another_time_was_written_by_nobody_who_records() -> None:
    view = view_of(
        [answered(at_time, "r") for at_time in (0.0, 1e10, 1050.0)], since=1000.0, until=1100.0
    )

    assert (view.outside, view.records, len(view.lives)) == (2, 1, 1)
    view.move_on(2e10)
    view.happened(answered(1e10, "r"))
    assert view.outside == 2


def test_names_without_end_and_instances_without_number_stay_bounded() -> None:
    details: dict[str, str | int | float | bool] = {
        f"name-{number}": "x" * 1000 for number in range(100)
    }
    event = Event("instance.ready", "i" * 10_000, "r" * 10_000, details)
    message = decode_message(encode_records("one", 0, 0.0, [(100.0, event)]))
    assert message is not None
    view = FlightView(reader=FlightReader([]))
    for entry in entries_of([message]):
        view.take(entry)
    for number in range(2 * MOST_INSTANCES):
        view.happened(at(101.0, "instance.ready", who=f"llm.Engine@{number}"))

    [mark] = view.marks(100.0, 101.0)

    assert len(mark.happened.who) == LONGEST
    assert len(mark.happened.details) == MOST_DETAILS
    assert all(len(str(value)) == LONGEST for value in mark.happened.details.values())
    assert len(view.instances) == MOST_INSTANCES


def test_a_page_gets_plain_values() -> None:
    view = view_of(moved_request())

    shown = view_json(view, 100.0, 102.0, 102.0, 10)

    assert shown["places"] == {"llm.Engine@a": [1.0, 0.0], "llm.Engine@b": [1.0, 0.0]}
    assert [(one["address"], one["sent_here"]) for one in shown["instances"]] == [
        ("llm.Engine@a", 1),
        ("llm.Engine@b", 1),
    ]
    assert (shown["requests"], shown["open"], shown["records"]) == (1, 0, 11)


def test_one_of_several_requests_that_is_on_record_counts_as_all_of_them() -> None:
    route: dict[str, Any] = {"router": "x", "attempt": 1, "one_in": 4}
    view = view_of(
        [
            at(100.0, "requests.sampled", who="recorder", one_in=4),
            at(100.1, "route.asked", "r", prompt_tokens=40, **route),
            at(100.2, "route.sent", "r", instance="a/0", **route),
            at(100.3, "route.first", "r", instance="a/0", seconds=0.2, **route),
            at(100.3, "route.reused", "r", tokens=10, prompt_tokens=40, **route),
            at(100.9, "route.ended", "r", instance="a/0", error="", **route),
            at(101.0, "call.retried", "r", error="Unavailable"),
            answered(101.0, "r", completion_tokens=9, one_in=4, first_token_ms=300.0),
            at(160.0, "requests.sampled", who="recorder", one_in=4),
            at(170.0, "requests.sampled", who="recorder", one_in=1),
        ]
    )

    totals = view.totals(view.span(99.0, 102.0, 10))

    assert (totals["begun"], totals["ended"]) == (4, 4)
    assert totals["output"] == pytest.approx(36)
    assert totals["hits"] == pytest.approx(0.25)
    # A fault is one: all are on record.
    assert totals["retried"] == 1
    assert [(one.sent, one.running) for one in view.instances] == [(4, 0)]
    # What is told again is no other event.
    marks = [one.happened.details["one_in"] for one in view.marks(0.0, 200.0)]
    assert marks == [4, 1]


def test_a_share_that_nobody_can_have_counts_as_little_as_one_that_somebody_may() -> None:
    view = view_of([answered(100.0, "r", one_in=share) for share in (10**12, -5, 0, float("nan"))])

    totals = view.totals(view.span(99.0, 102.0, 10))

    assert totals["ended"] == 4096 + 3
