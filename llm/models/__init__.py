"""Models as data: where their files come from, and the cards that say what is served by whom."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import card

__all__ = ["card"]
