"""A file that has a share of the requests alone says so, whoever reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.flights import ListedRecords
from tests.kvrouter.routing.routing_fixtures import profile, request

from dynbus.actors.commands.recording import record, replay
from dynbus.bus.flight import SAMPLED, Event, FlightHead, write_flight
from dynbus.bus.flight.records import encode_records
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.tape import TapedScheduler

NOON = 1_764_417_600.0
SAID = "1 of 4 requests is on record from 2025-11-29T12:00:10"


@pytest.fixture
def sampled(tmp_path: Path) -> str:
    """A flight that has one of four requests for 50 seconds."""
    recorder = ListedRecords()
    recorder.one_in = 4
    scheduler = TapedScheduler(RouterConfig(), recorder, target="llm.Engine")
    recorder.note(Event(SAMPLED, "r", "", {"one_in": 4}), 10.0)
    for number in range(40):
        at = 11.0 + number
        decided = scheduler.submit(request(f"request-{number}", [profile("a")], now=at), at)
        assert isinstance(decided, Decision)
        scheduler.ended(decided.number, at + 0.5)
    recorder.note(Event(SAMPLED, "r", "", {"one_in": 1}), 60.0)
    path = tmp_path / "a.flight"
    data = encode_records("r", 0, NOON, recorder.records)
    write_flight(path, FlightHead("llm", NOON, NOON + 100.0, "1"), [data])
    return str(path)


def test_a_share_of_the_requests_is_said_by_show_trace_and_replay(sampled: str) -> None:
    run = CliRunner().invoke

    shown = run(record, ["show", sampled])
    traced = run(record, ["trace", sampled])
    replayed = run(replay, [sampled])
    as_json = json.loads(run(replay, [sampled, "--json"]).stdout)

    for result in (shown, traced, replayed):
        assert result.exit_code == 0, result.output
        assert SAID in result.stderr
    assert "requests.sampled r one_in=4" in shown.stdout
    assert 0 < len(traced.stdout.splitlines()) < 25
    assert [one["one_in"] for one in as_json["sampled"]] == [4]
    assert as_json["routing"]["unexplained"] == []
