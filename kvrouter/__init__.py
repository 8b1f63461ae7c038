"""KV-cache-aware routing: block hashes, KV-cache events, the radix index, and the router.

What engines, routers and cost functions are written with is here. The rest is in the packages:
`dynbus.kvrouter.routing` (the scheduler and what it is given), `.radix` (the index and its
snapshots), `.stream` (followers, warm starts, history), `.engines` (vLLM and SGLang), and `.events`
(how events are encoded).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import events, hashing
    from .events import AllBlocksCleared, BlockRemoved, BlockStored
    from .hashing import block_hashes, sequence_hashes
    from .radix import RadixIndex
    from .routing import (
        Candidate,
        CostFunction,
        Decision,
        DecisionQuery,
        DynamoCost,
        KvCost,
        KvRouter,
        PolicyChoice,
        RequestFields,
        RequestShape,
        RouterActor,
        RouterConfig,
        open_router,
    )
    from .stream import AwarenessLevel, KvEventPublisher

__all__ = [
    "AllBlocksCleared",
    "AwarenessLevel",
    "BlockRemoved",
    "BlockStored",
    "Candidate",
    "CostFunction",
    "Decision",
    "DecisionQuery",
    "DynamoCost",
    "KvCost",
    "KvEventPublisher",
    "KvRouter",
    "PolicyChoice",
    "RadixIndex",
    "RequestFields",
    "RequestShape",
    "RouterActor",
    "RouterConfig",
    "block_hashes",
    "events",
    "hashing",
    "open_router",
    "sequence_hashes",
]

if not TYPE_CHECKING:
    # Whoever hashes or encodes needs neither the router nor actors, which take a second of CPU.
    from dynbus.bus.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, "events", "hashing", "radix", "stream", "routing")
