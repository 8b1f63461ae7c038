"""The bus: connections, calls at both ends, what JetStream keeps, telemetry.

`__all__` names the modules and packages that other folders may take; a package does the same for
its modules. None is imported before it is asked for: commands start fast.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        background,
        blocked_loop,
        bus,
        calling,
        clock,
        commands,
        config,
        context,
        drops,
        errors,
        exit_codes,
        lane,
        memory,
        nats,
        protocol,
        records,
        serving,
        telemetry,
        transport,
    )

__all__ = [
    "background",
    "blocked_loop",
    "bus",
    "calling",
    "clock",
    "commands",
    "config",
    "context",
    "drops",
    "errors",
    "exit_codes",
    "lane",
    "memory",
    "nats",
    "protocol",
    "records",
    "serving",
    "telemetry",
    "transport",
]
