"""Which streams a front end says that it goes on with, on a bus in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import pytest

from dynbus.bus.errors import DynbusError, Unavailable
from dynbus.bus.transport import StoredMessage, WrongLastSequence
from dynbus.llm.resumable.records import Begun, Came, Owned, StreamLog
from dynbus.llm.resumable.streams import ResumableStreams
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio

BEGUN: Final = Begun("0", "/v1/completions", b"{}", "one", 1.0, 60.0, "seed")


@asynccontextmanager
async def front_end() -> AsyncGenerator[tuple[ResumableStreams, Any]]:
    """The streams of a front end, and the stored streams of its bus."""
    async with TestKit() as kit, ResumableStreams(kit.caller, most=10) as streams:
        await streams.store.make_ready()
        yield streams, kit.caller.bus.data.jetstream


class SilentPublish:
    """Stores nothing, and says nothing before it is told to."""

    def __init__(self) -> None:
        self.begun, self.failed = asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any, **options: Any) -> int:
        self.begun.set()
        await self.failed.wait()
        raise Unavailable("there was no answer in time")


async def test_an_id_names_another_stream_once_that_of_the_first_is_over() -> None:
    async with front_end() as (streams, _):
        first = await streams.begin("key", BEGUN)
        with pytest.raises(DynbusError, match="there is a stream of the request id one already"):
            await streams.begin("key", BEGUN)
        await streams.store.append("key", first, Came([]))
        await streams.store.close_log("key", first, "it is over")

        second = await streams.begin("key", BEGUN)
        await streams.store.append("key", second, Came([]))

        read, log = anyio.Event(), StreamLog()

        def take(stored: StoredMessage) -> None:
            log.read(stored.data, stored.sequence, 0.0)

        async with streams.store.reading("key", take, read.set, read.set):
            with anyio.fail_after(5.0):
                await read.wait()
        assert (log.begun, log.over, log.sequence) == (BEGUN, "", second.sequence)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_stream_is_claimed_while_that_is_stored_and_no_longer_where_it_is_not(
    monkeypatch: Any, is_cancelled: bool
) -> None:
    async with front_end() as (streams, jetstream):
        silent = SilentPublish()
        monkeypatch.setattr(jetstream, "publish", silent)
        assert not streams.owns("key")

        claim = asyncio.ensure_future(streams.claim("key", StreamLog(), BEGUN))
        await silent.begun.wait()
        assert streams.owns("key")
        assert not streams.owns("another")
        if is_cancelled:
            claim.cancel()
        else:
            silent.failed.set()
        with pytest.raises((Unavailable, asyncio.CancelledError)):
            await claim

        assert not streams.owns("key")


async def test_a_stream_is_claimed_while_one_of_two_that_would_have_it_may_still(
    monkeypatch: Any,
) -> None:
    async with front_end() as (streams, jetstream):
        log = StreamLog()
        await streams.claim("key", log, BEGUN)
        silent = SilentPublish()
        with monkeypatch.context() as slow:
            slow.setattr(jetstream, "publish", silent)
            claim = asyncio.ensure_future(streams.claim("key", log, Owned("1")))
            await silent.begun.wait()

        # Somebody else has written to what this one has not read.
        with pytest.raises(WrongLastSequence):
            await streams.claim("key", StreamLog(), Owned("2"))

        assert streams.owns("key")
        silent.failed.set()
        with pytest.raises(Unavailable):
            await claim
        assert not streams.owns("key")
