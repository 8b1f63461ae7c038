"""A mock engine: real scheduling, caching, KV events and time, without a model."""

from .engine import MockConfig, MockEngine, Output, StepResult
from .timing import Timing

__all__ = ["MockConfig", "MockEngine", "Output", "StepResult", "Timing"]
