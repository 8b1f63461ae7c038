"""A process's presence on the bus: what bounces, what is counted, and how it is left."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.drops import DropReason
from dynbus.bus.errors import Unavailable
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.nats.server_process import RunningServer, free_port
from dynbus.bus.protocol import headers
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.bus.transport import ConnectionState
from dynbus.testing import run

from .far_side import settle


async def bus_on(server: MemoryBus, **settings: str) -> Bus:
    config = BusConfig(**settings)  # type: ignore[arg-type]
    return await Bus.over(config, await server.connect(), await server.connect())


def test_each_presence_has_reply_subjects_and_an_incarnation_of_its_own() -> None:
    async def story() -> None:
        server = MemoryBus()
        first, second = await bus_on(server, principal="ann"), await bus_on(server)

        assert first.replies.base.startswith("_R.ann.")
        assert first.replies.base != second.replies.base
        assert first.incarnation != second.incarnation
        await first.close()
        await second.close()

    run(story())


def test_a_message_that_finds_nobody_calls_the_handler_of_its_bounce_subject() -> None:
    async def story() -> list[str]:
        server = MemoryBus()
        bus = await bus_on(server)
        bounced: list[str] = []
        bus.bounce_handlers["mine"] = lambda: bounced.append("mine")
        bus.bounce_handlers["other"] = lambda: bounced.append("other")

        bus.data.publish("nobody.hears", b"", reply=bus.replies.bounce("mine"))
        await settle(server.connections[0])

        await bus.close()
        return bounced

    assert run(story()) == ["mine"]


def test_an_answer_at_a_bounce_subject_is_no_bounce_and_is_counted() -> None:
    async def story() -> tuple[list[str], dict[DropReason, int]]:
        server = MemoryBus()
        bus = await bus_on(server)
        bounced: list[str] = []
        bus.bounce_handlers["mine"] = lambda: bounced.append("mine")
        stranger = await server.connect()

        stranger.publish(bus.replies.bounce("mine"), b"I am here")
        stranger.publish(
            bus.replies.bounce("mine"), b"", headers=headers.encode({"Status": "fine"})
        )
        await settle(stranger)

        await bus.close()
        return bounced, dict(bus.drops)

    assert run(story()) == ([], {DropReason.UNEXPECTED: 2})


def test_what_its_connections_drop_is_counted() -> None:
    async def story() -> dict[DropReason, int]:
        server = MemoryBus()
        bus = await bus_on(server)
        subscription = bus.data.subscribe("left", lambda _: subscription.unsubscribe())
        stranger = await server.connect()

        for _ in range(3):
            stranger.publish("left", b"")
        await settle(stranger)
        server.stop()
        for connection in (bus.data, bus.lane.connection):
            connection.publish("nobody.hears", b"")
        await asyncio.sleep(0)

        counted = dict(bus.drops)
        server.start()
        await bus.close()
        return counted

    assert run(story()) == {DropReason.UNSUBSCRIBED: 2, DropReason.DISCONNECTED: 2}


def test_closing_closes_both_connections() -> None:
    async def story() -> list[ConnectionState]:
        bus = await bus_on(MemoryBus())
        connections = [bus.data, bus.lane.connection]

        await bus.close()

        return [connection.state for connection in connections]

    assert run(story()) == [ConnectionState.CLOSED] * 2


def test_its_connections_are_measured_until_it_is_closed() -> None:
    reader = InMemoryMetricReader()

    def measured() -> dict[str, set[tuple[Any, ...]]]:
        data = reader.get_metrics_data()
        return {
            metric.name: {
                (*sorted(map(str, (point.attributes or {}).values())), point.value)  # type: ignore[union-attr]
                for point in metric.data.data_points
            }
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    async def story() -> None:
        server = MemoryBus()
        bus = await Bus.over(
            BusConfig(),
            await server.connect(),
            await server.connect(),
            Telemetry(None, MeterProvider([reader], shutdown_on_exit=False)),
        )
        server.connections[1].disconnect()

        assert measured() == {
            "dynbus.connections": {
                ("connected", "data", server.name, 1),
                ("control", "disconnected", server.name, 1),
            },
            "dynbus.connection.unsent": {("data", server.name, 0), ("control", server.name, 0)},
        }
        await bus.close()
        assert measured() == {}

    run(story())


@pytest.mark.anyio
async def test_over_nats_both_connections_are_open_and_named(nats_server: RunningServer) -> None:
    bus = await Bus.connect(BusConfig(servers=(nats_server.url,)), name="presence")
    threads = [thread.name for thread in threading.enumerate()]

    states = bus.data.state, bus.lane.connection.state
    text = repr(bus)
    await bus.close()

    assert states == (ConnectionState.CONNECTED, ConnectionState.CONNECTED)
    assert text == f"<Bus {bus.replies.client_id[:8]} [connected]>"
    assert "presence-control" in threads
    assert "presence-control" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.anyio
async def test_a_server_that_is_not_there_leaves_no_thread_behind() -> None:
    url = f"nats://127.0.0.1:{free_port()}"

    with pytest.raises(Unavailable, match=url.removeprefix("nats://")):
        await Bus.connect(BusConfig(servers=(url,)), name="absent")

    assert "absent-control" not in [thread.name for thread in threading.enumerate()]


def test_what_comes_for_the_main_loop_when_it_is_closed_is_left_out() -> None:
    ran: list[str] = []

    async def story() -> Bus:
        bus = await bus_on(MemoryBus())
        bus.to_main(ran.append, "before")
        await asyncio.sleep(0)
        await bus.close()
        return bus

    bus = run(story())
    bus.to_main(ran.append, "after")

    assert ran == ["before"]


async def _break() -> None:
    raise LookupError("nothing is where it was")


@pytest.mark.parametrize("where", ["main", "lane"])
def test_a_presence_whose_background_work_fails_says_why(where: str) -> None:
    async def story() -> list[str]:
        bus = await bus_on(MemoryBus())
        failed = asyncio.Event()
        bus.on_failure(failed.set)
        bus.check()

        background = bus.background if where == "main" else bus.lane.background
        background.start(_break, name="breaks")
        await asyncio.wait_for(failed.wait(), 60)

        with pytest.raises(Unavailable) as caught:
            bus.check()
        await bus.close()
        assert caught.value.__cause__ is bus.failure
        return [str(caught.value)]

    assert run(story()) == ["the bus has failed: LookupError: nothing is where it was"]


def test_work_of_a_presence_ends_when_it_is_left() -> None:
    async def story() -> tuple[bool, bool]:
        bus = await bus_on(MemoryBus())
        works = [
            each.start(asyncio.Event().wait, name="w")
            for each in (bus.background, bus.lane.background)
        ]

        await bus.close()

        return works[0].ended, works[1].ended

    assert run(story()) == (True, True)


@pytest.mark.anyio
async def test_work_on_the_thread_of_the_lane_that_fails_breaks_the_presence(
    nats_server: RunningServer,
) -> None:
    bus = await Bus.connect(BusConfig(servers=(nats_server.url,)), name="breaks")
    failed = asyncio.Event()
    bus.on_failure(failed.set)

    bus.lane.call(lambda: bus.lane.background.start(_break, name="breaks"))
    await asyncio.wait_for(failed.wait(), 60)

    assert isinstance(bus.failure, LookupError)
    await bus.close()
