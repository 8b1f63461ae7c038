"""How an actor is called: clients, options, routing, retries."""

from . import clients, dependencies, options, relay, routing, stream

__all__ = ["clients", "dependencies", "options", "relay", "routing", "stream"]
