"""Models' weights and their configuration, read from files. Nothing in a model's files is run."""

from __future__ import annotations

from . import config, gguf, model, safetensors
from .errors import BrokenModel, UnsupportedModel

__all__ = ["BrokenModel", "UnsupportedModel", "config", "gguf", "model", "safetensors"]
