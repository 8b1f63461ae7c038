"""The radix index: which instance holds which prefix.

Its limit (`max_blocks`, an argument of followers and no option of routers) is shared fairly among
instances. It knows block hashes alone: the salt of a tenant is hashed in, so that no index can tell
whose blocks they are.
"""

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
