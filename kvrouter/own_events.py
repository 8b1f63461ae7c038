"""Events as they are taken over from an engine: checked, and safe from its later changes."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from .events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hashes,
    InvalidEvents,
    KvEvent,
    Tier,
)

_TIERS: Final = frozenset(Tier)


def own_event(event: KvEvent) -> KvEvent:
    """An event that is known to fit the wire. Arrays in it are copied, lists are not.

    Raises:
        InvalidEvents: it does not fit.
    """
    if isinstance(event, AllBlocksCleared):
        return event
    if event.tier not in _TIERS:
        raise InvalidEvents(f"{event.tier!r} is no tier")
    engine_hashes = _own(event.engine_hashes)
    if isinstance(event, BlockRemoved):
        return event if engine_hashes is None else BlockRemoved(engine_hashes, event.tier)
    parent = event.parent_hash
    if parent is not None and not 0 <= parent < 1 << 64:
        raise InvalidEvents(f"the parent {parent} is not an unsigned 64-bit number")
    if len(event.engine_hashes) != len(event.block_hashes):
        raise InvalidEvents(
            f"{len(event.engine_hashes)} engine hashes for {len(event.block_hashes)} "
            "block hashes: each block needs both"
        )
    block_hashes = _own(event.block_hashes)
    if engine_hashes is None and block_hashes is None:
        return event
    return BlockStored(
        parent,
        event.engine_hashes if engine_hashes is None else engine_hashes,
        event.block_hashes if block_hashes is None else block_hashes,
        event.tier,
    )


def _own(hashes: Hashes) -> Hashes | None:
    """A copy of an array of hashes; None for a list, which needs none."""
    if isinstance(hashes, np.ndarray):
        if hashes.dtype.kind != "u" or hashes.ndim != 1:
            raise InvalidEvents(
                f"hashes of {hashes.dtype} with {hashes.ndim} dimensions: give uint64 with one"
            )
        return hashes.astype(np.uint64)
    try:
        copied = array("Q", hashes)
    except (OverflowError, TypeError) as error:
        raise InvalidEvents(f"a hash is not an unsigned 64-bit number: {error}") from None
    return None if isinstance(hashes, list | tuple) else copied
