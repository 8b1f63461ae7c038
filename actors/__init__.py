"""Actors: classes whose handlers are served on the bus, and the clients that call them."""

from .actor import Actor, depends
from .clients import Call, EndpointClient, JsonObject
from .handlers import handler
from .instance import ActorInstance
from .options import call_options
from .routing import (
    LeastLoaded,
    Load,
    PowerOfTwo,
    Random,
    RoundRobin,
    Router,
    RouteRequest,
    Routing,
)
from .runtime import Runtime
from .streams import Stream

__all__ = [
    "Actor",
    "ActorInstance",
    "Call",
    "EndpointClient",
    "JsonObject",
    "LeastLoaded",
    "Load",
    "PowerOfTwo",
    "Random",
    "RoundRobin",
    "RouteRequest",
    "Router",
    "Routing",
    "Runtime",
    "Stream",
    "call_options",
    "depends",
    "handler",
]
