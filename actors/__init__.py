"""Actors: classes whose handlers are served on the bus, and the clients that call them.

What programs are written with is in `dynbus`. This lists what it has not, what
other folders are built on.
"""

from . import runtime, testing
from .calling.relay import Arrival
from .calling.routing import ItemObserver, LeastLoaded, PowerOfTwo, Random, RoundRobin, Routing
from .runtime import Actor, Runtime

__all__ = [
    "Actor",
    "Arrival",
    "ItemObserver",
    "LeastLoaded",
    "PowerOfTwo",
    "Random",
    "RoundRobin",
    "Routing",
    "Runtime",
    "runtime",
    "testing",
]
