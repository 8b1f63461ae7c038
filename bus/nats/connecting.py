"""Connections to nats-server as a process's configuration asks for them."""

from __future__ import annotations

from dynbus.bus.config import BusConfig

from .connection import NatsConnection, connect


async def connect_as(config: BusConfig, *, name: str, inbox: str) -> NatsConnection:
    """Open a connection to the servers of a configuration, with its credentials.

    Args:
        name, inbox: as `connect` takes them.

    Raises:
        PermissionDenied: the server refuses the credentials.
        Unavailable: no server could be reached.
    """
    return await connect(
        config.servers,
        name=name,
        inbox=inbox,
        timeout=config.connect_timeout,
        options={"user_credentials": config.credentials} if config.credentials else {},
    )
