"""Requests for a model without an engine, which a front end holds: how they end."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from tests.conditions import eventually

from dynbus.bus.protocol.names import ComponentName

from .served import CARDS, Served, served
from .test_connections import chat, error_of, exchange, request

pytestmark = pytest.mark.anyio

HELD = {name: card for name, card in CARDS.items() if card.endpoint_name.component == "TextEngine"}
OWNERS: dict[str, tuple[ComponentName, ...]] = {"tiny": (ComponentName("test", "ScriptedEngine"),)}
KEY = {"Idempotency_Key": "k"}


def hold(front: Served) -> None:
    """Have the front end know a model that nobody serves."""
    front.catalog.registered = dict(OWNERS)


async def ask(front: Served, count: int, **headers: str) -> asyncio.Task[tuple[int, str, bytes]]:
    """Ask for the model, and wait until so many requests are held."""
    data = request(chat("say hi", stream=True), **headers)
    asking = asyncio.create_task(exchange(front, data))
    await eventually(lambda: front.front_end.shared.metrics.in_flight == count)
    return asking


async def is_answered(front: Served, **headers: str) -> None:
    """See that the same request is answered once the model is served: its key is free."""
    front.catalog.change(CARDS)
    status, _, _ = await exchange(front, request(chat("say hi", stream=True), **headers))
    assert status == 200


@pytest.mark.parametrize("resumable", ["0", "1"])
async def test_an_operator_cancels_a_held_request_and_its_key_is_free(resumable: str) -> None:
    async with served(HELD, hold=600.0, max_held=1) as front:
        hold(front)
        operator = await front.kit.bus.connect()
        said: list[bytes] = []
        operator.subscribe("_INBOX.op", lambda message: said.append(message.data))
        await operator.barrier()
        headers = {**KEY, "Dynbus_Resumable": resumable}
        asking = await ask(front, 1, X_Request_Id="told", **headers)
        conflict = await exchange(front, request(chat("say hi", stream=True), **headers))

        operator.publish("test._cancel", b"told", reply="_INBOX.op")

        status, fields, body = await asking
        await eventually(lambda: any(json.loads(one).get("found") for one in said))
        await is_answered(front, **headers)

    assert conflict[0] == 409
    assert status == 499
    assert error_of(body)["message"] == "an operator cancelled the requests of this id"
    assert "x-request-id: told" in fields
    (found,) = [json.loads(one)["found"] for one in said if b"found" in one]
    assert found == {"told": {"made": 1}}


async def test_a_client_that_leaves_while_it_is_held_frees_its_key_and_its_place() -> None:
    async with served(HELD, hold=600.0, max_held=1) as front:
        hold(front)
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(request(chat("say hi", stream=True), **KEY))
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 1)
        writer.transport.abort()
        await eventually(lambda: front.front_end.shared.metrics.in_flight == 0)

        asking = await ask(front, 1, **KEY)
        full = await exchange(front, request(chat("say hi")))
        front.catalog.change(CARDS)
        status, _, _ = await asking

    assert (status, full[0]) == (200, 429)


async def test_held_requests_end_at_once_when_the_front_end_drains() -> None:
    async with served(HELD, hold=600.0, grace=20.0) as front:
        hold(front)
        asking = await ask(front, 1, **KEY)
        begun = time.monotonic()

        front.front_end.drain()

        status, fields, body = await asking
        took = time.monotonic() - begun

    assert took < 10.0
    assert (status, error_of(body)["code"]) == (503, "Draining")
    assert "retry-after: 1" in fields


async def test_a_held_request_has_no_more_time_than_any_other() -> None:
    async with served(HELD, hold=600.0, request_timeout=0.5) as front:
        hold(front)

        status, _, body = await exchange(front, request(chat("say hi")))

    assert (status, error_of(body)["code"]) == (504, "DeadlineExceeded")


async def test_tenants_share_the_held_places(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada secret-of-ada\nbob secret-of-bob\n")
    async with served(HELD, hold=600.0, max_held=2, api_keys=keys) as front:
        hold(front)
        ada, bob = ({"Authorization": f"Bearer secret-of-{name}"} for name in ("ada", "bob"))
        first = await ask(front, 1, **ada)
        refused = await exchange(front, request(chat("say hi"), **ada))
        second = await ask(front, 2, **bob)
        front.catalog.change(CARDS)

        statuses = [(await one)[0] for one in (first, second)]

    assert (refused[0], statuses) == (429, [200, 200])
    assert "what is free is for other tenants" in error_of(refused[2])["message"]
    assert "\r\nretry-after: 5" in refused[1]
