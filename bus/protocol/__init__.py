"""The protocol of the bus: subjects, headers, frames, and the state of both ends of a stream.

`StreamWriter` decides sequence, credit and what is sent again, `StreamReader` order and gaps,
`RemoteLiveness` who is dead, and `Unheard` whether it is the server between that is.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import (
        cancellation,
        endpoint,
        headers,
        names,
        random_ids,
        reply_port,
        seconds,
        server_clock,
        wire,
    )

__all__ = [
    "cancellation",
    "endpoint",
    "headers",
    "names",
    "random_ids",
    "reply_port",
    "seconds",
    "server_clock",
    "wire",
]
