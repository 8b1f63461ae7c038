"""KV-cache events of vLLM and SGLang, read from their ZeroMQ streams.

`zmq_subscriber` reads the sockets and needs the extra `dynbus[zmq]`; nothing else here does.
"""

from .bridge import EngineBridge, KvSink, RankStream
from .extra_keys import multimodal_hash
from .messages import QuarantineReason
from .status import BridgeStatus
from .translation import BlockSizeMismatch

__all__ = [
    "BlockSizeMismatch",
    "BridgeStatus",
    "EngineBridge",
    "KvSink",
    "QuarantineReason",
    "RankStream",
    "multimodal_hash",
]
