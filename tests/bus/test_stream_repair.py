"""A stream that takes nothing any more is made again where that helps, and only there."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import pytest

from dynbus.bus.errors import PermissionDenied
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.memory.jetstream import MemoryJetStream
from dynbus.bus.records.leased_record import StreamRepair
from dynbus.bus.transport import StreamConfig, StreamInfo
from dynbus.testing import run

STREAM = StreamConfig("S", ("s.>",))
FULL = "no space left on device"

Story = Callable[[MemoryBus, MemoryJetStream, StreamRepair], Awaitable[None]]


def tell(story: Story) -> list[str]:
    """Carry out a story with a stream that holds one message; returns what is left of it."""

    async def told() -> list[str]:
        bus = MemoryBus()
        jetstream = (await bus.connect()).jetstream
        assert isinstance(jetstream, MemoryJetStream)
        await jetstream.ensure_stream(STREAM)
        await jetstream.publish("s.a", b"")

        async def make() -> None:
            await jetstream.ensure_stream(STREAM)

        await story(bus, jetstream, StreamRepair(jetstream, STREAM.name, make, make))
        return [message.subject for message in await jetstream.read(STREAM.name)]

    return run(told())


def test_a_stream_that_is_well_is_left_alone() -> None:
    async def story(_: MemoryBus, __: MemoryJetStream, repair: StreamRepair) -> None:
        assert not await repair.look()

    assert tell(story) == ["s.a"]


def test_one_whose_store_is_broken_is_made_again() -> None:
    async def story(bus: MemoryBus, _: MemoryJetStream, repair: StreamRepair) -> None:
        bus.jetstream.break_store(STREAM.name, FULL)

        assert await repair.look()
        assert not await repair.look()

    assert tell(story) == []


def test_one_that_is_missing_is_made() -> None:
    async def story(_: MemoryBus, jetstream: MemoryJetStream, repair: StreamRepair) -> None:
        await jetstream.delete_stream(STREAM.name)

        assert await repair.look()

    assert tell(story) == []


def test_one_that_several_servers_keep_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bus: MemoryBus, jetstream: MemoryJetStream, repair: StreamRepair) -> None:
        async def info(stream: str, *, timeout: float = 5.0) -> StreamInfo:
            return StreamInfo(1, 1, 1, 1, 1.0, replicas=3, in_cluster=True)

        bus.jetstream.break_store(STREAM.name, FULL)
        monkeypatch.setattr(jetstream, "stream_info", info)

        assert not await repair.look()

    assert tell(story) == ["s.a"]


def test_who_may_not_look_says_once_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(_: MemoryBus, jetstream: MemoryJetStream, repair: StreamRepair) -> None:
        async def refuse(stream: str, *, timeout: float = 5.0) -> str:
            raise PermissionDenied("not you")

        monkeypatch.setattr(jetstream, "write_error", refuse)

        with caplog.at_level(logging.WARNING):
            assert not await repair.look()
            assert not await repair.look()

    assert tell(story) == ["s.a"]
    assert caplog.text.count("restart its server if its disk was full") == 1
