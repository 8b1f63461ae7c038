"""What all engines have in common: the interface, and what runs one on the bus."""

from __future__ import annotations

from .interface import Engine, EngineLimits, EngineLoad, RequestTooLong, Step

__all__ = ["Engine", "EngineLimits", "EngineLoad", "RequestTooLong", "Step"]
