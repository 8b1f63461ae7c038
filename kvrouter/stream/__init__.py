"""KV-cache events on their way: publisher, stream, follower, snapshots, history."""

from . import history
from .awareness import AwarenessLevel, CacheAwareness
from .event_stream import EventStream
from .follower import FollowerStatus, IndexFollower, Position
from .publisher import KvEventPublisher, PublisherStatus
from .snapshot_writer import SnapshotPlan, SnapshotWriter
from .snapshots import SnapshotStore
from .warm_start import warm_follower

__all__ = [
    "AwarenessLevel",
    "CacheAwareness",
    "EventStream",
    "FollowerStatus",
    "IndexFollower",
    "KvEventPublisher",
    "Position",
    "PublisherStatus",
    "SnapshotPlan",
    "SnapshotStore",
    "SnapshotWriter",
    "history",
    "warm_follower",
]
