"""A reader that takes nothing costs its writer a bounded amount, and nobody else anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import psutil
import pytest
from tests.conditions import Stopwatch, eventually

from dynbus import ReaderStalled, Runtime, call_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.unread_bytes import LEAST_PER_STREAM

from .observation import no_handler_runs
from .processes import Processes
from .workload import Count, Source, payload

pytestmark = pytest.mark.anyio

WINDOW = 512 * 1024
MAX_PER_STREAM = 1024 * 1024
"""Bytes of the writer's memory that a stalled stream may cost."""


async def test_a_stream_that_nobody_reads_ends_in_reader_stalled_after_what_was_granted(
    own_server: RunningServer,
) -> None:
    async with (
        Runtime.connect(own_server.url, reader_stall_timeout=1.0) as serving,
        Runtime.connect(own_server.url) as calling,
    ):
        await serving.start(Source)
        source = calling.client(Source)
        with call_options(wait=60.0):
            stream = source.count(Count(items=10**9, size=1000))
        first = await anext(stream)
        begun = time.monotonic()
        unhindered = await eventually(no_handler_runs(source))
        took = time.monotonic() - begun

        received = [first]

        async def read_on() -> None:
            async for item in stream:
                received.append(item)

        with pytest.raises(ReaderStalled) as raised:
            await read_on()

    assert took > 0.9
    assert unhindered < 2.5
    assert "scenario.Source.count@" in raised.value.hop
    assert WINDOW * 0.8 < len(received) * 1040 < WINDOW * 1.6
    assert [item.index for item in received] == list(range(len(received)))


async def test_a_reader_that_is_slow_but_reads_gets_everything(own_server: RunningServer) -> None:
    async with (
        Runtime.connect(own_server.url, reader_stall_timeout=2.0) as serving,
        Runtime.connect(own_server.url) as calling,
    ):
        await serving.start(Source)
        source = calling.client(Source)
        index = 0
        with call_options(wait=60.0):
            stream = source.count(Count(items=60, size=50_000))
        async for item in stream:
            assert (item.index, item.text) == (index, payload(index, 50_000))
            index += 1
            await asyncio.sleep(0.05)

    assert index == 60


@pytest.mark.nightly(
    "tests/bus/test_unread_bytes.py::test_a_stream_that_is_read_goes_on_beside_any_that_are_not",
    "tests/bus/serving/test_server.py::test_clients_that_never_read_are_bounded_together_and_do_not_stop_one_that_does",
)
@pytest.mark.parametrize("stalled", [50, pytest.param(200, marks=pytest.mark.soak)])
async def test_many_stalled_streams_cost_a_bounded_amount_and_leave_others_alone(
    own_server: RunningServer, processes: Processes, stalled: int
) -> None:
    worker = await processes.worker(own_server.url)
    async with (
        Runtime.connect(own_server.url) as calling,
        Runtime.connect(own_server.url) as stalling,
    ):
        source = calling.client(Source)
        with call_options(wait=60.0):
            await source.where()

        async def read(count: int) -> float:
            watch = Stopwatch()
            index = 0
            async for item in source.count(Count(items=count, size=200, pause=0.002)):
                assert item.index == index
                index += 1
            assert index == count
            return watch.seconds()

        alone = await read(200)
        before = psutil.Process(worker.pid).memory_info().rss
        lazy = stalling.client(Source)
        streams: list[AsyncGenerator[Any, None]] = []
        for _ in range(stalled):
            with call_options(wait=60.0):
                stream = lazy.count(Count(items=10**9, size=2000))
            await anext(stream)
            streams.append(stream)
        await asyncio.sleep(1.0)
        beside = await read(200)
        growth = psutil.Process(worker.pid).memory_info().rss - before
        assert (await source.journal()).running == stalled
        for stream in streams:
            await stream.aclose()
        await eventually(no_handler_runs(source))

    assert growth < stalled * MAX_PER_STREAM
    assert beside < 2 * alone + 0.5


async def test_many_clients_that_never_read_cost_a_bounded_amount_together(
    own_server: RunningServer,
) -> None:
    limit = 8 * 1024 * 1024
    lazy: list[SilentClient] = []
    async with (
        Runtime.connect(own_server.url, instance_window=limit) as serving,
        Runtime.connect(own_server.url) as calling,
    ):
        instance = await serving.start(Source)
        source = calling.client(Source)
        with call_options(wait=60.0):
            await source.where()
        unread = instance.server.ledger.unread
        for number in range(8):
            client = await SilentClient.connect(own_server.port, f"lazy{number}")
            lazy.append(client)
            client.ask(instance.server.name.instance_id, streams=32)
        await eventually(lambda: unread.held > limit / 2, what=f"{unread!r}")

        largest = 0
        index = 0
        async for item in source.count(Count(items=500, size=10_000)):
            assert (item.index, item.text) == (index, payload(index, 10_000))
            index += 1
            largest = max(largest, unread.held)
        for client in lazy:
            client.close()
        await eventually(no_handler_runs(source))
        await eventually(lambda: unread.held < 64 * 1024, what=f"{unread!r}")

    print(f"8 clients of 32 streams that never read: {largest / 1e6:.1f} MB at most")
    assert index == 500
    assert largest < limit + 8 * 32 * (LEAST_PER_STREAM + 12_000)


class SilentClient:
    """A client of dynbus that asks for streams, and takes nothing of them."""

    def __init__(self, writer: asyncio.StreamWriter, name: str) -> None:
        self._writer = writer
        self._base = f"_R.-.{name}"

    @classmethod
    async def connect(cls, port: int, name: str) -> SilentClient:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.readuntil(b"\r\n")
        client = cls(writer, name)
        writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
        # All of it comes here; nobody says that it did.
        writer.write(f"SUB {client._base}.> 1\r\n".encode())
        return client

    def ask(self, instance_id: str, streams: int) -> None:
        data = Count(items=10**9, size=10_000).model_dump_json().encode()
        for number in range(streams):
            framing = f"1 {number:032x} {WINDOW} silent"
            head = f"NATS/1.0\r\nDynbus-Frames: {framing}\r\n\r\n".encode()
            self._writer.write(
                f"HPUB scenario.Source.count.{instance_id} {self._base}.{number} "
                f"{len(head)} {len(head) + len(data)}\r\n".encode()
            )
            self._writer.write(head + data + b"\r\n")

    def close(self) -> None:
        self._writer.transport.abort()


@pytest.mark.timeout(120)
async def test_a_plain_client_that_never_reads_costs_a_bounded_amount_and_is_let_go(
    own_server: RunningServer, processes: Processes
) -> None:
    worker = await processes.worker(own_server.url)
    async with Runtime.connect(own_server.url) as runtime:
        source = runtime.client(Source)
        with call_options(wait=60.0):
            await source.where()
        before = psutil.Process(worker.pid).memory_info().rss
        reader, writer = await asyncio.open_connection("127.0.0.1", own_server.port, limit=1024)
        await reader.readuntil(b"\r\n")
        request = Count(items=10**9, size=10_000).model_dump_json().encode()
        writer.write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')
        writer.write(b"SUB _INBOX.lazy 1\r\n")
        head = b"PUB scenario.Source.count _INBOX.lazy %d\r\n" % len(request)
        writer.write(head + request + b"\r\n")
        await writer.drain()
        await eventually(lambda: _is_running(source))

        slowest = 0.0
        largest = 0
        begun = time.monotonic()
        while time.monotonic() - begun < 30.0 and (await source.journal()).running:
            watch = Stopwatch()
            await source.where()
            slowest = max(slowest, watch.seconds())
            largest = max(largest, psutil.Process(worker.pid).memory_info().rss - before)
            await asyncio.sleep(0.1)
        journal = await source.journal()
        writer.transport.abort()

    assert journal.running == 0
    assert largest < 64 * 1024 * 1024
    assert slowest < 1.0


async def _is_running(source: Source) -> bool:
    return (await source.journal()).running == 1
