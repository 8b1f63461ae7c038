"""Requests of a front end are on record: how they went, and no name or text of theirs."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from tests.conditions import eventually
from tests.flights import events_on

from dynbus.bus.flight import digest_of_request
from dynbus.bus.flight.events import Event

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
