"""Jobs of a region that go on in another one: when their region is lost, and when an operator moves
them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest
from examples.billing.actors import Charge
from tests.conditions import PATIENCE, eventually
from tests.joined_regions import joined_regions

from dynbus import EndpointName, Runtime, Unavailable
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import copy_stream, job_log_stream, work_stream
from dynbus.bus.transport import Connection
from dynbus.bus.work_queue import TakenOver, TakeOver
from dynbus.llm.commands.setting_up import Status, needed_in, set_up

from .job_shop import DATABASE, LEDGER, STEPS, Note, NotedBilling, Order, Shop
from .processes import Processes

pytestmark = pytest.mark.anyio

JOBS = 200
SELL = EndpointName.of("shop", "Shop", "sell")
CHARGE = EndpointName.of("billing", "Billing", "charge")


@asynccontextmanager
async def reached(server: RunningServer) -> AsyncGenerator[NatsConnection]:
    async with terminal.server(BusConfig(servers=(server.url,)), "test") as found:
        yield found.connection


async def make(
    server: RunningServer, queue: EndpointName, copied: Sequence[str] = ()
) -> list[Status]:
    """What `dynbus setup` does; the outcomes for the queue, its log, and their copies."""
    name = f"{queue.component}.{queue.endpoint}"
    needed = needed_in(queue.namespace, [], durable=[name], copied=copied)
    async with reached(server) as connection:
        for one in needed:
            await one.announce(connection)
        outcomes = await set_up(connection.jetstream, needed)
    return [one.status for one in outcomes if str(queue).replace(".", "+") in one.stream]


async def take_over(server: RunningServer, queue: EndpointName, *, lost: bool = True) -> TakenOver:
    async with reached(server) as connection:
        return await TakeOver(connection, queue, "eu").run(lost=lost, wait=5.0)


async def are_empty(connection: Connection) -> bool:
    infos = [await connection.jetstream.stream_info(work_stream(one)) for one in (SELL, CHARGE)]
    return not any(info.messages for info in infos)


def notes(ledger: Path) -> list[Note]:
    return list(map(Note.read, ledger.read_text().rpartition("\n")[0].splitlines()))


async def test_jobs_of_a_lost_region_go_on_in_another_one_and_not_again_at_home(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, database = tmp_path / "ledger", tmp_path / "billing.sqlite"
    monkeypatch.setenv(LEDGER, str(ledger))
    monkeypatch.setenv(DATABASE, str(database))
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        eu, us = regions["eu"], regions["us"]
        for queue in (SELL, CHARGE):
            await make(eu, queue)
            assert await make(us, queue, ["eu"]) == [Status.MADE] * 4
            assert await make(us, queue, ["eu"]) == [Status.THERE] * 4
        runtime = await exits.enter_async_context(Runtime.connect(us.url, wait=PATIENCE))
        jetstream = runtime.bus.data.jetstream
        shops = [processes.begin_job_shop(eu.url) for _ in range(2)]
        async with Runtime.connect(eu.url, wait=PATIENCE) as customer:
            sell, charge = customer.client(Shop).sell, customer.client(NotedBilling).charge
            for number in range(JOBS):
                await sell.submit(Order(number), idempotency_key=f"k-{number}")
                await charge.submit(
                    Charge(account=f"a{number % 7}", cents=number), idempotency_key=f"k-{number}"
                )

        async def is_copied() -> bool:
            infos = [
                await jetstream.stream_info(copy_stream(work_stream(queue), "eu"))
                for queue in (SELL, CHARGE)
            ]
            return all(info.last_sequence >= JOBS for info in infos)

        await eventually(is_copied, what="all jobs are copied")

        def done() -> int:
            return sum(one.what == "stored" and one.name == STEPS[-1] for one in notes(ledger))

        await eventually(lambda: ledger.exists() and done() >= JOBS // 4, what="a quarter is done")
        for shop in shops:
            shop.kill()
        eu.kill()
        lost_at = len(notes(ledger))

        log = copy_stream(job_log_stream(SELL), "eu")
        records = [one.subject.split(".")[4:] for one in await jetstream.read(log)]
        ended = {job for job, *record in records if record == ["end"]}
        stored = {(int(job[2:]), int(of[2])) for job, *of in records if of[:2] == ["log", "step"]}
        assert ended
        assert len(ended) < JOBS

        with pytest.raises(Unavailable, match="give --lost"):
            await take_over(us, SELL, lost=False)
        with anyio.move_on_after(0.15):
            await take_over(us, SELL)
        first, second = await asyncio.gather(take_over(us, SELL), take_over(us, SELL))
        assert not first.answered
        assert first.silent is not None
        assert not set(first.jobs) & ended
        assert (await take_over(us, SELL)).jobs == ()
        assert (await take_over(us, CHARGE)).jobs
        in_us = processes.begin_job_shop(us.url)
        keys = [f"k-{number}" for number in range(JOBS)]
        for key in keys:
            if key not in ended:
                steps = await runtime.job(f"{SELL}.{key}", Shop.sell).result(PATIENCE)
                assert [of.split()[0] for of in steps] == list(STEPS)

        await eventually(lambda: are_empty(runtime.bus.data), what="all jobs are done in us")
        elsewhere = [one for one in notes(ledger)[lost_at:] if one.pid == in_us.pid]
        assert {one.number for one in elsewhere if one.what == "begun" and one.name == "sell"} == {
            int(key[2:]) for key in keys if key not in ended
        }
        again = {
            (one.number, STEPS.index(one.name))
            for one in elsewhere
            if one.what == "step" and f"k-{one.number}" not in ended
        }
        assert not again & stored

        await eu.start()
        back = processes.begin_job_shop(eu.url)

        async with reached(eu) as there:
            await eventually(lambda: are_empty(there), what="eu has dropped what was taken over")
        assert [one for one in notes(ledger) if one.pid == back.pid] == []
        with closing(sqlite3.connect(database)) as books:
            booked = dict(books.execute("SELECT name, cents FROM accounts"))
        assert booked == {f"a{of}": sum(range(of, JOBS, 7)) for of in range(7)}
        async with Runtime.connect(eu.url, wait=PATIENCE) as customer:
            late = await customer.client(Shop).sell.submit(Order(JOBS), idempotency_key="k-late")
            assert len(await late.result(PATIENCE)) == len(STEPS)
        assert {one.number for one in notes(ledger) if one.pid == back.pid} == {JOBS}
