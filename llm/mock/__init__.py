"""A mock engine: real scheduling, caching, KV events and time, without a model."""

from .engine import EngineConfig, EngineRequest, MockEngine, Output, RequestTooLong, StepResult
from .timing import Timing

__all__ = [
    "EngineConfig",
    "EngineRequest",
    "MockEngine",
    "Output",
    "RequestTooLong",
    "StepResult",
    "Timing",
]
