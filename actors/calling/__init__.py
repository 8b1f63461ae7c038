"""How an actor is called: clients, options, routing, retries."""

from . import clients, continuation, dependencies, options, relay, routing, stream

__all__ = ["clients", "continuation", "dependencies", "options", "relay", "routing", "stream"]
