"""Requests of a front end are on record: how they went, and no name or text of theirs."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from tests.conditions import eventually
from tests.flights import events_on

from dynbus.bus.flight import digest_of_request
from dynbus.bus.flight.records import Event
from dynbus.bus.protocol.names import ComponentName

from .served import served

pytestmark = pytest.mark.anyio


async def test_a_request_is_on_record_with_its_times_and_tokens(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada-the-tenant key-of-hers\n")
    ended: list[Event] = []

    async with served(flight=True, api_keys=keys) as front:
        headers = {"Authorization": "Bearer key-of-hers", "X-Request-Id": "its-id"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "words of hers"}]}
        async with httpx2.AsyncClient(base_url=front.url, headers=headers) as client:
            answer = await client.post("/v1/chat/completions", json=body)
            unknown = await client.post("/v1/chat/completions", json={**body, "model": "none"})

        async def is_stored() -> bool:
            happened = await events_on(front.kit.bus, "test")
            ended[:] = [one for one in happened if one.what == "request.ended"]
            return bool(ended)

        await eventually(is_stored, what="the request is on record")

    assert (answer.status_code, unknown.status_code) == (200, 404)
    [event] = ended
    assert (event.who, event.request) == ("/v1/chat/completions", digest_of_request("its-id"))
    usage = answer.json()["usage"]
    assert event.details["status"] == 200
    assert event.details["prompt_tokens"] == usage["prompt_tokens"]
    assert event.details["completion_tokens"] == usage["completion_tokens"]
    assert 0 < float(event.details["first_token_ms"]) <= float(event.details["end_ms"])
    assert "ada" not in repr(event)
    assert "words" not in repr(event)


async def test_requests_that_are_not_admitted_are_on_record_with_who_and_why(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada-the-tenant key-of-hers requests_per_minute=1\n")
    happened: list[Event] = []

    async with served(flight=True, api_keys=keys, hold=0.2) as front:
        headers = {"Authorization": "Bearer key-of-hers"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "words of hers"}]}
        async with httpx2.AsyncClient(base_url=front.url, headers=headers) as client:

            async def ask(request_id: str) -> int:
                answer = await client.post(
                    "/v1/chat/completions", json=body, headers={"X-Request-Id": request_id}
                )
                return answer.status_code

            front.catalog.registered = {"tiny": (ComponentName("test", "ScriptedEngine"),)}
            front.catalog.change({})
            held = await ask("held-id")
            limited = await ask("limited-id")

        async def is_stored() -> bool:
            happened[:] = await events_on(front.kit.bus, "test")
            return sum(one.what == "request.ended" for one in happened) == 2

        await eventually(is_stored, what="both are on record")

    assert (held, limited) == (503, 429)
    by_request = {
        request_id: [one for one in happened if one.request == digest_of_request(request_id)]
        for request_id in ("held-id", "limited-id")
    }
    waits, goes, ended = by_request["held-id"]
    assert [one.what for one in (waits, goes)] == ["request.held", "request.let_go"]
    assert waits.who == "test.ScriptedEngine"
    assert waits.details["model"] == "tiny"
    assert float(goes.details["waited"]) >= 0.2
    assert (ended.details["why"], ended.details["error"]) == ("model", "NoInstances")
    assert float(ended.details["held_ms"]) >= 200
    [refused] = by_request["limited-id"]
    assert (refused.details["status"], refused.details["why"]) == (429, "requests_per_minute")
    assert 0 < float(refused.details["retry_after"]) <= 60
    assert refused.details["tenant"] == ended.details["tenant"] == waits.details["tenant"]
    assert "ada" not in repr(happened)
    assert "words" not in repr(happened)


async def test_a_request_that_no_instance_has_room_for_says_so() -> None:
    happened: list[Event] = []
    async with served(flight=True) as front:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "overloaded now"}]}
        async with httpx2.AsyncClient(base_url=front.url) as client:
            refused = await client.post("/v1/chat/completions", json=body)

        async def is_stored() -> bool:
            events = await events_on(front.kit.bus, "test")
            happened[:] = [one for one in events if one.what == "request.ended"]
            return bool(happened)

        await eventually(is_stored, what="it is on record")

    [event] = happened
    assert event.details["status"] == refused.status_code
    assert (event.details["error"], event.details["why"]) == ("Overloaded", "instance")
    assert event.details["retry_after"] == 2.5
