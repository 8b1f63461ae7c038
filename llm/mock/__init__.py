"""A mock engine: real scheduling, caching, KV events and time, without a model."""

from .engine import MockConfig, MockEngine, Output, StepResult
from .profile import EngineProfile, OutsideProfile, read_profile
from .timing import StepTiming, Timing

__all__ = [
    "EngineProfile",
    "MockConfig",
    "MockEngine",
    "OutsideProfile",
    "Output",
    "StepResult",
    "StepTiming",
    "Timing",
    "read_profile",
]
