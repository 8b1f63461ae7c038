"""Storing a message once, however often it takes to be confirmed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio

from dynbus.bus.clock import monotonic
from dynbus.bus.errors import Overloaded, Unavailable
from dynbus.bus.transport import JetStream, NoStream, StreamFull, SubjectTaken

TRY_SECONDS: Final = 2.0
RETRY_PAUSE: Final = 0.1
MAX_RETRY_PAUSE: Final = 1.0
RETRY_AFTER_FULL: Final = 1.0


async def store(
    jetstream: JetStream,
    subject: str,
    data: bytes,
    *,
    message_id: str,
    fields: Mapping[str, str],
    until: float,
    ensure: Callable[[], Awaitable[object]],
    refresh: Callable[[], object] = lambda: None,
    what: str,
    where: str,
) -> None:
    """Store a message; on return the server has it. One that is there already is not stored again.

    Args:
        message_id: by which the server knows a repeat.
        fields: its headers.
        until: when to give up, on the monotonic clock, within the time for which a repeat is
            known.
        ensure: makes the stream where it is missing.
        refresh: called before each try, to change `fields`.
        what, where: how messages name it and its stream.

    Raises:
        Overloaded: the stream is full.
        PayloadTooLarge: it does not fit into a message.
        Unavailable: the server did not confirm it in time; it may be there.
    """
    pause = RETRY_PAUSE
    was_made = False
    while True:
        left = until - monotonic()
        refresh()
        try:
            await jetstream.publish(
                subject,
                data,
                timeout=min(TRY_SECONDS, max(left, RETRY_PAUSE)),
                message_id=message_id,
                headers=fields,
            )
            return
        except SubjectTaken:
            return
        except StreamFull:
            raise Overloaded(
                f"{where} is full: try again later, or raise its limits (`nats stream edit`)",
                retry_after=RETRY_AFTER_FULL,
                started=False,
            ) from None
        except (NoStream, Unavailable) as error:
            failure = error
        if isinstance(failure, NoStream):
            # Also the answer of servers that elect a leader: then making it fails, or it is there
            # already.
            try:
                await ensure()
            except Unavailable as error:
                failure = error
            else:
                if not was_made:
                    was_made = True
                    continue
        if monotonic() + pause >= until:
            raise Unavailable(
                f"{what} was not confirmed by {where} and may be in it: {failure}"
            ) from failure
        await anyio.sleep(pause)
        pause = min(2 * pause, MAX_RETRY_PAUSE)
