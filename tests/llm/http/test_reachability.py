"""Whether a front end says that it is ready while nobody behind it can be reached."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
from tests.conditions import PATIENCE, eventually

from dynbus.bus.serving.services import ServiceResponder

from .served import Served, served

pytestmark = pytest.mark.anyio

HONEST_WITHIN = 3.0
"""Seconds after which a front end that is cut off says so."""


@pytest.fixture
async def client() -> AsyncGenerator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        yield client


async def ready(client: httpx2.AsyncClient, front: Served) -> str:
    """What `/ready` says: `ok`, or why it is not."""
    answer = await client.get(f"{front.url}/ready")
    told: dict[str, Any] = answer.json()
    assert (answer.status_code == 200) == (told["status"] == "ok")
    return str(told.get("reason", told["status"]))


async def test_a_front_end_is_not_ready_while_jetstream_does_not_answer(
    client: httpx2.AsyncClient,
) -> None:
    async with served() as front:
        assert await ready(client, front) == "ok"

        front.kit.bus.jetstream.stall()

        async def says(reason: str) -> bool:
            return await ready(client, front) == reason

        await eventually(lambda: says("JetStream does not answer"), HONEST_WITHIN)
        front.kit.bus.jetstream.stall(False)
        await eventually(lambda: says("ok"))


async def test_a_front_end_is_not_ready_while_no_instance_answers(
    monkeypatch: Any, client: httpx2.AsyncClient
) -> None:
    is_cut = False
    respond = ServiceResponder._respond  # pyright: ignore[reportPrivateUsage]

    def respond_unless_cut(*args: Any, **options: Any) -> None:
        if not is_cut:
            respond(*args, **options)

    monkeypatch.setattr(ServiceResponder, "_respond", respond_unless_cut)
    async with served() as front:

        async def says(reason: str) -> bool:
            return await ready(client, front) == reason

        reachability = front.front_end.shared.models._reachability  # pyright: ignore[reportPrivateUsage]
        await eventually(lambda: reachability._has_answered)  # pyright: ignore[reportPrivateUsage]
        assert await says("ok")

        is_cut = True

        await eventually(lambda: says("no instance answers"), HONEST_WITHIN)
        is_cut = False
        await eventually(lambda: says("ok"))
