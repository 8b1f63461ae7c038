"""The server that a command talks to: one connection, and questions to many."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import anyio

from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import ReplySubjects
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.telemetry.logs import redact_url
from dynbus.bus.transport import Message

if TYPE_CHECKING:
    from dynbus.bus.nats.connection import NatsConnection

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOKS: Final = 4
"""In so many parts it is waited for an answer. Time in which this process does not run ends one of
them alone: in the others it reads what came meanwhile, also from those that did not run either."""


class Server(NamedTuple):
    """A server that was reached, until the command has ended."""

    config: BusConfig
    connection: NatsConnection
    replies: ReplySubjects

    async def ask(
        self,
        subjects: Iterable[str],
        question: bytes,
        read: Callable[[Message], T | None],
        *,
        seconds: float,
        quiet: float,
    ) -> list[T]:
        """Ask all who hear `subjects`, and take answers until it is quiet.

        Args:
            read: what an answer says; None for what is none.
            seconds: after which the next answer is the last one.
            quiet: seconds without an answer after which nobody else is expected.

        Raises:
            PermissionDenied, Unavailable: nothing can be asked.
        """
        answers: list[T] = []
        heard = asyncio.Event()

        def collect(message: Message) -> None:
            answer = read(message)
            if answer is not None:
                answers.append(answer)
                heard.set()

        connection, inbox = self.connection, f"{self.replies.base}.{random_id()}"
        subscription = connection.subscribe(inbox, collect)
        try:
            await connection.barrier()
            for subject in subjects:
                connection.publish(subject, question, reply=inbox)
            end = monotonic() + seconds
            while await _comes(heard, quiet) and monotonic() < end:
                heard.clear()
        finally:
            subscription.unsubscribe()
        return answers

    async def request(self, subject: str, data: bytes, *, seconds: float) -> Message | None:
        """Ask one, and wait for its answer, or for the server's word that it found nobody; None
        where neither came within so many seconds.

        Raises:
            PermissionDenied, Unavailable: nothing can be asked.
        """
        answers: list[Message] = []
        heard = asyncio.Event()

        def collect(message: Message) -> None:
            answers.append(message)
            heard.set()

        inbox = f"{self.replies.base}.{random_id()}"
        subscription = self.connection.subscribe(inbox, collect)
        try:
            await self.connection.barrier()
            self.connection.publish(subject, data, reply=inbox)
            await _comes(heard, seconds)
        finally:
            subscription.unsubscribe()
        return answers[0] if answers else None


async def _comes(event: asyncio.Event, within: float) -> bool:
    """True if the event is set within so many seconds."""
    for _ in range(LOOKS):
        with anyio.move_on_after(within / LOOKS):
            return await event.wait()
    return event.is_set()


@asynccontextmanager
async def connected(config: BusConfig, name: str) -> AsyncGenerator[Server]:
    """Connect with the credentials of a configuration, and close the connection at the end.

    Args:
        name: how the connection shows in the server's lists.

    Raises:
        PermissionDenied: the server refuses the credentials.
        Unavailable: no server can be reached.
    """
    # Only those who connect need what connects, which takes long to import.
    from dynbus.bus.identity.credentials import identified
    from dynbus.bus.nats.connection import connect_as

    config = identified(config)
    replies = ReplySubjects(config.principal, random_id())
    connection = await connect_as(config, name=name, inbox=replies.server_api)
    try:
        yield Server(config, connection, replies)
    finally:
        with anyio.CancelScope(shield=True):
            await connection.close()


@asynccontextmanager
async def embedded_if_local(config: BusConfig, *, fresh: bool) -> AsyncGenerator[None]:
    """The embedded server, where the only URL is a loopback one; nothing elsewhere.

    Raises:
        ConfigError: `fresh` is asked of a server that is not embedded; see `embedded_server`.
    """
    # Only those who may start a server need what starts one.
    from dynbus.bus.nats.embedded import embedded_server

    url = config.servers[0]
    if len(config.servers) > 1 or config.demands_tls or not _is_local(url):
        if fresh:
            where = redact_url(", ".join(config.servers))
            raise ConfigError(
                f"--fresh empties the embedded server's data; {where} is not embedded"
            )
        yield
        return
    async with embedded_server(url, fresh=fresh, is_open=config.embedded_open) as server:
        logger.info("%s", redact_url(server.description))
        yield


def _is_local(url: str) -> bool:
    from dynbus.bus.nats.server_process import Address

    try:
        return not url.startswith("tls:") and Address.parse(url).is_loopback
    except ConfigError:
        return False  # a websocket, or something that the client will refuse by its name
