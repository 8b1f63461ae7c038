"""The radix index: which instance holds which prefix."""

from .index import Applied, IndexStatistics, Overlap, RadixIndex, Rank, Verdict
from .snapshot import TornSnapshot, dump_index, load_index

__all__ = [
    "Applied",
    "IndexStatistics",
    "Overlap",
    "RadixIndex",
    "Rank",
    "TornSnapshot",
    "Verdict",
    "dump_index",
    "load_index",
]
