"""The serving side of calls: one instance and what runs in it.

`Ledger` decides what an instance owes its clients and what follows from what they say, `Admission`
and `Durations` who runs, waits or is refused; `InstanceServer`, `ServerControl` and `Execution`
carry it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import execution, requests, server, services

__all__ = [
    "execution",
    "requests",
    "server",
    "services",
]
