"""Actors: classes whose handlers are served on the bus, and the clients that call them."""

from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.records.instance_view import Instance

from .calling.clients import Call, EndpointClient, with_options
from .calling.dependencies import depends
from .calling.options import call_options
from .calling.relay import Arrival, Relay
from .calling.routing import (
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
from .calling.stream import Stream
from .declaring.handlers import handler
from .declaring.json_object import JsonObject
from .declaring.reply import Reply, push_each
from .runtime import Actor, ActorInstance, Runtime

__all__ = [
    "Actor",
    "ActorInstance",
    "Arrival",
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
    "Relay",
    "Reply",
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
    "push_each",
    "with_options",
]
