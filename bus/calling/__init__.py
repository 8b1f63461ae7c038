"""The calling side: sends requests to instances and takes in what comes back."""

__all__ = ["caller", "pending_call"]
