"""KV-cache-aware routing: block hashes, KV-cache events, the radix index, and the router.

Other packages take what they need from here: what engines, routers and cost functions are written
with, and what the front end and the replay are built on.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import events
    from .engine_events import EngineBridge
    from .engine_events.of_actor import EngineEvents
    from .engine_events.zmq_subscriber import ZmqSource, follow_engine
    from .events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, Tier, encode_events
    from .hashing import block_hashes, sequence_hashes, token_bytes
    from .permissions import event_grants, routing_grants
    from .radix import Overlap, RadixIndex, Rank
    from .routing import (
        COST_FUNCTIONS,
        DP_RANK_KEY,
        REQUIRED_KEY,
        Candidate,
        CostFunction,
        Decision,
        DecisionQuery,
        DynamoCost,
        InstanceProfile,
        KvCost,
        KvRouter,
        KvScheduler,
        Outcome,
        Policy,
        PolicyChoice,
        PolicyReport,
        RankLoad,
        Reason,
        RequestFields,
        RequestShape,
        RouterActor,
        RouterActorOptions,
        RouterConfig,
        RouterSettings,
        SchedulingRequest,
        fairness,
        open_router,
        profiles,
        requests,
        token_rule,
        touched,
    )
    from .stream import (
        AwarenessLevel,
        CacheAwareness,
        CacheMirror,
        Election,
        EventStream,
        FollowerStatus,
        Group,
        IndexFollower,
        KvEventPublisher,
        Position,
        PublisherStatus,
        SnapshotPlan,
        SnapshotStore,
        kv_streams,
        warm_follower,
    )

__all__ = [
    "COST_FUNCTIONS",
    "DP_RANK_KEY",
    "REQUIRED_KEY",
    "AllBlocksCleared",
    "AwarenessLevel",
    "BlockRemoved",
    "BlockStored",
    "CacheAwareness",
    "CacheMirror",
    "Candidate",
    "CostFunction",
    "Decision",
    "DecisionQuery",
    "DynamoCost",
    "Election",
    "EngineBridge",
    "EngineEvents",
    "EventStream",
    "FollowerStatus",
    "Group",
    "IndexFollower",
    "InstanceProfile",
    "KvCost",
    "KvEvent",
    "KvEventPublisher",
    "KvRouter",
    "KvScheduler",
    "Outcome",
    "Overlap",
    "Policy",
    "PolicyChoice",
    "PolicyReport",
    "Position",
    "PublisherStatus",
    "RadixIndex",
    "Rank",
    "RankLoad",
    "Reason",
    "RequestFields",
    "RequestShape",
    "RouterActor",
    "RouterActorOptions",
    "RouterConfig",
    "RouterSettings",
    "SchedulingRequest",
    "SnapshotPlan",
    "SnapshotStore",
    "Tier",
    "ZmqSource",
    "block_hashes",
    "encode_events",
    "events",
    "follow_engine",
    "event_grants",
    "fairness",
    "kv_streams",
    "open_router",
    "profiles",
    "requests",
    "routing_grants",
    "sequence_hashes",
    "token_bytes",
    "token_rule",
    "touched",
    "warm_follower",
]

if not TYPE_CHECKING:
    # Hashing and encoding need neither the router nor actors, which take a second of CPU.
    from dynbus.spi import how_to_install, lazy_exports

    try:
        import xxhash as _  # noqa: F401 - it comes with the extra, and takes no time
    except ImportError as error:
        raise ImportError(
            f"KV-aware routing takes an extra: {how_to_install('kv')} ({error})"
        ) from error

    __getattr__, __dir__ = lazy_exports(
        __name__,
        "events",
        "hashing",
        "radix",
        "stream",
        "routing",
        "permissions",
        "engine_events",
        "engine_events.of_actor",
        "engine_events.zmq_subscriber",
    )
