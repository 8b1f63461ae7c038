"""Language models on the bus: their engines, and the front end that people and programs ask.

A worker is written with what is here. The rest is in the packages: `dynbus.llm.models` (where
models come from, and which are served), `.weights` and `.text` (their files, tokenizers and chat
templates), `.engine` (what engines have in common), `.small` and `.mock` (two of them), `.openai`,
`.pipeline`, `.http` and `.page` (the front end), and `.replay`.
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
