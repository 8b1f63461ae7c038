"""KV-cache-aware routing: block hashes, KV-cache events, the radix index."""

from .events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    InvalidEvents,
    KvEvent,
    Tier,
    decode_events,
    encode_events,
)
from .hashing import block_hashes, sequence_hashes
from .index import Applied, Overlap, RadixIndex, Rank, Statistics, Verdict
from .snapshot import TornSnapshot, dump_index, load_index

__all__ = [
    "AllBlocksCleared",
    "Applied",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "InvalidEvents",
    "KvEvent",
    "Overlap",
    "RadixIndex",
    "Rank",
    "Statistics",
    "Tier",
    "TornSnapshot",
    "Verdict",
    "block_hashes",
    "decode_events",
    "dump_index",
    "encode_events",
    "load_index",
    "sequence_hashes",
]
