"""A mock engine: real scheduling, caching, KV events and time, without a model."""

from .engine import EngineConfig, MockEngine, Output, StepResult
from .timing import Timing

__all__ = ["EngineConfig", "MockEngine", "Output", "StepResult", "Timing"]
