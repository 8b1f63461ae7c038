"""The bucket of kept responses: room in it, and what is not kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import msgspec
import pytest
from tests.conditions import PATIENCE

from dynbus import Unavailable
from dynbus.bus.records.objects import ObjectStore
from dynbus.bus.transport import StreamFull
from dynbus.llm.answers import Output
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.parsing.delta import Delta
from dynbus.llm.responses import store as storing
from dynbus.llm.responses.answer import ResponseFormat
from dynbus.llm.responses.store import ResponseStore
from dynbus.llm.responses.stored import Earlier, Pending
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio


class Told:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.whole = b""

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Keep them."""
        self.whole += b"".join(chunks)
        return True

    def end(self, error: object) -> None:
        """Nothing follows."""


async def keep(store: ResponseStore, tenant: str, name: str, text: str) -> bool:
    """Have a response kept; whether it says that it is."""
    pending = Pending([{"type": "message", "role": "user", "content": text}], Earlier())
    format = ResponseFormat(b'{"model":"tiny"}', name, pending=pending)
    told = Told()
    sink = store.sink(told, format, tenant)
    sink.write([format.whole([Output(0, Delta(text), finish_reason="stop")], None)])
    sink.end(None)
    while not told.whole:
        await anyio.lowlevel.checkpoint()
    return msgspec.json.decode(told.whole)["store"] is True


async def test_room_is_made_by_who_has_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "MAX_STORED", 64 * 1024)
    async with TestKit() as kit, ResponseStore(kit.caller) as store:
        assert await keep(store, "small", "a", "hi")
        for number in range(30):
            assert await keep(store, "large", f"b{number}", "x" * 1500)
        await store.make_room()
        kept = [number for number in range(30) if await store.get("large", f"resp_b{number}")]
        assert await store.get("small", "resp_a") is not None

    assert 5 < len(kept) < 30
    assert kept == [*range(30 - len(kept), 30)]


async def test_room_is_made_at_once_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made = anyio.Event()

    async def full(*_: object, **__: object) -> None:
        raise StreamFull("no room")

    async def make_room(_: ResponseStore) -> None:
        made.set()

    monkeypatch.setattr(ResponseStore, "make_room", make_room)
    async with TestKit() as kit, ResponseStore(kit.caller) as store:
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "_put", full)
            assert not await keep(store, "", "a", "hi")
        with anyio.fail_after(PATIENCE):
            await made.wait()
        assert await keep(store, "", "b", "hi")


async def test_nothing_waits_twice_for_a_bus_that_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[str] = []

    async def fails(_: ObjectStore, name: str, *__: object, **___: object) -> None:
        tries.append(name)
        raise Unavailable("the bus is away")

    with caplog.at_level(logging.WARNING):
        async with TestKit() as kit, ResponseStore(kit.caller) as store:
            monkeypatch.setattr(ObjectStore, "put", fails)
            assert not await keep(store, "", "a", "hi")
            assert not await keep(store, "", "b", "hi")
            monkeypatch.undo()
            monkeypatch.setattr(storing, "RETRY_DELAY", 0.0)
            monkeypatch.setattr(store, "_retry_at", 0.0)
            assert await keep(store, "", "c", "hi")

    assert len(tries) == 1
    assert [one.message for one in caplog.records] == [
        "responses are not kept, and cannot be gone on from: Unavailable: the bus is away"
    ]


async def test_a_request_has_no_more_read_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing, "MAX_READ", 64 * 1024)
    turns = 0

    async def go_on(store: ResponseStore) -> None:
        nonlocal turns
        earlier = None
        while True:
            body = {"model": "tiny", "input": "hi", "previous_response_id": earlier}
            data = msgspec.json.encode(body)
            format = (await store.api("", data)).read(data).format(f"a{turns}")
            told = Told()
            sink = store.sink(told, format, "")
            sink.write([format.whole([Output(0, Delta("x" * 1000), finish_reason="stop")], None)])
            sink.end(None)
            while not told.whole:
                await anyio.lowlevel.checkpoint()
            earlier, turns = f"resp_a{turns}", turns + 1

    async with TestKit() as kit, ResponseStore(kit.caller) as store:
        with pytest.raises(BadRequest, match="more than 65536 bytes") as refused:
            await go_on(store)
    assert refused.value.param == "previous_response_id"
    assert 30 < turns < 64


async def test_items_of_very_many_responses_are_refused_before_any_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def get(_: object, name: str, **__: object) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(ObjectStore, "get", get)
    named = [{"type": "item_reference", "id": f"msg_a{number}_0"} for number in range(300)]
    async with TestKit() as kit, ResponseStore(kit.caller) as store:
        with pytest.raises(BadRequest, match="more than 256 responses"):
            await store.api("", msgspec.json.encode({"input": named}))


async def test_items_of_any_kind_leave_the_request_kept() -> None:
    message = {"type": "message", "role": "user", "content": "hi", "id": 5}
    body = msgspec.json.encode({"model": "tiny", "input": [message]})
    async with TestKit() as kit, ResponseStore(kit.caller) as store:
        asked = (await store.api("", body)).read(body)

    assert asked.has_own_id
