"""The serving side of calls: one instance and what runs in it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import execution, server, services

__all__ = [
    "execution",
    "server",
    "services",
]
