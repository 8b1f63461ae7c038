"""The commands that need no actor, and what all commands share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import diagnosis, numbers, server, survey, terminal

__all__ = [
    "diagnosis",
    "numbers",
    "server",
    "survey",
    "terminal",
]
