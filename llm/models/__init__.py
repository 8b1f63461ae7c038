"""Models as data: where their files come from, and the cards that say what is served by whom.

`NameView` decides which component a model's name belongs to; `Names` and `Catalog` carry it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import card

__all__ = ["card"]
