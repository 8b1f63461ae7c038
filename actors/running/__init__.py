"""`dynbus run`: configuration, processes, and what happens when they end."""

from . import config_file, loader

__all__ = ["config_file", "loader"]
