"""The share of each instance of a run in its machine: GPUs, cores, memory."""

from . import cores

__all__ = ["cores"]
