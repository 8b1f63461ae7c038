"""The calling side of the bus: requests sent to instances, and what comes back of each.

`CallProgress` decides in which order results count and what is granted; `PendingCall` and `Caller`
carry it out.
"""

from . import caller, pending_call

__all__ = ["caller", "pending_call"]
