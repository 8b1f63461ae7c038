"""Requests on a tape as a trace: when they came, what they share, and how much came of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.flights import ListedRecords
from tests.kvrouter.routing.routing_fixtures import BLOCK, profile, request

from dynbus import ConfigError
from dynbus.bus.flight import Event, digest_of_request
from dynbus.bus.flight.records import decode_message, encode_records, entries_of
from dynbus.kvrouter.flight.traffic import RecordedTraffic
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.tape import TapedScheduler

Records = list[tuple[float, msgspec.Struct]]


def trace_of(records: Records, *, target: str = "", first: int = 0) -> list[dict[str, Any]]:
    message = decode_message(encode_records("one", first, 0.0, records))
    assert message is not None
    traffic = RecordedTraffic(target)
    for entry in entries_of([message]):
        traffic.take(entry)
    return [msgspec.json.decode(line) for line in traffic.lines()]


def tape(target: str = "llm.Engine") -> tuple[Records, TapedScheduler]:
    recorder = ListedRecords()
    return recorder.records, TapedScheduler(RouterConfig(), recorder, target=target)


def test_a_trace_has_what_was_asked_and_what_came_of_it() -> None:
    records, scheduler = tape()
    profiles = [profile("a"), profile("b")]
    for name, blocks, of, at in (("x", 20, 0, 5.0), ("y", 9, 0, 5.5), ("z", 3, 1, 7.25)):
        asked = request(name, profiles, blocks=blocks, of=of, now=at)
        asked.shape.prompt_tokens += 5 if name == "z" else 0
        decided = scheduler.submit(asked, at)
        assert isinstance(decided, Decision)
        if name == "x":
            scheduler.grown(decided.number, 40)
        scheduler.ended(decided.number, at + 0.1)
    again = request("x", profiles, blocks=20, now=8.0, attempt=2)
    scheduler.submit(again, 8.0)
    counted = Event("request.ended", "/v1", digest_of_request("y"), {"completion_tokens": 7})
    records.append((9.0, counted))

    trace = trace_of(records)

    assert [one["timestamp"] for one in trace] == [0.0, 500.0, 2250.0]
    assert [one["input_length"] for one in trace] == [20 * BLOCK, 9 * BLOCK, 3 * BLOCK + 5]
    assert [one["output_length"] for one in trace] == [40, 7, 1]
    assert {one["block_size"] for one in trace} == {BLOCK}
    long, short, other = (one["hash_ids"] for one in trace)
    assert long[:9] == short
    assert (len(long), len(other)) == (20, 4)
    assert not set(long) & set(other)
    assert len(set(long) | set(other)) == 24


def test_the_output_of_a_request_is_shared_by_its_prompts_and_not_by_others_of_its_id() -> None:
    records, scheduler = tape()
    for at in (1.0, 1.0, 5.0):
        scheduler.submit(request("same", [profile("a")], now=at), at)
    ended = [
        (at, Event("request.ended", "/v1", digest_of_request("same"), {"completion_tokens": count}))
        for at, count in ((2.0, 21), (6.0, 4))
    ]

    # A front end may send before its router does.
    trace = trace_of([*ended, *records])

    assert [one["output_length"] for one in trace] == [10, 11, 4]


def test_the_fleet_of_a_trace_is_what_requests_were_offered() -> None:
    records, scheduler = tape()
    a, b = profile("a"), profile("b")
    for at, offered in ((5.0, [a]), (6.0, [a]), (7.0, [b, a]), (8.0, [b])):
        scheduler.submit(request(f"r{at}", offered, now=at), at)
    message = decode_message(encode_records("one", 0, 100.0, records))
    assert message is not None
    traffic = RecordedTraffic()
    for entry in entries_of([message]):
        traffic.take(entry)

    fleet = traffic.fleet()

    assert (fleet.target, fleet.began, fleet.policy) == ("llm.Engine", 105.0, "kv")
    assert (fleet.block_size, fleet.blocks) == (BLOCK, a.total_blocks)
    assert fleet.offered == [(105.0, ["a"]), (107.0, ["a", "b"]), (108.0, ["b"])]


def test_the_fleet_of_routers_that_have_a_part_each_is_all_of_it() -> None:
    traffic = RecordedTraffic()
    messages = []
    for recorder, offered in (("one", ["a", "b"]), ("two", ["c"])):
        records, scheduler = tape()
        for at in (5.0, 6.0, 90.0) if recorder == "one" else (5.5, 6.5):
            asked = request(f"{recorder}{at}", [profile(name) for name in offered], now=at)
            scheduler.submit(asked, at)
        message = decode_message(encode_records(recorder, 0, 100.0, records))
        assert message is not None
        messages.append(message)
    for entry in sorted(entries_of(messages), key=lambda one: one.time):
        traffic.take(entry)

    # The second one is silent for more than a minute at the end.
    assert traffic.fleet().offered == [
        (105.0, ["a", "b"]),
        (105.5, ["a", "b", "c"]),
        (190.0, ["a", "b"]),
    ]


def test_what_a_trace_cannot_have_is_left_out() -> None:
    records, scheduler = tape()
    small, empty = request("a", [profile("a")]), request("b", [profile("a")])
    empty.shape.prompt_tokens = 0
    scheduler.submit(small, 1.0)
    scheduler.submit(empty, 2.0)
    records[-1] = 2.0, msgspec.structs.replace(records[-1][1], prompt_tokens=0)
    other = msgspec.structs.replace(records[-1][1], prompt_tokens=64, block_size=32)
    traffic = RecordedTraffic()
    message = decode_message(encode_records("one", 0, 0.0, [*records, (3.0, other)]))
    assert message is not None
    for entry in entries_of([message]):
        traffic.take(entry)

    assert len(list(traffic.lines())) == 1
    assert traffic.left_out == {
        "its prompt is empty": 1,
        f"its blocks have not {BLOCK} tokens": 1,
    }


def test_requests_whose_prompts_are_not_known_are_left_out() -> None:
    records, scheduler = tape()
    for at in (1.0, 2.0):
        scheduler.submit(request(f"r{at}", [profile("a")], blocks=20, now=at), at)
    submitted = [place for place, (_, one) in enumerate(records) if "Submitted" in repr(one)]
    del records[submitted[0]]

    with pytest.raises(ConfigError, match="no router has recorded any request"):
        trace_of(records)


def test_of_several_components_one_is_named() -> None:
    records: Records = []
    for target in ("llm.A", "llm.B"):
        more, scheduler = tape(target)
        scheduler.submit(request(target, [profile("a")], now=1.0), 1.0)
        records += more

    with pytest.raises(
        ConfigError, match=r"requests to llm\.A, llm\.B are on record: give --target"
    ):
        trace_of(records)
    assert len(trace_of(records, target="llm.B")) == 1
