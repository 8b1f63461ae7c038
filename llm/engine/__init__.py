"""What all engines have in common: the interface, and what runs one on the bus."""

from __future__ import annotations

from .interface import Engine, EngineLimits, EngineLoad, RequestTooLong, Step
from .model import Chunk, Model

__all__ = ["Chunk", "Engine", "EngineLimits", "EngineLoad", "Model", "RequestTooLong", "Step"]
