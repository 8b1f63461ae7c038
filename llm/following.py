"""Following a bucket of JetStream: made where it is missing, asked for again while it is away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from dynbus import DynbusError
from dynbus.spi import JetStream, NoStream, OrderedConsumer, StreamConfig

RETRY_DELAY: Final = 0.5


async def follow(
    jetstream: JetStream,
    bucket: StreamConfig,
    consume: Callable[[], Awaitable[OrderedConsumer]],
    failed: Callable[[DynbusError], object],
    passing: type[DynbusError],
) -> None:
    """Follow a bucket, without end.

    Args:
        consume: begins to read it.
        failed: called with each error of the class `passing`, after which it is tried again.

    Raises:
        DynbusError: another one.
    """
    consumer: OrderedConsumer | None = None
    is_there = True
    while consumer is None:
        try:
            if not is_there:
                await jetstream.ensure_stream(bucket)
            consumer = await consume()
        except NoStream:
            is_there = False
        except passing as error:
            failed(error)
            await anyio.sleep(RETRY_DELAY)
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await consumer.stop()
