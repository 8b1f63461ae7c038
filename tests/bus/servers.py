"""What tests of nats-server as a process have in common."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from dynbus.bus.commands.survey import Survey, survey
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.nats.neighbours import with_credential
from dynbus.bus.nats.server_process import RunningServer, free_port

nats: Any = importlib.import_module("nats")  # its annotations do not satisfy strict checks


async def survey_of(url: str) -> Survey:
    """What `dynbus ps` finds at a server."""
    async with terminal.server(BusConfig(servers=(url,)), "dynbus-ps") as server:
        return await survey(server)


async def make_stream(url: str, name: str) -> None:
    client = await nats.connect(with_credential(url))
    await client.jetstream().add_stream(name=name, subjects=[name])
    await client.close()


async def stream_names(url: str) -> list[str]:
    client = await nats.connect(with_credential(url))
    streams = await client.jetstream().streams_info()
    await client.close()
    return [stream.config.name or "" for stream in streams]


@asynccontextmanager
async def listener(greeting: bytes | None) -> AsyncGenerator[str, None]:
    """A TCP listener that says `greeting` and closes; None says nothing and stays open."""
    done = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeting is None:
            await done.wait()
        else:
            writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", free_port())
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        done.set()
        server.close()


@asynccontextmanager
async def server_stopped(server: RunningServer) -> AsyncGenerator[RunningServer, None]:
    try:
        yield server
    finally:
        await server.stop()
