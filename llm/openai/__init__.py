"""OpenAI's interface as data: requests, answers and errors, without HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import answers, errors, merging, requests

__all__ = ["answers", "errors", "merging", "requests"]
