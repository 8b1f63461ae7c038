"""A connection to the server of the tests' process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import RunningServer


@pytest.fixture
async def connection(nats_server: RunningServer) -> AsyncIterator[NatsConnection]:
    connection = await connect([nats_server.url])
    yield connection
    await connection.close()
