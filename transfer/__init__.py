"""Moving KV blocks between instances with NIXL.

`__all__` names the modules that other folders may take. None is imported before it is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        agent,
        checksums,
        config,
        descriptors,
        errors,
        exchange,
        layout,
        leases,
        quarantine,
        settling,
        states,
        transfers,
    )

__all__ = [
    "agent",
    "checksums",
    "config",
    "descriptors",
    "errors",
    "exchange",
    "layout",
    "leases",
    "quarantine",
    "settling",
    "states",
    "transfers",
]
