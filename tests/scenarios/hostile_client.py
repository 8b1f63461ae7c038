"""A client that sends what it likes: bare frames over a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import EndpointName, control_subject
from dynbus.bus.protocol.wire import Frame, Open, decode_batch, encode_batch
from dynbus.bus.transport import Message

INCARNATION = "hostile"
BEAT = 0.2
"""Seconds between two of its heartbeats."""


def secret_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


class HostileClient:
    """A client of `Source` at one instance.

    Attributes:
        result_frames: what came to its frames subject.
        control_frames: what came to its control lane.
        listed: the calls that its heartbeats list, and how far it has read each.
    """

    def __init__(self, connection: NatsConnection, instance_id: str, client_id: str) -> None:
        self.connection = connection
        self.base = f"_R.-.{client_id}"
        self.result_frames: list[Frame] = []
        self.control_frames: list[Frame] = []
        self.listed: dict[int, int] = {}
        self._instance_id = instance_id
        self._control = control_subject("scenario", "Source", instance_id)
        connection.subscribe(f"{self.base}.f", self._take_results)
        connection.subscribe(f"{self.base}.ctl.f", self._take_control)

    def request(
        self,
        number: int,
        data: bytes,
        *,
        endpoint: str = "work",
        base: str = "",
        **fields: str,
    ) -> None:
        """Send a request; `fields` are further headers by their constants' names."""
        named = {getattr(headers, name): text for name, text in fields.items()}
        framing = f"1 {secret_of(number).hex()} 65536 {INCARNATION}"
        self.connection.publish(
            EndpointName("scenario", "Source", endpoint).at(self._instance_id),
            data,
            reply=f"{base or self.base}.{number}",
            headers=headers.encode({headers.FRAMES: framing, **named}),
        )

    def say(self, *frames: Frame, base: str = "") -> None:
        """Send one control message, whatever it holds."""
        self.say_bytes(encode_batch(base or self.base, INCARNATION, 0, list(frames)))

    def say_bytes(self, data: bytes) -> None:
        self.connection.publish(self._control, data)

    async def beat(self) -> None:
        """Look alive, for ever."""
        while True:
            calls = sorted(self.listed.items())
            for first in range(0, max(1, len(calls)), 4096):
                part = calls[first : first + 4096]
                low = 0 if first == 0 else part[0][0]
                more = first + 4096 < len(calls)
                self.say(Open(1, part, [], low, calls[first + 4096][0] - 1 if more else None))
            await asyncio.sleep(BEAT)

    def _take_results(self, message: Message) -> None:
        batch = decode_batch(message.data)
        self.result_frames += batch.frames if batch is not None else []

    def _take_control(self, message: Message) -> None:
        batch = decode_batch(message.data)
        self.control_frames += batch.frames if batch is not None else []


@asynccontextmanager
async def hostile_client(
    url: str, instance_id: str, client_id: str = "h" * 32
) -> AsyncGenerator[HostileClient, None]:
    """A client whose heartbeats the instance hears."""
    connection = await connect([url], name="hostile")
    try:
        client = HostileClient(connection, instance_id, client_id)
        await connection.barrier()
        beating = asyncio.create_task(client.beat())
        try:
            yield client
        finally:
            beating.cancel()
            await asyncio.wait({beating})
    finally:
        await connection.close()
