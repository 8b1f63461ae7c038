"""The operator of a server with permissions: whoever makes its streams, and nobody else does."""

from __future__ import annotations

from collections.abc import Sequence

from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.commands.setting_up import Status, needed_in, set_up

OPERATOR = '{ user: "maker", password: "secret" }'
"""Among the users of a server's configuration."""


async def make_streams(server: RunningServer, namespace: str, queues: Sequence[str] = ()) -> None:
    """What `dynbus setup` does there."""
    connection = await connect([f"nats://maker:secret@127.0.0.1:{server.port}"])
    try:
        outcomes = await set_up(connection.jetstream, needed_in(namespace, queues))
    finally:
        await connection.close()
    assert {outcome.status for outcome in outcomes} == {Status.MADE}
