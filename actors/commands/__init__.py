"""Commands that start or call actors: `run`, `call` and `bench`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import flags, interrupts, program, starting

__all__ = ["flags", "interrupts", "program", "starting"]
