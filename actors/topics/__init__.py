"""Topics of actors: events that are published once, heard by instances and by groups of them."""

from .topic import Topic, subscribe

__all__ = ["Topic", "subscribe"]
