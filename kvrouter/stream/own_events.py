"""Events as they are taken over from an engine: checked, and safe from its later changes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import index
from typing import SupportsIndex

import numpy as np

from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Hashes,
    InvalidEvents,
    KvEvent,
    Tier,
)


def own_events(events: Iterable[KvEvent]) -> list[KvEvent]:
    """Events that are known to fit the wire; see `own_event`.

    Raises:
        InvalidEvents: one of them does not fit, and which; or they are no list.
    """
    try:
        given = list(events)
    except TypeError:
        raise InvalidEvents(f"{brief_repr(events)} is no list of events: give a list") from None
    taken: list[KvEvent] = []
    try:
        taken.extend(map(own_event, given))
    except InvalidEvents as error:
        at = len(taken)
        raise InvalidEvents(f"event {at}, {brief_repr(given[at])}: {error}") from None
    return taken


def own_event(event: object) -> KvEvent:
    """An event that is known to fit the wire, with copies of its hashes.

    Raises:
        InvalidEvents: it does not fit.
    """
    if isinstance(event, AllBlocksCleared):
        return event
    if not isinstance(event, BlockStored | BlockRemoved):
        raise InvalidEvents("it is no event: give BlockStored, BlockRemoved or AllBlocksCleared")
    tier = _own_tier(event.tier)
    engine_hashes = _own_hashes(event.engine_hashes)
    if isinstance(event, BlockRemoved):
        return BlockRemoved(engine_hashes, tier)
    block_hashes = _own_hashes(event.block_hashes)
    # Of the copies: what was given may change at any time.
    if len(engine_hashes) != len(block_hashes):
        raise InvalidEvents(
            f"{len(engine_hashes)} engine hashes for {len(block_hashes)} "
            "block hashes: each block needs both"
        )
    return BlockStored(_own_parent(event.parent_hash), engine_hashes, block_hashes, tier)


def _own_tier(tier: object) -> Tier:
    if isinstance(tier, int):
        try:
            return Tier(tier)
        except ValueError:
            pass
    raise InvalidEvents(f"{brief_repr(tier)} is no tier: give a Tier")


def _own_parent(parent: object) -> int | None:
    if parent is None:
        return None
    number = index(parent) if isinstance(parent, SupportsIndex) else -1
    if not 0 <= number < 1 << 64:
        raise InvalidEvents(f"the parent {brief_repr(parent)} is not an unsigned 64-bit number")
    return number


def _own_hashes(hashes: Hashes) -> Hashes:
    if isinstance(hashes, np.ndarray):
        if hashes.dtype.kind != "u" or hashes.ndim != 1:
            raise InvalidEvents(
                f"hashes of {hashes.dtype} with {hashes.ndim} dimensions: give uint64 with one"
            )
        return hashes.astype(np.uint64)
    if isinstance(hashes, bytes | bytearray | str):
        # An array would take them for something else, or for a hash of eight bytes each.
        raise InvalidEvents(f"{type(hashes).__name__} for hashes: give a list or array of numbers")
    try:
        return array("Q", hashes)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidEvents(f"a hash is not an unsigned 64-bit number: {error}") from None
