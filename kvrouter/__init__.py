"""KV-cache-aware routing: block hashes, KV-cache events, the radix index, and the router."""

from .awareness import AwarenessLevel, CacheAwareness
from .cost import Candidate, CostFunction, DynamoCost, RequestShape
from .decision import Decision
from .event_stream import EventStream
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
from .follower import IndexFollower, Position
from .hashing import block_hashes, sequence_hashes
from .index import Applied, Overlap, RadixIndex, Rank, Statistics, Verdict
from .opening import open_router
from .publisher import KvEventPublisher
from .request_fields import RequestFields
from .router import KvRouter
from .router_actor import Router
from .scheduling import SchedulerConfig
from .snapshot import TornSnapshot, dump_index, load_index
from .snapshot_plan import SnapshotPlan
from .warm_start import warm_follower

__all__ = [
    "AllBlocksCleared",
    "Applied",
    "AwarenessLevel",
    "BlockRemoved",
    "BlockStored",
    "CacheAwareness",
    "Candidate",
    "CostFunction",
    "Decision",
    "DynamoCost",
    "EventBatch",
    "EventStream",
    "IndexFollower",
    "InvalidEvents",
    "KvEvent",
    "KvEventPublisher",
    "KvRouter",
    "Overlap",
    "Position",
    "RadixIndex",
    "Rank",
    "RequestFields",
    "RequestShape",
    "Router",
    "SchedulerConfig",
    "SnapshotPlan",
    "Statistics",
    "Tier",
    "TornSnapshot",
    "Verdict",
    "block_hashes",
    "decode_events",
    "dump_index",
    "encode_events",
    "load_index",
    "open_router",
    "sequence_hashes",
    "warm_follower",
]
