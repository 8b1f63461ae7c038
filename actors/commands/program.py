"""`program_runtime`: the runtime of a program that `dynbus run` does not start."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from dynbus.actors.runtime import Runtime
from dynbus.bus.bus import Bus
from dynbus.bus.commands.server import embedded_if_local
from dynbus.bus.config import BusConfig, load_config


@asynccontextmanager
async def program_runtime(name: str, config: BusConfig | None = None) -> AsyncGenerator[Runtime]:
    """A runtime, and the embedded server under it where the only URL is a loopback one.

    Args:
        name: how its connections show in the server's lists.
        config: as the environment says unless given.

    Raises:
        ConfigError: the environment is not usable, or another server is at the embedded one's port.
        PermissionDenied: the server refuses the credentials.
        Unavailable: no server can be reached, or started.
    """
    config = config or load_config(unknown_variables="warn")
    async with (
        embedded_if_local(config, fresh=False),
        await Runtime.over(await Bus.connect(config, name=name)) as runtime,
    ):
        yield runtime
