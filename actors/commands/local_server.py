"""Which server a command uses: the embedded one where only this machine is meant."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.embedded import embedded_server
from dynbus.bus.nats.server_process import Address
from dynbus.bus.telemetry.logs import redact_url

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def embedded_if_local(config: BusConfig, *, fresh: bool) -> AsyncGenerator[None, None]:
    """The embedded server, where the only URL is a loopback one; nothing elsewhere.

    Raises:
        ConfigError: `fresh` is asked of a server that is not embedded; see `embedded_server`.
    """
    url = config.servers[0]
    if len(config.servers) > 1 or not _is_local(url):
        if fresh:
            where = redact_url(", ".join(config.servers))
            raise ConfigError(
                f"--fresh empties the embedded server's data; {where} is not embedded"
            )
        yield
        return
    async with embedded_server(url, fresh=fresh) as server:
        logger.info("%s", redact_url(server.description))
        yield


def _is_local(url: str) -> bool:
    try:
        return not url.startswith("tls:") and Address.parse(url).is_loopback
    except ConfigError:
        return False  # a websocket, or something that the client will refuse by its name
