"""The bus over nats-server: connection, JetStream, and the embedded server.

`ServerChoice` decides which server a process is at; `NatsConnection` carries it out.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import embedded, server_process

__all__ = [
    "embedded",
    "server_process",
]
