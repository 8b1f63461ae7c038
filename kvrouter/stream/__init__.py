"""KV-cache events on their way: publisher, stream, follower, snapshots, history."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .awareness import AwarenessLevel, CacheAwareness
    from .cache_mirror import CacheMirror
    from .election import Election
    from .event_stream import EventStream
    from .follower import FollowerStatus, IndexFollower, Position
    from .membership import Group
    from .needed_streams import kv_streams
    from .publisher import KvEventPublisher, PublisherStatus
    from .snapshot_writer import SnapshotPlan, SnapshotWriter
    from .snapshots import SnapshotStore
    from .warm_start import warm_follower

__all__ = [
    "AwarenessLevel",
    "CacheAwareness",
    "CacheMirror",
    "Election",
    "EventStream",
    "FollowerStatus",
    "Group",
    "IndexFollower",
    "KvEventPublisher",
    "Position",
    "PublisherStatus",
    "SnapshotPlan",
    "SnapshotStore",
    "SnapshotWriter",
    "kv_streams",
    "warm_follower",
]

if not TYPE_CHECKING:
    # The history of caches and what is said of them need no actors.
    from dynbus.spi import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        "awareness",
        "cache_mirror",
        "election",
        "event_stream",
        "snapshots",
        "snapshot_writer",
        "follower",
        "membership",
        "publisher",
        "needed_streams",
        "warm_start",
    )
