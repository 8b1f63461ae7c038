"""Tapes of routers, read as what became of requests."""

from __future__ import annotations

from collections.abc import Mapping

from tests.kvrouter.flight.test_traffic import Records, tape
from tests.kvrouter.routing.routing_fixtures import profile, request

from dynbus.bus.flight.events import digest_of_request
from dynbus.bus.flight.records import decode_message, encode_records, entries_of
from dynbus.kvrouter.flight.routed import RoutedRequests
from dynbus.kvrouter.routing.decision import Decision

Told = tuple[float, str, str, str, Mapping[str, object]]


def told_by(records: Records, first: int = 0) -> list[Told]:
    reader = RoutedRequests()
    message = decode_message(encode_records("one", first, 1000.0, records))
    assert message is not None
    return [one for entry in entries_of([message]) for one in reader.take(entry)]


def routed() -> Records:
    records, scheduler = tape()
    decision = scheduler.submit(request("a", [profile("x")], blocks=4), 10.0)
    assert isinstance(decision, Decision)
    scheduler.first_item(decision.number, 10.5)
    scheduler.note_reused(decision.number, 16, 10.5)
    scheduler.grown(decision.number, 3)
    scheduler.grown(decision.number, 8)
    scheduler.ended(decision.number, 11.0, "Unavailable")
    scheduler.remove_instance("x")
    return records


def test_a_request_is_asked_sent_first_reused_grown_and_ended() -> None:
    happened = told_by(routed())

    assert [what for _, what, *_ in happened] == [
        "route.asked",
        "route.sent",
        "route.first",
        "route.reused",
        "route.grown",
        "route.grown",
        "route.ended",
        "route.gone",
    ]
    *of_request, gone = happened
    assert {(who, digest) for _, _, who, digest, _ in of_request} == {
        ("llm.Engine", digest_of_request("a"))
    }
    assert [time for time, *_ in happened[:3]] == [1010.0, 1010.0, 1010.5]
    details = [each[4] for each in of_request]
    assert all((each["router"], each["attempt"]) == ("one", 1) for each in details)
    assert details[1]["instance"] == "x/0"
    assert details[2]["seconds"] == 0.5
    assert details[3]["tokens"] == 16
    assert [each["more"] for each in details[4:6]] == [3, 5]
    assert details[6]["error"] == "Unavailable"
    assert gone[2:4] == ("llm.Engine@x", "")


def test_a_tape_that_is_read_from_the_middle_says_nothing_of_what_it_lacks() -> None:
    assert told_by(routed()[1:]) == []
