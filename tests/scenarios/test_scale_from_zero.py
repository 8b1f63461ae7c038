"""A front end holds requests for a model that has no engine, until one is there or its bound."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.conditions import Stopwatch, eventually

from dynbus.bus.nats.server_process import RunningServer, free_port

from .project import ENGINE, GRACE, Folder
from .test_front_ends_that_die import read
from .test_serving_faults import get

pytestmark = pytest.mark.anyio

ASKING = json.dumps(
    {"model": "mock", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
).encode()
REQUEST = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    f"Content-Length: {len(ASKING)}\r\n\r\n"
).encode() + ASKING


async def lists_mock(port: int) -> bool:
    return b'"mock"' in await asyncio.to_thread(get, port, "/v1/models")


@pytest.mark.timeout(180)
async def test_requests_wait_for_the_first_engine_of_a_model_that_had_one_before(
    folder: Folder, own_server: RunningServer
) -> None:
    folder.url = own_server.url
    (folder.path / "stack.py").write_text(ENGINE)
    engine = ("stack.py", "--Engine.engine=mock", "--log-level=warning")
    patient, hasty = free_port(), free_port()
    run = folder.start(*engine)
    folder.start_front_end(hasty, "--hold", "0.5")
    await eventually(lambda: lists_mock(hasty), what="the model is served")
    run.terminate()
    assert await asyncio.to_thread(folder.exit_of, run) == 0

    # One that has never seen it with an engine.
    leaving = folder.start_front_end(patient, "--hold", "120")
    await eventually(lambda: lists_mock(patient), what="the model is known")
    assert b'"ok"' in await asyncio.to_thread(get, patient, "/health")
    late = await read(hasty, REQUEST)
    assert late.startswith(b"HTTP/1.1 503")
    assert b"\r\nretry-after: " in late.lower()
    assert b"has no engine, and none came within 0.5 s" in late

    held = [asyncio.create_task(read(patient, REQUEST)) for _ in range(5)]
    # It was asked after them, and says at once that it knows of no such model.
    other = REQUEST.replace(b'"mock"', b'"none"')
    assert (await read(patient, other)).startswith(b"HTTP/1.1 404")

    # The only namespace that has an instance is the front end's.
    named = REQUEST.replace(b"\r\n\r\n", b"\r\nX-Request-Id: told\r\n\r\n", 1)
    ended = asyncio.create_task(read(patient, named))

    async def holds_six_and_is_announced() -> bool:
        figures = await asyncio.to_thread(get, patient, "/metrics")
        listed = await asyncio.to_thread(folder.dynbus, "ps")
        return b"_requests_in_flight 6" in figures and listed.stdout.count("http") >= 2

    await eventually(holds_six_and_is_announced, what="it holds all of them")
    cancelled = await asyncio.to_thread(folder.dynbus, "cancel", "told")
    assert (cancelled.returncode, cancelled.stdout) == (
        0,
        "told: cancelled 1 call where it was made; no instance told of it\n",
    )
    assert (await ended).startswith(b"HTTP/1.1 499")
    listed = await asyncio.to_thread(folder.dynbus, "ps", "--requests", "--namespace", "stack")
    waits = [line.split()[1:4] for line in listed.stdout.splitlines()[1:]]
    assert waits == [["stack.Engine.*", "-", "held"]] * 5, listed
    folder.start(*engine)

    answers = await asyncio.gather(*held)
    assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * 5
    assert all(b'"assistant"' in answer for answer in answers)

    run = folder.runs[-1]
    told = await asyncio.to_thread(folder.dynbus, "models", "rm", "mock")
    assert (told.returncode, "it goes when they stop" in told.stderr) == (3, True)
    run.terminate()
    assert await asyncio.to_thread(folder.exit_of, run) == 0

    # One that is told to stop lets those that it holds ask another one, at once.
    async def has_no_engine() -> bool:
        listed = await asyncio.to_thread(folder.dynbus, "ps")
        return "routes_to" not in listed.stdout

    await eventually(has_no_engine, what="front ends know that it is gone")
    left = asyncio.create_task(read(patient, REQUEST))

    async def is_held() -> bool:
        listed = await asyncio.to_thread(folder.dynbus, "ps", "--requests")
        return " held " in listed.stdout

    await eventually(is_held, what="it is held")
    stopwatch = Stopwatch()
    leaving.terminate()
    answer = await left
    assert stopwatch.seconds() < GRACE / 2
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"\r\nretry-after: 1\r\n" in answer
    assert b"the front end stops; ask another one" in answer
    assert await asyncio.to_thread(folder.exit_of, leaving) == 0

    told = await asyncio.to_thread(folder.dynbus, "models", "rm", "mock")
    assert told.returncode == 0, told.stderr

    async def is_forgotten() -> bool:
        return not await lists_mock(hasty)

    await eventually(is_forgotten, what="the name is forgotten")
    assert (await read(hasty, REQUEST)).startswith(b"HTTP/1.1 503")
