"""How large events are in a message, and how one that is too large is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dynbus.kvrouter.events import HEADER, BlockRemoved, BlockStored, CacheDigest, KvEvent

BLOCK_BYTES: Final = 16
EVENT_BYTES: Final = 13
PADDING_BYTES: Final = 11
FRAME_BYTES: Final = HEADER.size + PADDING_BYTES
"""Of a message, beside its events."""


def event_bytes(event: KvEvent | CacheDigest) -> int:
    """The bytes that an event adds to a message at most."""
    if isinstance(event, BlockStored):
        return EVENT_BYTES + BLOCK_BYTES * len(event.engine_hashes)
    if isinstance(event, BlockRemoved):
        return EVENT_BYTES + 8 * len(event.engine_hashes)
    return EVENT_BYTES + BLOCK_BYTES


def pieces(event: KvEvent, max_bytes: int) -> Iterator[KvEvent]:
    """An event in pieces that fit a message of `max_bytes` each."""
    room = max_bytes - FRAME_BYTES - EVENT_BYTES
    if not isinstance(event, BlockStored | BlockRemoved) or event_bytes(event) <= room:
        yield event
        return
    if isinstance(event, BlockRemoved):
        step = room // 8
        for at in range(0, len(event.engine_hashes), step):
            yield BlockRemoved(event.engine_hashes[at : at + step], event.tier)
        return
    step = room // BLOCK_BYTES
    parent = event.parent_hash
    for at in range(0, len(event.engine_hashes), step):
        engine_hashes = event.engine_hashes[at : at + step]
        blocks = event.block_hashes[at : at + step]
        yield BlockStored(parent, engine_hashes, blocks, event.tier)
        parent = int(engine_hashes[-1])
