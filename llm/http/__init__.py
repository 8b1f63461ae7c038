"""The front end: OpenAI's interface over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import application, frontend, settings

__all__ = ["application", "frontend", "settings"]
