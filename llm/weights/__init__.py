"""Models' weights and their configuration, read from files. Nothing in a model's files is run."""

from .errors import BrokenModel, UnsupportedModel

__all__ = ["BrokenModel", "UnsupportedModel"]
