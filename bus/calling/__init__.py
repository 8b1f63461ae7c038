"""The calling side: sends requests to instances and takes in what comes back.

`CallProgress` decides in which order results count and what is granted; `PendingCall` and `Caller`
carry it out.
"""

from . import caller, pending_call

__all__ = ["caller", "pending_call"]
