"""Language models on the bus: their cards, text, engines, and the replay of their traffic.

A worker is written with what is here. The rest is in the packages: `dynbus.llm.models` (where
models come from, and which are served), `.text` (tokenizers and chat templates), `.engine` (what
engines have in common), `.mock` and `.replay`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .models.card import ModelInput, ModelType
    from .models.register import register_llm

__all__ = ["ModelInput", "ModelType", "register_llm"]

if not TYPE_CHECKING:
    # Whoever runs an engine, or a command, needs no tokenizers.
    from dynbus.bus.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(__name__, "models.card", "models.register")
