"""KV-cache events and their form on the wire: many in one binary message.

A message belongs to one (instance, event epoch, data-parallel rank). Its events have the ids
`first_id`, `first_id + 1`, ...; an epoch begins when a cache or its numbering begins anew.
Token ids are never in it, nor tenants: a block is its hash.

| part | bytes | |
|---|---|---|
| header | 40 | `HEADER` |
| codes | 1 for each event | operation, whether it has a parent, tier |
| padding | to a multiple of 4 | |
| counts | 4 for each event | blocks |
| padding | to a multiple of 8 | |
| parents | 8 for each event that has one | the engine's hash |
| engine hashes | 8 for each block | |
| block hashes | 8 for each stored block | |

All numbers are little-endian.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

VERSION: Final = 1
HEADER: Final = struct.Struct("<BBHIQQIIII")
"""Version, 0, data-parallel rank, events, event epoch, first id, parents, engine hashes, block
hashes, 0."""

MAX_RANK: Final = (1 << 16) - 1
"""The highest data-parallel rank of an instance."""
EPOCH_LIMIT: Final = 1 << 63
"""Above all event epochs."""
ID_LIMIT: Final = 1 << 64
"""Above the ids of all events, and the one behind the last."""

Hashes: TypeAlias = Sequence[int] | NDArray[np.uint64]


class Tier(IntEnum):
    """The tier in which a block lies, nearest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


class Operation(IntEnum):
    """The kind of an event."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2
    DIGEST = 3


class BlockStored(msgspec.Struct, frozen=True):
    """Blocks that follow each other were stored.

    Attributes:
        parent_hash: the engine's hash of the block before the first; None at the beginning.
        engine_hashes: the engine's own hashes of the blocks, opaque 64-bit numbers.
        block_hashes: what `block_hashes` makes of their tokens, one for each.
    """

    parent_hash: int | None
    engine_hashes: Hashes
    block_hashes: Hashes
    tier: Tier = Tier.DEVICE


class BlockRemoved(msgspec.Struct, frozen=True):
    """Blocks were removed, in any order."""

    engine_hashes: Hashes
    tier: Tier = Tier.DEVICE


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """All blocks of this rank were removed, from all tiers."""


@dataclass(frozen=True, slots=True)
class CacheDigest:
    """The digest of what the rank holds after the events before this one, to compare an index with.

    Attributes:
        blocks: how many blocks, counted once for each tier.
        digest: of these blocks, see `digest.block_digest`.
    """

    blocks: int
    digest: int


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class InvalidEvents(ValueError):
    """Bytes that are no message of events, or events that cannot be encoded."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """A message of events, column by column.

    Attributes:
        operations, tiers, parents, bounds: one for each event; the blocks of event i are
            `[bounds[i], bounds[i + 1])` of the engine hashes. A parent is None for none.
        engine_hashes: of all events.
        blocks: the block hashes of the stored events, 8 little-endian bytes each.
    """

    dp_rank: int
    event_epoch: int
    first_id: int
    operations: list[int]
    tiers: list[int]
    parents: Sequence[int | None]
    bounds: list[int]
    engine_hashes: list[int]
    blocks: bytes

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def closing_digest(self) -> CacheDigest | None:
        """The digest that the message ends with; None when it ends with something else."""
        if not self.operations or self.operations[-1] != Operation.DIGEST:
            return None
        return CacheDigest(*self.engine_hashes[self.bounds[-2] :])


def encode_events(
    events: Sequence[KvEvent | CacheDigest], *, event_epoch: int, first_id: int, dp_rank: int = 0
) -> bytes:
    """The events of one rank as a message.

    Args:
        event_epoch: grows whenever the cache or its numbering begins anew; below `EPOCH_LIMIT`.
        first_id: the id of the first event; the others follow.

    Raises:
        InvalidEvents: a number does not fit, or a stored event has not one block hash for
            each engine hash.
    """
    codes = bytearray()
    counts: list[int] = []
    parents: list[int] = []
    engine: list[Hashes] = []
    blocks: list[Hashes] = []
    for event in events:
        if isinstance(event, BlockStored):
            if len(event.engine_hashes) != len(event.block_hashes):
                raise InvalidEvents(
                    f"{len(event.engine_hashes)} engine hashes for {len(event.block_hashes)} "
                    "block hashes: each block needs both"
                )
            has_parent = event.parent_hash is not None
            codes.append(Operation.STORED | has_parent << 2 | event.tier << 3)
            if event.parent_hash is not None:
                parents.append(event.parent_hash)
            blocks.append(event.block_hashes)
            engine.append(event.engine_hashes)
        elif isinstance(event, BlockRemoved):
            codes.append(Operation.REMOVED | event.tier << 3)
            engine.append(event.engine_hashes)
        elif isinstance(event, CacheDigest):
            codes.append(Operation.DIGEST)
            engine.append((event.blocks, event.digest))
        else:
            codes.append(Operation.CLEARED)
            engine.append(())
        counts.append(len(engine[-1]))
    try:
        return _join(codes, counts, parents, engine, blocks, event_epoch, first_id, dp_rank)
    except (struct.error, OverflowError, TypeError) as error:
        raise InvalidEvents(
            f"a hash or number is not an unsigned integer of its size: {error}"
        ) from None


def _join(
    codes: bytearray,
    counts: list[int],
    parents: list[int],
    engine: list[Hashes],
    blocks: list[Hashes],
    event_epoch: int,
    first_id: int,
    dp_rank: int,
) -> bytes:
    stored = sum(map(len, blocks))
    events = len(codes)
    _check_numbers(event_epoch, first_id, events)
    head = HEADER.pack(
        VERSION, 0, dp_rank, events, event_epoch, first_id, len(parents), sum(counts), stored, 0
    )
    codes += bytes(-events % 4)
    return b"".join(
        (
            head,
            codes,
            struct.pack(f"<{events}I", *counts),
            bytes(-(len(codes) + 4 * events) % 8),
            struct.pack(f"<{len(parents)}Q", *parents),
            *map(_hash_bytes, engine),
            *map(_hash_bytes, blocks),
        )
    )


def _check_numbers(event_epoch: int, first_id: int, events: int) -> None:
    if event_epoch >= EPOCH_LIMIT or first_id + events >= ID_LIMIT:
        raise InvalidEvents(
            f"epoch {event_epoch}, {events} events from id {first_id} on: an epoch is below 2^63, "
            "and the id behind the last event below 2^64"
        )


def _hash_bytes(hashes: Hashes) -> bytes:
    if isinstance(hashes, array) and hashes.typecode == "Q":
        return hashes.tobytes()
    if isinstance(hashes, np.ndarray):
        if hashes.dtype.kind != "u":
            raise TypeError(f"an array of {hashes.dtype}, not of uint64")
        return hashes.astype("<u8", copy=False).tobytes()
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def decode_events(message: bytes) -> EventBatch:
    """The events of a message.

    Raises:
        InvalidEvents: it is not one. Nothing of it is used then.
    """
    size = len(message)
    if size < HEADER.size or message[0] != VERSION:
        raise InvalidEvents("not a message of KV events of version 1")
    _, _, rank, events, epoch, first, parent_count, engine_count, stored, _ = HEADER.unpack_from(
        message
    )
    _check_numbers(epoch, first, events)
    counts_at = HEADER.size + events + -events % 4
    parents_at = counts_at + 4 * events
    parents_at += -parents_at % 8
    engine_at = parents_at + 8 * parent_count
    blocks_at = engine_at + 8 * engine_count
    if blocks_at + 8 * stored != size:
        raise InvalidEvents(f"{size} bytes, but its counts say {blocks_at + 8 * stored}")
    view = memoryview(message)
    codes = message[HEADER.size : HEADER.size + events]
    counts = view[counts_at : counts_at + 4 * events].cast("I").tolist()
    bounds = [0, *accumulate(counts)]
    found_parents = view[parents_at:engine_at].cast("Q").tolist()
    operations = list(codes.translate(_OPERATIONS))
    tiers = list(codes.translate(_TIERS))
    if max(tiers, default=0) > Tier.EXTERNAL:
        raise InvalidEvents("a tier that version 1 does not have")
    if Operation.DIGEST in operations and any(
        operation == Operation.DIGEST and count != _DIGEST_NUMBERS
        for operation, count in zip(operations, counts, strict=True)
    ):
        raise InvalidEvents("a digest that is not two numbers")
    if bounds[-1] != engine_count or codes.translate(_HAS_PARENT).count(1) != parent_count:
        raise InvalidEvents("the counts of its events do not add up")
    stored_count = engine_count
    # Most messages hold stored blocks only.
    if operations.count(Operation.STORED) != events:
        stored_count = sum(
            count
            for count, operation in zip(counts, operations, strict=True)
            if operation == Operation.STORED
        )
    if stored != stored_count:
        raise InvalidEvents("the counts of its events do not add up")
    parents: Sequence[int | None]
    if parent_count == events:
        parents = found_parents
    else:
        following = iter(found_parents)
        parents = [next(following) if code & 4 else None for code in codes]
    return EventBatch(
        rank,
        epoch,
        first,
        operations,
        tiers,
        parents,
        bounds,
        view[engine_at:blocks_at].cast("Q").tolist(),
        message[blocks_at:],
    )


_DIGEST_NUMBERS: Final = 2
_OPERATIONS: Final = bytes(code & 3 for code in range(256))
_HAS_PARENT: Final = bytes(code >> 2 & 1 for code in range(256))
_TIERS: Final = bytes(code >> 3 for code in range(256))
