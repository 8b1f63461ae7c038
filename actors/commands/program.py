"""`program_runtime`: the runtime of a program that `dynbus run` does not start."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from dynbus.actors.runtime import Runtime
from dynbus.bus.bus import Bus
from dynbus.bus.commands.server import embedded_if_local
from dynbus.bus.config import BusConfig, load_config

from .interrupts import Interrupts

STOP_SECONDS: Final = 5.0
"""The watchdog of the second signal allows for what is shielded."""


@asynccontextmanager
async def program_runtime(
    name: str,
    config: BusConfig | None = None,
    *,
    drain: Callable[[], None],
    stop: Callable[[], None],
) -> AsyncGenerator[Runtime]:
    """A runtime, and the embedded server under it where the only URL is a loopback one.

    On the main thread SIGINT and SIGTERM are taken: see `Interrupts`.

    Args:
        name: how its connections show in the server's lists.
        config: as the environment says unless given.
        drain: called at the first signal.
        stop: called at the second; the process ends within some seconds then.

    Raises:
        ConfigError: the environment is not usable, or another server is at the embedded one's port.
        PermissionDenied: the server refuses the credentials.
        Unavailable: no server can be reached, or started.
    """
    config = config or load_config(unknown_variables="warn")
    on_main = threading.current_thread() is threading.main_thread()
    signals = Interrupts(drain, stop, within=STOP_SECONDS) if on_main else nullcontext()
    with signals:
        async with _runtime(name, config) as runtime:
            yield runtime


@asynccontextmanager
async def _runtime(name: str, config: BusConfig) -> AsyncGenerator[Runtime]:
    async with (
        embedded_if_local(config, fresh=False),
        await Runtime.over(await Bus.connect(config, name=name)) as runtime,
    ):
        yield runtime
