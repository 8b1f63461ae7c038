"""The calling side: sends requests to instances and takes in what comes back."""

from . import caller, pending_call

__all__ = ["caller", "pending_call"]
