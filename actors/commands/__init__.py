"""Commands that start or call actors: `run`, `call` and `bench`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import interrupts

__all__ = ["interrupts"]
