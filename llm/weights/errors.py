"""The errors of a model that cannot be loaded."""

from __future__ import annotations


class BrokenModel(ValueError):
    """A model's files are cut, contradict each other or are not what they say; the text has the
    path."""


class UnsupportedModel(ValueError):
    """A model is whole, but its architecture, its quantisation or an option of it is not
    supported; the text has its name and what is supported."""
