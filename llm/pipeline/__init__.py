"""From a request for a completion to its answer: tokens, a route, an engine, and text again.

All of it runs in the process of a front end, or in actors of its own: see `Processor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import models, preparing, processor, serving, transcript

__all__ = ["models", "preparing", "processor", "serving", "transcript"]
