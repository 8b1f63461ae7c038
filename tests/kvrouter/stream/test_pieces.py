"""An event that is larger than a message says the same in pieces."""

from __future__ import annotations

import pytest
from tests.kvrouter.event_bus import stored

from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    KvEvent,
    encode_events,
)
from dynbus.kvrouter.stream.event_log import FRAME_BYTES, event_bytes, pieces

LIMIT = 1024
LARGE: list[KvEvent] = [stored(*range(1, 501)), BlockRemoved(list(range(1, 1001)))]


def size(*events: KvEvent | CacheDigest) -> int:
    return len(encode_events(events, event_epoch=1, first_id=0))


@pytest.mark.parametrize("event", LARGE)
def test_each_piece_fits_and_none_is_smaller_than_it_has_to_be(event: KvEvent) -> None:
    *full, last = [size(piece) for piece in pieces(event, LIMIT)]

    assert max(*full, last) <= LIMIT
    assert min(full) > LIMIT - 60


def test_stored_blocks_go_on_behind_the_piece_before() -> None:
    found = list(pieces(stored(*range(1, 501), parent=99), LIMIT))

    assert all(isinstance(piece, BlockStored) for piece in found)
    parents = [piece.parent_hash for piece in found if isinstance(piece, BlockStored)]
    ends = [int(piece.engine_hashes[-1]) for piece in found if isinstance(piece, BlockStored)]
    assert parents == [99, *ends[:-1]]
    assert ends[-1] == 500


@pytest.mark.parametrize("event", [stored(1), BlockRemoved([1]), AllBlocksCleared()])
def test_what_fits_stays_whole(event: KvEvent) -> None:
    assert list(pieces(event, LIMIT)) == [event]


@pytest.mark.parametrize(
    "event", [*LARGE, stored(1), stored(1, parent=2), AllBlocksCleared(), CacheDigest(1, 2)]
)
def test_events_take_no_more_than_is_reckoned(event: KvEvent | CacheDigest) -> None:
    assert size(event) <= FRAME_BYTES + event_bytes(event)
    assert size(event, event) <= FRAME_BYTES + 2 * event_bytes(event)
