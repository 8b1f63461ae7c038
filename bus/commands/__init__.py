"""The commands that need no actor, and what all commands share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        diagnosis,
        listing,
        needed,
        numbers,
        ps,
        queue,
        rates,
        server,
        survey,
        terminal,
        watching,
    )

__all__ = [
    "diagnosis",
    "listing",
    "needed",
    "numbers",
    "ps",
    "queue",
    "rates",
    "server",
    "survey",
    "terminal",
    "watching",
]
