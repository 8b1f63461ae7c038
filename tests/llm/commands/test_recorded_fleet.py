"""A recorded flight is replayed on a simulated fleet, as it was and as it might have been."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from tests.flights import ListedRecords
from tests.kvrouter.routing.routing_fixtures import profile, request

from dynbus import ConfigError
from dynbus.actors.commands.recording import FleetChanges, replay
from dynbus.bus.flight import FlightHead, write_flight
from dynbus.bus.flight.records import encode_records
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.tape import TapedScheduler
from dynbus.llm.commands.replaying import changed_faults, faults_on_record
from dynbus.llm.replay.scaled import Fault

BEGAN = 1_790_000_000.0
REQUESTS = 60
TOO_LONG = "x" * 300 + ".svg"
"""A name of a file that no file system takes, whoever asks."""


def at(seconds: float) -> str:
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat()


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty requests, ten a second, of three engines; the last of these came after 20 requests."""
    recorder = ListedRecords()
    scheduler = TapedScheduler(RouterConfig(), recorder, target="llm.Engine")
    engines = [profile(name) for name in "abc"]
    for number in range(REQUESTS):
        now = number / 10
        asked = request(f"r{number}", engines[: 2 + (number >= 20)], blocks=40, of=number, now=now)
        decided = scheduler.submit(asked, now)
        assert isinstance(decided, Decision)
        scheduler.grown(decided.number, 100)
        scheduler.ended(decided.number, now + 0.5)
    records = sorted(recorder.records, key=lambda each: each[0])
    path = tmp_path_factory.mktemp("flight") / "incident.flight"
    head = FlightHead("llm", BEGAN, BEGAN + 60.0, "test")
    write_flight(path, head, [encode_records("one", 0, BEGAN, records)])
    return path


def invoke(flight: Path, *arguments: str) -> Result:
    return CliRunner().invoke(replay, [str(flight), *arguments])


@pytest.mark.parametrize(
    ("changes", "is_slower"),
    [
        (("--kill", f"a@{at(3.0)}", "--cold-start", "60"), True),
        (("--scale", f"Engine=1@{at(0.0)}"), True),
        (("--add-instances", "3"), False),
    ],
)
def test_a_fleet_that_is_changed_has_other_times(
    changes: tuple[str, ...], is_slower: bool, flight: Path
) -> None:
    result = invoke(flight, *changes, "--json")

    assert result.exit_code == 0, result.output
    before, after = json.loads(result.stdout)
    assert (before["policy"], after["policy"]) == ("on record", "changed")
    assert before["requests"] == after["requests"] == REQUESTS
    if is_slower:
        assert after["ttft_ms"]["mean"] > before["ttft_ms"]["mean"]
    else:
        assert after["ttft_ms"]["mean"] <= before["ttft_ms"]["mean"]


def test_both_sides_are_a_table_and_a_plot(flight: Path, tmp_path: Path) -> None:
    more = ("--add-instances", "1", "--set", "policy=dynamo")

    printed = invoke(flight, *more, "--plot", "-")
    drawn = invoke(flight, *more, "--plot", str(tmp_path / "sides.svg"))

    assert printed.exit_code == drawn.exit_code == 0, printed.output + drawn.output
    assert printed.stdout.splitlines()[0].split() == ["FIGURE", "on", "record", "changed"]
    assert "Times to the first token" in printed.stdout
    assert "Times to the first token" not in drawn.stdout
    root = ElementTree.parse(tmp_path / "sides.svg").getroot()
    names = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"on record", "changed"} <= set(names)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--kill", "a"), "--kill 'a': write INSTANCE@TIME"),
        (("--kill", "a@soon"), "--kill"),
        (("--kill", f"d@{at(1)}"), "it was not there when the requests began"),
        (("--kill", f"a@{at(-1)}"), "is before the first request on record"),
        (("--scale", f"Engine=x@{at(1)}"), "write COMPONENT=N@TIME"),
        (("--scale", f"Engine={'9' * 5000}@{at(1)}"), "write COMPONENT=N@TIME"),
        (("--kill", f"a@{at(1)}", "--cold-start", "inf"), "inf is not in the range"),
        (("--scale", f"Other=2@{at(1)}"), "the requests on record are to Engine"),
        (("--add-instances", "1", "--at", "1h"), "leave --at, --request"),
        (("--add-instances", "1", "--set", "temperature=1"), "leave --at, --request"),
        (("--add-instances", "1", "--plot", "x.png"), "give a name in .svg"),
        (("--set", "policy=dynamo", "--plot", "x.svg"), "give - for the terminal"),
        (("--scale", "Engine=3@all"), "give one time"),
        (("--scale", f"Engine=0@{at(1)}"), "requests wait for an instance"),
        (("--add-instances", "1", "--plot", TOO_LONG), f"--plot {TOO_LONG} cannot be written"),
        (("--add-instances", "1", "--json", "--plot", "-"), "leave --plot out"),
        (("--cold-start", "5"), "are for simulated engines"),
        (("--add-instances", "1", "--target", "no.Engine"), "none to no.Engine: requests to llm"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: tuple[str, ...], reason: str, flight: Path
) -> None:
    result = invoke(flight, *arguments)

    assert result.exit_code != 0
    assert reason in f"{' '.join(result.output.split())} {result.exception}"


def recorded(path: Path, blocks: list[int], **engine: str) -> Path:
    """A flight with a request a second, of so many blocks of 16 tokens each, to one engine."""
    recorder = ListedRecords()
    scheduler = TapedScheduler(RouterConfig(), recorder, target="llm.Engine")
    engines = [profile("a", **engine)]
    for number, count in enumerate(blocks):
        now = float(number)
        asked = request(f"r{number}", engines, blocks=count, of=number, now=now)
        decided = scheduler.submit(asked, now)
        assert isinstance(decided, Decision)
        scheduler.ended(decided.number, now + 0.5)
    head = FlightHead("llm", BEGAN, BEGAN + 60.0, "test")
    write_flight(path, head, [encode_records("one", 0, BEGAN, recorder.records)])
    return path


def test_requests_that_no_engine_can_have_are_left_out(tmp_path: Path) -> None:
    flight = recorded(tmp_path / "a.flight", [200, 200, 4, 4], total_blocks="64")

    result = invoke(flight, "--kill", f"a@{at(2.005)}", "--json")

    assert result.exit_code == 0, result.output
    assert [each["requests"] for each in json.loads(result.stdout)] == [2, 2]
    assert "2 requests are left out: with their outputs they have more tokens" in result.stderr
    # It dies with the third request, which is the first now.
    assert "it had no requests then" not in result.stderr


def test_of_requests_that_no_engine_can_have_alone_nothing_is_simulated(tmp_path: Path) -> None:
    flight = recorded(tmp_path / "a.flight", [200], total_blocks="64")

    result = invoke(flight, "--add-instances", "1")

    assert "no request on record fits into an engine, which takes 1024" in str(result.exception)


class OnRecord(NamedTuple):
    target: str = "llm.Engine"
    began: float = 100.0
    block_size: int = 16
    blocks: int | None = None
    max_batched_tokens: int | None = None
    policy: str = "kv"
    offered: Sequence[tuple[float, list[str]]] = (
        (99.0, ["a", "b"]),
        (130.0, ["a", "b", "c"]),
        (160.0, ["b", "c"]),
    )


def test_instances_come_and_go_as_on_record_until_they_are_scaled() -> None:
    changes = FleetChanges(2, [("b", 120.0)], [("Engine", 150.0, 7)], "", 0.0)

    assert faults_on_record(OnRecord()) == [
        Fault("hand", 30.0, instances=3, cold_start=0.0),
        Fault("hand", 60.0, instances=2, cold_start=0.0),
    ]
    assert changed_faults(OnRecord(), changes) == [
        Fault("hand", 30.0, instances=5, cold_start=0.0),
        Fault("hand", 50.0, instances=7),
        Fault("dies", 20.0, instance="b"),
    ]


def test_an_instance_that_took_the_place_of_another_on_record_takes_it_in_both_fleets() -> None:
    # Sooner than the cold start of those that the change starts.
    offered = ((99.0, ["a", "b"]), (130.0, ["a"]), (140.0, ["a", "c"]))
    changes = FleetChanges(0, [], [], "", 45.0)

    assert changed_faults(OnRecord(offered=offered), changes) == [
        Fault("hand", 30.0, instances=1, cold_start=0.0),
        Fault("hand", 40.0, instances=2, cold_start=0.0),
    ]


def test_an_instance_that_came_later_is_not_killed_for_another() -> None:
    changes = FleetChanges(0, [("c", 150.0)], [], "", 0.0)

    with pytest.raises(ConfigError, match="there were a, b"):
        changed_faults(OnRecord(), changes)
