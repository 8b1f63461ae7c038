"""A typed actor message bus on NATS JetStream for serving language models."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynbus.actors import (
        Actor,
        ActorInstance,
        Call,
        EndpointClient,
        EndpointName,
        Instance,
        JsonObject,
        Load,
        Relay,
        Reply,
        Route,
        RouteObserver,
        Router,
        RouteRequest,
        Runtime,
        Stream,
        call_options,
        depends,
        handler,
        push_each,
        with_options,
    )
    from dynbus.bus.config import BusConfig
    from dynbus.bus.context import Context, context
    from dynbus.bus.errors import (
        Cancelled,
        ConfigError,
        DeadlineExceeded,
        Draining,
        DynbusError,
        HandlerError,
        InvalidRequest,
        InvalidResponse,
        Migrate,
        NoInstances,
        Overloaded,
        PayloadTooLarge,
        PermissionDenied,
        ReaderStalled,
        ResumeMismatch,
        StreamLost,
        Unavailable,
        UnknownOutcome,
    )

__all__ = [
    "Actor",
    "ActorInstance",
    "BusConfig",
    "Call",
    "Cancelled",
    "ConfigError",
    "Context",
    "DeadlineExceeded",
    "Draining",
    "DynbusError",
    "EndpointClient",
    "EndpointName",
    "HandlerError",
    "Instance",
    "InvalidRequest",
    "InvalidResponse",
    "JsonObject",
    "Load",
    "Migrate",
    "NoInstances",
    "Overloaded",
    "PayloadTooLarge",
    "PermissionDenied",
    "ReaderStalled",
    "Relay",
    "Reply",
    "ResumeMismatch",
    "Route",
    "RouteObserver",
    "RouteRequest",
    "Router",
    "Runtime",
    "Stream",
    "StreamLost",
    "Unavailable",
    "UnknownOutcome",
    "call_options",
    "context",
    "depends",
    "handler",
    "push_each",
    "with_options",
]

if not TYPE_CHECKING:
    # A third of a second goes by while all of this is imported. A command must be able to take
    # a Ctrl-C before, and most of them need little of it.
    _MODULES = ("dynbus.bus.errors", "dynbus.bus.context", "dynbus.bus.config", "dynbus.actors")

    def __getattr__(name: str) -> object:
        if name in __all__:
            for module in map(import_module, _MODULES):
                if hasattr(module, name):
                    return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
