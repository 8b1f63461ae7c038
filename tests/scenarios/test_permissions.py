"""The grants of who serves, relays and calls: enough for every call, and not more."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from nats.aio.client import Client
from tests.conditions import eventually

from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import PermissionDenied, Unavailable
from dynbus.bus.identity.grants import (
    Grant,
    calls_all,
    hears_cancels,
    hears_replies,
    submits,
    takes,
)
from dynbus.bus.nats.connection import connect as connect_plainly
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.transport import Message
from dynbus.bus.work_queue import JobEnd, WorkQueue

from .observation import begun_at, leftovers, no_handler_runs
from .permissions import GRANTS, connect, entry, url_of, users
from .stream_maker import OPERATOR, make_streams
from .workload import Count, Relay, Source, Text, Wait

pytestmark = pytest.mark.anyio

BUCKET = INSTANCES_STREAM.name


STORE = "$KV.dynbus_instances"
FOREIGN_SUBSCRIPTIONS = [
    "_INBOX.>",
    "_R.>",
    "_R.{other}.>",
    "other.>",
    "scenario.>",
    "scenario.Foreign.>",
    "scenario.*._ctl.*",
    f"{STORE}.>",
    "$SYS.>",
    ">",
]
FOREIGN_PUBLICATIONS = [
    f"{STORE}.other.Source.forged",
    f"{STORE}.other.Relay.forged",
    f"{STORE}.scenario.Foreign.forged",
    "other.Source.where",
    "scenario._cancel",
    "scenario.Source._kv.forged.0",
    "scenario.Source._kv_load.forged.all",
    f"$JS.API.STREAM.DELETE.{BUCKET}",
    f"$JS.API.STREAM.PURGE.{BUCKET}",
    f"$JS.API.STREAM.MSG.DELETE.{BUCKET}",
    f"$JS.API.STREAM.UPDATE.{BUCKET}",
    f"$JS.API.STREAM.CREATE.{BUCKET}",
    "$JS.API.STREAM.CREATE.DYNBUS_DEAD_scenario",
    "$JS.API.STREAM.CREATE.more",
    f"$JS.API.CONSUMER.CREATE.{BUCKET}",
    f"$JS.API.CONSUMER.CREATE.{BUCKET}.more",
    f"$JS.API.CONSUMER.DURABLE.CREATE.{BUCKET}.more",
    "$JS.API.STREAM.NAMES",
    "$SYS.REQ.SERVER.PING",
]
OF_INSTANCES_ALONE = ["_R.serving.forged.f", "_INBOX.forged", f"{STORE}.scenario.Source.forged"]


async def test_they_are_enough_to_serve_to_call_to_relay_and_to_drain(
    guarded: RunningServer,
) -> None:
    async with (
        connect(guarded, "serving") as serving,
        connect(guarded, "relaying") as relaying,
        connect(guarded, "calling") as calling,
    ):
        await serving.start(Source, instance_id="source")
        await relaying.start(Relay, instance_id="relay")
        source, relay = calling.client(Source), calling.client(Relay)
        for component in ("Source", "Relay"):
            endpoint = calling.namespace("scenario").component(component).endpoint("work")
            await (await endpoint.client()).wait_for_instances(timeout=60.0)

        done = await relay.work(Wait())
        items = [item.index async for item in relay.count(Count(items=500, size=5000))]
        length = await source.length(Text(text="x" * 3_000_000))
        left = asyncio.create_task(source.work(Wait(seconds=60.0, tag="left")))
        await eventually(begun_at(source, "left"))
        left.cancel()
        await asyncio.wait([left])
        await eventually(no_handler_runs(source))
        # Longer than it takes to renew records and to send heartbeats of an open call.
        await relay.work(Wait(seconds=4.0))
        await relaying.instances["relay"].stop(1.0)
        await eventually(lambda: calling.instance_ids("scenario", "Relay") == [])
        await eventually(lambda: not leftovers(calling))

    assert done.instance == "source"
    assert items == list(range(500))
    assert length == 3_000_000
    assert "iolation" not in guarded.log.read_text()


async def test_who_may_not_hear_of_cancels_calls_all_the_same(tmp_path: Path) -> None:
    """As with files that are older than the subject of operators."""
    config = users(hearing_cancels=False)
    server = await run_server(store_dir=tmp_path / "nats-server", config=config)
    try:
        await make_streams(server, "scenario")
        async with connect(server, "relaying") as relaying, connect(server, "calling") as calling:
            await relaying.start(Relay, instance_id="relay")
            endpoint = calling.namespace("scenario").component("Relay").endpoint("work")
            await (await endpoint.client()).wait_for_instances(timeout=60.0)
            await relaying.stop(1.0)
        assert server.log.read_text().count("iolation") == 2
    finally:
        await server.stop()


async def test_who_finds_no_streams_is_told_who_makes_them(tmp_path: Path) -> None:
    server = await run_server(store_dir=tmp_path / "nats-server", config=users())
    try:
        async with connect(server, "serving") as serving, connect(server, "calling") as calling:
            with pytest.raises(PermissionDenied, match="an operator does, with `dynbus setup"):
                await serving.start(Source)
            with pytest.raises(Unavailable, match="an operator does, with `dynbus setup"):
                await calling.discovery.wait_synchronized(2.0)
    finally:
        await server.stop()


@pytest.mark.parametrize("user", GRANTS)
async def test_nothing_else_may_be_heard(guarded: RunningServer, user: str) -> None:
    other = "calling" if user == "serving" else "serving"
    subjects = [subject.format(other=other) for subject in FOREIGN_SUBSCRIPTIONS]
    if user == "calling":
        subjects += ["$SRV.>"]

    refused = await refusals(guarded, user, subscribe=subjects)

    assert refused == set(subjects)


@pytest.mark.parametrize("user", GRANTS)
async def test_nothing_else_may_be_said(guarded: RunningServer, user: str) -> None:
    subjects = list(FOREIGN_PUBLICATIONS)
    if user == "calling":
        subjects += OF_INSTANCES_ALONE
    if user == "relaying":
        subjects += [f"{STORE}.scenario.Source.forged"]
    if user == "serving":
        subjects += [
            f"{STORE}.scenario.Relay.forged",
            "scenario.Source.where",
            f"$JS.API.CONSUMER.CREATE.{BUCKET}.x.y",
        ]

    refused = await refusals(guarded, user, publish=subjects)

    assert refused == set(subjects)


async def refusals(
    server: RunningServer,
    user: str,
    *,
    subscribe: list[str] | None = None,
    publish: list[str] | None = None,
) -> set[str]:
    """Which of the subjects the server refuses to a client with this user's credentials."""
    refused: set[str] = set()

    async def note(error: Exception) -> None:
        refused.update(re.findall(r'(?:subscription|publish) to "([^"]+)"', str(error).lower()))

    plain = Client()
    await plain.connect(url_of(server, user), error_cb=note, allow_reconnect=False)
    for subject in subscribe or []:
        await plain.subscribe(subject)  # pyright: ignore[reportUnknownMemberType]
    for subject in publish or []:
        await plain.publish(subject, b"{}")
    # A pong comes after every refusal.
    await plain.flush()
    await plain.flush()
    wanted = [*(subscribe or []), *(publish or [])]
    await plain.close()
    return {subject for subject in wanted if subject.lower() in refused}


QUEUE = EndpointName("demo", "Printer", "print")


def of_queues(role: str) -> list[Grant]:
    """The grants of who uses the queue `demo.Printer.print`."""
    uses = submits(QUEUE) if role == "putting" else takes(QUEUE, durable=False)
    return [hears_replies(role), hears_cancels("demo"), calls_all("demo"), uses]


def config_of(roles: Mapping[str, list[Grant]]) -> str:
    """A server's configuration for users of queues."""
    entries = [OPERATOR, *(entry(role, grants) for role, grants in roles.items())]
    return "authorization { users = [\n" + "\n".join(entries) + "\n] }"


async def test_a_taker_that_may_not_store_what_it_holds_says_so_and_takes_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grants = [
        Grant(
            one.purpose,
            tuple(subject for subject in one.publish if "dynbus_jobs" not in subject),
            one.subscribe,
        )
        for one in of_queues("taking")
    ]
    config = config_of({"taking": grants})
    server = await run_server(store_dir=tmp_path / "nats-server", config=config)
    await make_streams(server, "demo", ["Printer.print"])
    bus = await Bus.connect(BusConfig(servers=(url_of(server, "taking"),), principal="taking"))
    queue = WorkQueue(bus, QUEUE)
    try:
        await queue.put(b"", job_id="one")
        async with queue.take() as taker:
            await (await anext(taker)).ack()
    finally:
        await bus.close()
        await server.stop()

    assert queue.ended == {JobEnd.DONE: 1}
    assert "its jobs wait for ack_wait (30 s): who holds which cannot be stored" in caplog.text


async def test_jobs_are_put_and_taken_with_the_grants_of_queues(tmp_path: Path) -> None:
    roles = {"putting": of_queues("putting"), "taking": of_queues("taking")}
    config = config_of(roles)
    server = await run_server(store_dir=tmp_path / "nats-server", config=config)
    await make_streams(server, "demo", ["Printer.print"])
    buses = {
        role: await Bus.connect(BusConfig(servers=(url_of(server, role),), principal=role))
        for role in roles
    }
    putting, taking = (WorkQueue(buses[role], QUEUE) for role in roles)
    operator = await connect_plainly([url_of(server, "maker")])
    asked: list[Message] = []
    operator.subscribe("_R.taking.*.ctl.h.*", asked.append)
    try:
        await operator.barrier()
        await putting.put(b"", job_id="one")
        await putting.put(b"", job_id="two")
        assert (await putting.depth()).jobs == 2
        async with taking.take() as taker:
            await (await anext(taker)).ack()
            job = await anext(taker)
            async with taking.take():
                # The other taker asks whether this one is there.
                await eventually(lambda: asked, what="who holds the job is looked for")
            await job.bury("no paper")
        assert taking.ended == {JobEnd.DONE: 1, JobEnd.DEAD: 1}

        assert (await putting.depth(max_age=0.0)).jobs == 0
        log = server.log.read_text()
        assert "iolation" not in log, log[-2000:]
        with pytest.raises((PermissionDenied, Unavailable)):
            await buses["putting"].data.jetstream.publish(
                "demo.Printer._dead.print.0123456789abcdef", b"forged", timeout=1.0
            )
    finally:
        await operator.close()
        for bus in buses.values():
            await bus.close()
        await server.stop()
