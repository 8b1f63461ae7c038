"""How an object of an actor becomes an instance on the bus."""

from . import endpoints, instance

__all__ = ["endpoints", "instance"]
