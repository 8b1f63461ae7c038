"""A small engine for real models: the Llama family on numpy or PyTorch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import SmallConfig, SmallEngine

__all__ = ["SmallConfig", "SmallEngine"]

if not TYPE_CHECKING:
    from dynbus.spi import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, "engine")
