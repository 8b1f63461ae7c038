"""The commands of a subscription, and its drain when the server is gone."""

from __future__ import annotations

from typing import cast

import pytest

from dynbus.bus.errors import Unavailable
from dynbus.bus.nats.connection import NatsConnection, NatsSubscription
from dynbus.bus.transport import ConnectionState, Message


def ignore(message: Message) -> None:
    """Nobody reads what arrives."""


class UnreachableConnection:
    """Notes what a subscription asks of its connection, whose server never answers."""

    def __init__(self, state: ConnectionState = ConnectionState.CONNECTED) -> None:
        self.state = state
        self.asked: list[str] = []

    def stop_delivery(self, number: int) -> None:
        self.asked.append(f"stop {number}")

    async def barrier(self, *, timeout: float) -> None:
        self.asked.append("barrier")
        raise Unavailable("the server did not answer a ping")

    def remove(self, number: int) -> None:
        self.asked.append(f"remove {number}")


def subscription_of(connection: UnreachableConnection, queue: str = "") -> NatsSubscription:
    return NatsSubscription(cast(NatsConnection, connection), 7, "demo.Echo.echo", queue, ignore)


def test_the_command_names_subject_queue_and_number() -> None:
    alone = subscription_of(UnreachableConnection())
    in_queue = subscription_of(UnreachableConnection(), "Echo")

    assert alone.command().split() == [b"SUB", b"demo.Echo.echo", b"7"]
    assert in_queue.command() == b"SUB demo.Echo.echo Echo 7\r\n"


@pytest.mark.anyio
async def test_a_drain_ends_the_subscription_also_when_the_server_does_not_answer() -> None:
    connection = UnreachableConnection()
    subscription = subscription_of(connection)

    await subscription.drain(timeout=0.1)

    assert subscription.ending
    assert connection.asked == ["stop 7", "barrier", "remove 7"]


@pytest.mark.anyio
async def test_a_drain_while_disconnected_waits_for_nothing() -> None:
    connection = UnreachableConnection(ConnectionState.DISCONNECTED)
    subscription = subscription_of(connection)

    await subscription.drain()

    assert subscription.ending
    assert connection.asked == ["stop 7", "remove 7"]
