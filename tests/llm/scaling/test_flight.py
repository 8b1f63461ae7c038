"""What an autoscaler decided, on record, and decided again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec
import pytest
from tests.conditions import eventually
from tests.flights import entries_on, events_on

from dynbus.bus.flight.records import Entry, Event
from dynbus.bus.protocol.names import ComponentName
from dynbus.llm.scaling.flight import BEFORE, ScalingReplay
from dynbus.llm.scaling.observation import PoolTarget
from dynbus.testing import TestKit, run

from .test_autoscaler import POOL, Orchestrator, start, tokens

DECIDED: Final = "scaling.decided"


async def recorded(*, refuses: bool = False) -> tuple[list[Entry], list[Event]]:
    """The flight of a pool whose load comes and goes."""
    async with TestKit(flight=True) as kit:
        orchestrator = Orchestrator(kit)
        await orchestrator.set(ComponentName.parse(POOL), PoolTarget(1, ""))
        orchestrator.refuses = refuses
        scaler = await start(kit, orchestrator, "1:3")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(30):
                tasks.create_task(tokens(kit, 100))

        async def has_asked() -> bool:
            return len(orchestrator.asked) > 1

        await eventually(has_asked, what="it asks for more")
        # Until it has been calm for long enough.
        await anyio.sleep(120.0)
        await scaler.stop()
        await anyio.sleep(1.0)
        return await entries_on(kit.bus, "llm"), await events_on(kit.bus, "llm")


@pytest.fixture(scope="module")
def flight() -> tuple[list[Entry], list[Event]]:
    return run(recorded())


def replayed(entries: Sequence[Entry]) -> ScalingReplay:
    replay = ScalingReplay({}, "")
    for entry in entries:
        replay.take(entry)
    return replay


def test_each_target_comes_out_as_on_record(flight: tuple[list[Entry], list[Event]]) -> None:
    entries, _ = flight
    made = sum(entry.kind == DECIDED for entry in entries)

    replay = replayed(entries)

    outcome = replay.to_json()
    assert made > 100
    assert (outcome["decisions"], outcome["same"], outcome["missing"]) == (made, made, 0)
    assert replay.is_as_recorded
    assert replay.lines() == [f"{made} of {made} targets of autoscalers as on record"]
    (pool,) = outcome["pools"]
    assert (pool["pool"], pool["ready"], pool["desired"]) == (POOL, 1, 1)


def test_another_target_than_on_record_is_told(flight: tuple[list[Entry], list[Event]]) -> None:
    entries = list(flight[0])
    place = [at for at, entry in enumerate(entries) if entry.kind == DECIDED][50]
    tag, observation, _ = msgspec.msgpack.decode(entries[place].body)
    body = msgspec.msgpack.encode([tag, observation, {POOL: {"desired": 9, "reason": "up"}}])
    entries[place] = entries[place]._replace(body=msgspec.Raw(body))

    replay = replayed(entries)

    assert not replay.is_as_recorded
    assert f"{POOL}: 9 (up), now " in replay.lines()[1]


def test_what_was_seen_before_the_recording_explains_another_target(
    flight: tuple[list[Entry], list[Event]],
) -> None:
    entries = flight[0]
    # It tells its settings again each minute.
    began = [at for at, entry in enumerate(entries) if entry.kind == "scaling.began"]
    assert len(began) > 1

    replay = replayed(entries[began[1] :])

    outcome = replay.to_json()
    assert outcome["decisions"] > 10
    assert outcome["same"] + sum(outcome["explained"].values()) == outcome["decisions"]
    assert set(outcome["explained"]) <= {BEFORE}
    assert replay.is_as_recorded


NO_NUMBER = {"running": 1, "context_tokens": math.nan}


@pytest.mark.parametrize(
    "body",
    [
        ["odd"],
        [{"pools": 3}, {}],
        [{"time": 1e300, "pools": {}}, 1],
        [{"time": 1.0, "pools": {POOL: {"ready": 1, "load": NO_NUMBER}}}, {}],
    ],
)
def test_a_record_that_no_autoscaler_writes_is_missing(
    flight: tuple[list[Entry], list[Event]], body: list[object]
) -> None:
    entries = list(flight[0])
    place = [at for at, entry in enumerate(entries) if entry.kind == DECIDED][10]
    odd = msgspec.Raw(msgspec.msgpack.encode([DECIDED, *body]))
    entries[place] = entries[place]._replace(body=odd)

    replay = replayed(entries)

    assert replay.to_json()["missing"] == 1
    assert replay.is_as_recorded


def test_pools_that_are_to_have_another_number_are_events(
    flight: tuple[list[Entry], list[Event]],
) -> None:
    decided = [each for each in flight[1] if each.what == "pool.decided"]

    assert {each.who for each in decided} == {POOL}
    first, last = decided[0].details, decided[-1].details
    assert (first["before"], first["ready"]) == (1, 1)
    assert int(first["desired"]) > 1
    assert str(first["reason"]).startswith("up: ")
    assert last["desired"] == 1


def test_what_nobody_carries_out_is_an_event() -> None:
    _, events = run(recorded(refuses=True))

    failed = [each for each in events if each.what == "pool.not_scaled"]

    assert failed
    assert {each.who for each in failed} == {POOL}
