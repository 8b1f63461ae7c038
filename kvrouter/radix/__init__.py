"""The radix index: which instance holds which prefix."""

from .index import Applied, IndexStatistics, MessageOutcome, Overlap, RadixIndex, Rank
from .snapshot import TornSnapshot, dump_index, load_index

__all__ = [
    "Applied",
    "IndexStatistics",
    "Overlap",
    "RadixIndex",
    "Rank",
    "TornSnapshot",
    "MessageOutcome",
    "dump_index",
    "load_index",
]
