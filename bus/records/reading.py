"""Reading what a stream holds at this moment, to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Unpack

import anyio

from dynbus.bus.errors import Unavailable
from dynbus.bus.transport import ConsumeOptions, JetStream, OrderedConsumer, StoredMessage

RETRY_DELAY: Final = 0.25


async def read_until(
    jetstream: JetStream,
    stream: str,
    take: Callable[[StoredMessage], bool | None],
    *,
    timeout: float,
    retry: bool = False,
    **options: Unpack[ConsumeOptions],
) -> bool:
    """Read a stream until all that it held at the beginning is read, or `take` returns True.

    Args:
        take: called with each message in order, and with none after it has returned True.
        retry: ask a server that is away again, until `timeout` seconds are over.
        options: see `ConsumeOptions`; two of them, `on_caught_up` and `on_recreated`, are its own.

    Returns:
        False when the stream was deleted and made again meanwhile, so that what was read is of no
        stream as a whole.

    Raises:
        NoStream: there is no such stream.
        Unavailable: not all of it could be read within `timeout` seconds.
    """
    done = asyncio.Event()
    is_whole = True

    def on_message(message: StoredMessage) -> None:
        if not done.is_set() and take(message):
            done.set()

    def on_recreated() -> None:
        nonlocal is_whole
        is_whole = False
        done.set()

    options["on_caught_up"] = done.set
    if not options.get("last_per_subject"):
        # Otherwise the last messages are the whole state, whichever stream they are of.
        options["on_recreated"] = on_recreated

    async def begin() -> OrderedConsumer:
        while True:
            try:
                return await jetstream.consume(stream, on_message, **options)
            except Unavailable:
                left = anyio.current_effective_deadline() - anyio.current_time()
                if not retry or left <= RETRY_DELAY:
                    raise
                await anyio.sleep(RETRY_DELAY)

    try:
        with anyio.fail_after(timeout):
            consumer = await begin()
            try:
                await done.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await consumer.stop()
    except TimeoutError:
        raise Unavailable(f"reading {stream} timed out after {timeout:.3g} s") from None
    return is_whole


async def read_latest(
    jetstream: JetStream, stream: str, subject: str = "", *, timeout: float, retry: bool = False
) -> dict[str, StoredMessage]:
    """The last message of each subject of a stream (wildcards allowed), by subject; those that
    were deleted or have expired are left out.

    Raises:
        NoStream: there is no such stream.
        Unavailable: not all could be read within `timeout` seconds.
    """
    latest: dict[str, StoredMessage] = {}

    def keep(message: StoredMessage) -> None:
        latest[message.subject] = message

    await read_until(
        jetstream,
        stream,
        keep,
        timeout=timeout,
        subject=subject,
        last_per_subject=True,
        on_restart=latest.clear,
        retry=retry,
    )
    return {name: message for name, message in latest.items() if not message.is_marker}
