"""KV-cache-aware routing: block hashes, KV-cache events, the radix index, and the router."""

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
from .radix.index import Applied, IndexStatistics, Overlap, RadixIndex, Rank, Verdict
from .radix.snapshot import TornSnapshot, dump_index, load_index
from .routing.config import RouterConfig
from .routing.cost import Candidate, CostFunction, DynamoCost, KvCost, RequestShape
from .routing.decision import Decision
from .routing.requests import RequestFields
from .routing.router import KvRouter, open_router
from .routing.router_actor import DecisionQuery, PolicyChoice, PolicyReport, RouterActor
from .stream.awareness import AwarenessLevel, CacheAwareness
from .stream.event_stream import EventStream
from .stream.follower import IndexFollower, Position
from .stream.publisher import KvEventPublisher
from .stream.snapshot_writer import SnapshotPlan
from .stream.warm_start import warm_follower

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
    "DecisionQuery",
    "DynamoCost",
    "EventBatch",
    "EventStream",
    "IndexFollower",
    "IndexStatistics",
    "InvalidEvents",
    "KvEvent",
    "KvCost",
    "KvEventPublisher",
    "KvRouter",
    "Overlap",
    "PolicyChoice",
    "PolicyReport",
    "Position",
    "RadixIndex",
    "Rank",
    "RequestFields",
    "RequestShape",
    "RouterActor",
    "RouterConfig",
    "SnapshotPlan",
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
