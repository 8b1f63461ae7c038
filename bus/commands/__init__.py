"""The commands that need no actor, and what all commands share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import diagnosis, needed, numbers, queue, server, survey, terminal

__all__ = [
    "diagnosis",
    "needed",
    "numbers",
    "queue",
    "server",
    "survey",
    "terminal",
]
