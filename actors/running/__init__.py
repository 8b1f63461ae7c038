"""`dynbus run`: configuration, processes, and what happens when they end."""

from . import loader

__all__ = ["loader"]
