"""Jobs of a region that is a cluster of three servers, which another region copies: they are whole
when one server is killed, and go on in the other region when all are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually
from tests.joined_regions import cluster_joined_with_server

from dynbus import DynbusError, Runtime, Unavailable
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import copy_stream, job_log_stream, work_stream
from dynbus.bus.transport import Connection
from dynbus.llm.commands.setting_up import Status

from .job_shop import LEDGER, STEPS, Order, Shop
from .processes import Processes
from .test_jobs_elsewhere import SELL, make, notes, reached, take_over

pytestmark = pytest.mark.anyio

JOBS = 120
COPIED = 30.0
"""Seconds within which copies go on after a server of the region was killed."""


def url_of(servers: Sequence[RunningServer]) -> str:
    return ",".join(server.url for server in servers)


async def leader_of(
    servers: Sequence[RunningServer], connection: Connection, stream: str
) -> RunningServer:
    """The server that leads a stream."""
    assert isinstance(connection, NatsConnection)
    info = await connection.jetstream.api(f"STREAM.INFO.{stream}", {}, timeout=PATIENCE)
    return next(server for server in servers if server.name == info["cluster"]["leader"])


async def submit(runtime: Runtime, number: int) -> None:
    """Submit a job under a key of its own, however often the servers are away meanwhile."""

    async def is_submitted() -> bool:
        try:
            await runtime.client(Shop).sell.submit(Order(number), idempotency_key=f"k-{number}")
        except Unavailable:
            return False
        return True

    await eventually(is_submitted)


@pytest.mark.timeout(300)
@pytest.mark.nightly(
    "tests/scenarios/test_jobs_elsewhere.py::"
    "test_jobs_of_a_lost_region_go_on_in_another_one_and_not_again_at_home"
)
@pytest.mark.parametrize("killed", [work_stream(SELL), job_log_stream(SELL)])
async def test_copied_jobs_of_a_cluster_outlive_one_of_its_servers_and_then_all(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    ledger, keys = tmp_path / "ledger", {f"k-{number}" for number in range(JOBS)}
    monkeypatch.setenv(LEDGER, str(ledger))
    async with cluster_joined_with_server(tmp_path, "eu", "us") as (eu, us):
        await eventually(lambda: can_make(eu[0]), what="eu has a leader")
        assert await make(us, SELL, ["eu"]) == [Status.MADE] * 4
        shops = [processes.begin_job_shop(url_of(eu)) for _ in range(2)]
        for shop in shops:
            await shop.says("takes jobs")
        async with (
            Runtime.connect(url_of(eu), wait=PATIENCE) as customer,
            Runtime.connect(us.url, wait=PATIENCE) as runtime,
        ):
            at_home, elsewhere = customer.bus.data.jetstream, runtime.bus.data.jetstream
            work = await at_home.stream_info(work_stream(SELL))
            assert (work.replicas, work.in_cluster) == (3, True)
            for number in range(JOBS // 3):
                await submit(customer, number)
            await eventually(lambda: done(ledger) >= JOBS // 8, what="some are done")

            leader = await leader_of(eu, customer.bus.data, killed)
            await asyncio.to_thread(leader.kill)
            watch, killed_at = Stopwatch(), time.monotonic()
            for number in range(JOBS // 3, JOBS):
                await submit(customer, number)
            await eventually(lambda: done(ledger) >= JOBS // 2, what="jobs go on")

            async def are_copied() -> bool:
                for stream in (work_stream(SELL), job_log_stream(SELL)):
                    try:
                        there = await at_home.stream_info(stream)
                    except DynbusError:
                        return False
                    here = await elsewhere.stream_info(copy_stream(stream, "eu"))
                    if here.last_sequence < there.last_sequence:
                        return False
                return True

            for shop in shops:
                shop.kill()
            await eventually(are_copied, what="all is copied")
            print(f"all is copied {time.monotonic() - killed_at:.2f} s after the kill")
            watch.check(COPIED, "all is copied")
            log, copied_log = [
                {(one.sequence, one.subject, one.data) for one in messages}
                for messages in (
                    await at_home.read(job_log_stream(SELL)),
                    await elsewhere.read(copy_stream(job_log_stream(SELL), "eu")),
                )
            ]
            assert log <= copied_log
            ended = {subject.split(".")[4] for _, subject, _ in log if subject.endswith(".end")}
            stored = {
                (subject.split(".")[4], int(subject.rpartition(".")[2]))
                for _, subject, _ in log
                if ".log.step." in subject
            }
            assert 0 < len(ended) < JOBS
            # Those that ended before they were copied are in the log alone.
            copied = [
                one.subject.rpartition(".")[2]
                for one in await elsewhere.read(copy_stream(work_stream(SELL), "eu"))
            ]
            assert len({*copied}) == len(copied)
            assert {*copied} | ended == keys

            for server in eu:
                server.kill()
            lost_at = len(notes(ledger))
            taken = await take_over(us, SELL)
            in_us = processes.begin_job_shop(us.url)
            assert set(taken.jobs) == keys - ended
            for key in taken.jobs:
                steps = await runtime.job(f"{SELL}.{key}", Shop.sell).result(PATIENCE)
                assert [of.split()[0] for of in steps] == list(STEPS)

            noted = [one for one in notes(ledger)[lost_at:] if one.pid == in_us.pid]
            assert {f"k-{one.number}" for one in noted if one.what == "begun"} == keys - ended
            again = {
                (f"k-{one.number}", STEPS.index(one.name)) for one in noted if one.what == "step"
            }
            assert not again & stored

            for server in eu:
                await server.start()
            back = processes.begin_job_shop(url_of(eu))
            await eventually(lambda: is_empty(eu[0]), what="eu has dropped what was taken over")
            assert [one for one in notes(ledger) if one.pid == back.pid] == []


async def is_empty(server: RunningServer) -> bool:
    """True if the queue of a region is known and has no job."""
    try:
        async with reached(server) as connection:
            return not (await connection.jetstream.stream_info(work_stream(SELL))).messages
    except DynbusError:
        return False


async def can_make(server: RunningServer) -> bool:
    """True if the servers of a region have a leader, and keep the queue by then."""
    try:
        return await make(server, SELL) == [Status.MADE] * 2
    except DynbusError:
        return False


def done(ledger: Path) -> int:
    """The number of jobs that have done their last step."""
    if not ledger.exists():
        return 0
    return sum((one.what, one.name) == ("stored", STEPS[-1]) for one in notes(ledger))
