"""The commands that start, change or call actors."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import flags, interrupts, program, starting

__all__ = ["flags", "interrupts", "program", "starting"]
