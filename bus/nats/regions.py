"""The regions that store one subject: leaf nodes hand ordinary subjects on, and each side keeps
them.

Subjects of buckets (`$KV.`, `$O.`) and of JetStream itself stay in their region.
"""

from __future__ import annotations

import json
import secrets
from typing import Final

import anyio

from dynbus.bus.protocol import headers as header_block
from dynbus.bus.protocol.names import REGIONAL
from dynbus.bus.transport import Message

from .api_requests import ServerLink

KEEP_APART: Final = (
    "a leaf node joins two servers with JetStream. Keep their streams apart, by deny_imports and "
    f"deny_exports = {json.dumps(REGIONAL)} of the leaf "
    "node's remotes, or connect all processes to the servers of one region: docs/guides/regions.md"
)
OTHERS: Final = 0.5
"""Seconds in which a region far away answers, after the near one has."""
_NO_STREAM: Final = "-"


async def count_keepers(
    connection: ServerLink, subject: str, expected: int, timeout: float, *, others: float = 0.0
) -> int:
    """The number of streams that would store what is published to `subject`; nothing is stored.

    A server that neither belongs to a cluster nor is a leaf node is not asked for longer than it
    takes to hear of `expected` streams: what is refused on the leaf node's side is refused.

    Args:
        timeout: seconds for the first answer; who does not answer keeps nothing.
        others: seconds for more answers than expected, whatever the server is.
    """
    heard: list[Message] = []
    first = anyio.Event()
    enough = anyio.Event()

    def count(message: Message) -> None:
        if not message.found_nobody:
            heard.append(message)
        first.set()
        if len(heard) > expected:
            enough.set()

    inbox = f"{connection.inbox}c.{secrets.token_hex(8)}"
    subscription = connection.subscribe(inbox, count)
    try:
        with anyio.move_on_after(timeout):
            await connection.wait_connected()
            # A stream that is not the one that a message is for refuses it.
            block = header_block.encode({header_block.EXPECTED_STREAM: _NO_STREAM})
            connection.publish(subject, b"", reply=inbox, headers=block)
            await connection.barrier(timeout=timeout)
            if connection.refusal_of(subject):
                # Who may not publish there stores nothing twice.
                return expected
            await first.wait()
        if heard and (seconds := others or (OTHERS if connection.is_joined else 0.0)):
            with anyio.move_on_after(seconds):
                await enough.wait()
    finally:
        subscription.unsubscribe()
    return len(heard)
