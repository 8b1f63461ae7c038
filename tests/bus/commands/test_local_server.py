"""A server is embedded only where this machine alone is meant."""

from __future__ import annotations

import pytest

from dynbus.bus.commands.server import embedded_if_local
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError


@pytest.mark.parametrize(
    "servers",
    [
        ("nats://192.0.2.1:4222",),
        ("nats://127.0.0.1:1", "nats://127.0.0.1:2"),
        ("tls://localhost",),
    ],
)
@pytest.mark.anyio
async def test_no_server_is_embedded_where_it_is_not_meant(servers: tuple[str, ...]) -> None:
    config = BusConfig(servers=servers)

    async with embedded_if_local(config, fresh=False):
        pass

    with pytest.raises(ConfigError, match=f"--fresh empties .*; {servers[0]}.* is not embedded"):
        async with embedded_if_local(config, fresh=True):
            pass
