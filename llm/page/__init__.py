"""The page of the front end: a chat, the models, their instances, and where each request went."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import files, state

__all__ = ["files", "state"]
