"""The common parts of engines: the interface, batching, sampling, and the actor that serves one.

An engine of one's own is an `Engine`, or a `PagedModel` in a `ModelEngine`; an `EngineWorker` puts
it on the bus.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .interface import (
        Engine,
        EngineLimits,
        EngineLoad,
        LoadMetrics,
        RequestTooLong,
        Step,
        StepFailed,
    )
    from .model import Chunk, PagedModel
    from .model_engine import ModelEngine
    from .runner import EngineRunner, EventSink
    from .worker import EngineWorker

__all__ = [
    "Chunk",
    "Engine",
    "EngineLimits",
    "EngineLoad",
    "EngineRunner",
    "EngineWorker",
    "EventSink",
    "LoadMetrics",
    "ModelEngine",
    "PagedModel",
    "RequestTooLong",
    "Step",
    "StepFailed",
]

if not TYPE_CHECKING:
    # The author of a model needs nothing of the bus.
    from dynbus.spi import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__, "interface", "model", "model_engine", "runner", "worker"
    )
