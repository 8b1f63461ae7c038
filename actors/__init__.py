"""Actors: classes whose handlers are served on the bus, and the clients that call them."""

from dynbus.bus.discovery import Instance
from dynbus.bus.names import EndpointName

from .actor import Actor, depends
from .clients import Call, EndpointClient, with_options
from .handlers import handler
from .instance import ActorInstance
from .json_object import JsonObject
from .options import call_options
from .routing import (
    ItemObserver,
    LeastLoaded,
    Load,
    PowerOfTwo,
    Random,
    RoundRobin,
    Route,
    RouteObserver,
    Router,
    RouteRequest,
    Routing,
)
from .runtime import Runtime
from .stream import Stream

__all__ = [
    "Actor",
    "ActorInstance",
    "Call",
    "EndpointClient",
    "EndpointName",
    "Instance",
    "ItemObserver",
    "JsonObject",
    "LeastLoaded",
    "Load",
    "PowerOfTwo",
    "Random",
    "RoundRobin",
    "Route",
    "RouteObserver",
    "RouteRequest",
    "Router",
    "Routing",
    "Runtime",
    "Stream",
    "call_options",
    "depends",
    "handler",
    "with_options",
]
