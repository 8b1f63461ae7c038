"""A server whose users are in files, and how to be one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tests.conditions import eventually

from dynbus import Runtime
from dynbus.actors.runtime import Connecting
from dynbus.bus.identity.accounts import Accounts, Limits
from dynbus.bus.identity.credentials import credential_options
from dynbus.bus.identity.registry import Registry
from dynbus.bus.identity.users import Users
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import RunningServer


def _of_one_account(folder: Path) -> Users:
    accounts = Accounts.make(folder)
    accounts.put("main", Limits())
    return accounts.users("main")


KINDS: Final[Mapping[str, Callable[[Path], Users]]] = {
    "keys": Registry.make,
    "tokens": _of_one_account,
}
"""No users yet, in a folder, by the kind of their credentials."""


class Guarded:
    """A server with users, of the one account that it has or of one of several."""

    def __init__(self, server: RunningServer, registry: Users, operator: NatsConnection) -> None:
        self.server = server
        self.registry = registry
        self.operator = operator

    def connect(self, user: str) -> Connecting:
        path = self.registry.credential_file(user)
        return Runtime.connect(self.server.url, credentials=str(path), drain_grace=1.0)

    async def reload(self) -> None:
        """Have the server read its users again."""
        self.registry.save()
        await reload(self.server)

    @property
    def refusals(self) -> list[str]:
        lines = self.server.log.read_text().splitlines()
        return [line for line in lines if "iolation" in line]


async def reload(server: RunningServer) -> None:
    """Have a server read its configuration again."""

    def reloads() -> int:
        return server.log.read_text().count("Reloaded server configuration")

    before = reloads()
    os.kill(server.pid, signal.SIGHUP)
    await eventually(lambda: reloads() > before, what="the server has read its users")


async def connect_plainly(server: RunningServer, users: Users, user: str) -> NatsConnection:
    """A connection with the credential of a user, without a process on the bus."""
    options = credential_options(str(users.credential_file(user)))
    return await connect([server.url], inbox=f"_R.{user}.plainly", options=options)
