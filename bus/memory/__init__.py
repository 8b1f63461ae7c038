"""The bus in memory, for tests: the same contract, no server."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import bus

__all__ = [
    "bus",
]
