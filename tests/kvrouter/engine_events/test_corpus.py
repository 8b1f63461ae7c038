"""Every dialect of vLLM and SGLang comes to the events that it means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynbus.kvrouter import RadixIndex, block_hashes
from dynbus.kvrouter.engine_events.messages import decode_payload
from dynbus.kvrouter.engine_events.translation import Translation
from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    encode_events,
)

from .frames import BLOCK_SIZE, DATA, DIALECTS, captured, encode, plain, stored_payload


def translated(payload: bytes, translation: Translation) -> list[KvEvent]:
    events: list[KvEvent] = []
    for event in decode_payload(payload).events:
        events += translation.translate(event)
    return plain(events)


def from_json(event: list[Any]) -> KvEvent:
    if event[0] == "stored":
        return BlockStored(*event[1:])
    return BlockRemoved(event[1]) if event[0] == "removed" else AllBlocksCleared()


@pytest.mark.parametrize("name", DIALECTS)
def test_the_events_of_a_dialect_are_understood(name: str) -> None:
    dialect = DIALECTS[name]

    events = translated(stored_payload(name), Translation(BLOCK_SIZE))

    assert events == plain(dialect.events)


@pytest.mark.parametrize("name", DIALECTS)
def test_the_rank_of_a_dialect_is_understood(name: str) -> None:
    assert decode_payload(stored_payload(name)).dp_rank == DIALECTS[name].dp_rank


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "of-the-future"])
def test_nothing_of_a_known_dialect_is_quarantined(name: str) -> None:
    assert decode_payload(stored_payload(name)).quarantined == []


@pytest.mark.parametrize("name", DIALECTS)
def test_the_stored_payloads_are_those_that_are_described(name: str) -> None:
    assert stored_payload(name) == encode(DIALECTS[name].payload)


def test_every_stored_payload_is_described() -> None:
    assert {path.stem for path in DATA.glob("*.msgpack")} == set(DIALECTS)


def test_the_captured_frames_of_vllm_come_to_the_expected_events() -> None:
    messages = captured("vllm-0.32.0.captured")
    expected = json.loads((DATA / "vllm-0.32.0.expected.json").read_text())
    translation = Translation(32)

    found = [translated(payload, translation) for _, payload in messages]

    assert found == [[from_json(event) for event in message] for message in expected]


def test_the_captured_frames_are_numbered_from_zero() -> None:
    assert [number for number, _ in captured("vllm-0.32.0.captured")] == list(range(13))


def test_an_index_finds_the_captured_prefixes() -> None:
    translation = Translation(32)
    index = RadixIndex()
    first_id = 0
    for _, payload in captured("vllm-0.32.0.captured")[:6]:
        events = translated(payload, translation)
        index.apply("engine", encode_events(events, event_epoch=1, first_id=first_id))
        first_id += len(events)
    prompt = [5 + 7 * at % 300 for at in range(164)]

    of_the_prompt = index.lookup(block_hashes(prompt, 32))
    of_the_tenant = index.lookup(block_hashes(prompt, 32, salt="tenant-1"))

    assert (of_the_prompt, of_the_tenant) == ({"engine": 5}, {"engine": 2})
