"""The bus: connections, calls at both ends, what JetStream keeps, telemetry.

`__all__` names the modules that other folders may take; each package below does the same for its
own. None is imported before it is asked for: commands start fast.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        background,
        blocked_loop,
        bus,
        clock,
        config,
        context,
        drops,
        errors,
        exit_codes,
        extras,
        lane,
        lazy_exports,
        transport,
    )

__all__ = [
    "background",
    "blocked_loop",
    "bus",
    "clock",
    "config",
    "context",
    "drops",
    "errors",
    "exit_codes",
    "extras",
    "lane",
    "lazy_exports",
    "transport",
]
