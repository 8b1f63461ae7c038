"""KV-cache events of vLLM and SGLang, read from their ZeroMQ streams.

`zmq_subscriber` reads the sockets and needs the extra `dynbus[zmq]`; so does `of_actor`, and
nothing else here.
"""

from typing import TYPE_CHECKING

from dynbus.kvrouter.hashing import multimodal_hash

from .bridge import EngineBridge, KvSink, RankStream
from .messages import QuarantineReason
from .status import BridgeStatus
from .translation import BlockSizeMismatch

if TYPE_CHECKING:
    from . import of_actor, zmq_subscriber

__all__ = [
    "BlockSizeMismatch",
    "BridgeStatus",
    "EngineBridge",
    "KvSink",
    "QuarantineReason",
    "RankStream",
    "multimodal_hash",
    "of_actor",
    "zmq_subscriber",
]
