"""Jobs of a region that go on in another one: when their region is lost, and when an operator moves
them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import ClassVar

import anyio
import click
import pytest
from click.testing import CliRunner, Result
from examples.billing.actors import Charge
from tests.conditions import PATIENCE, eventually
from tests.joined_regions import joined_regions

from dynbus import (
    Actor,
    ConfigError,
    EndpointName,
    NoJob,
    Runtime,
    Unavailable,
    WorkQueue,
    context,
    handler,
    signal,
    step,
)
from dynbus.actors.calling.jobs import JobQueue
from dynbus.bus.commands.queue import purge_queue
from dynbus.bus.commands.queue import queue as queue_commands
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import (
    copy_stream,
    job_log_stream,
    lane_of_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.transport import Connection
from dynbus.bus.work_queue import JobLog, JobResult, Outcome, TakenOver, TakeOver, job_stream
from dynbus.llm.commands.setting_up import Status, needed_in, set_up
from dynbus.llm.commands.setup import setup

from .job_shop import DATABASE, LEDGER, STEPS, Note, NotedBilling, Order, Shop
from .processes import Processes

pytestmark = pytest.mark.anyio

JOBS = 200
SELL = EndpointName.of("shop", "Shop", "sell")
CHARGE = EndpointName.of("billing", "Billing", "charge")


PACK = EndpointName.of("demo", "Packer", "pack")


class Packer(Actor, namespace="demo"):
    """Jobs that are done at once."""

    @handler(durable=True, ack_wait=1.0)
    async def pack(self, name: str) -> str:
        return name


@asynccontextmanager
async def reached(server: RunningServer) -> AsyncGenerator[NatsConnection]:
    async with terminal.server(BusConfig(servers=(server.url,)), "test") as found:
        yield found.connection


async def make(
    server: RunningServer,
    queue: EndpointName,
    copied: Sequence[str] = (),
    *,
    ordered: bool = False,
) -> list[Status]:
    """What `dynbus setup` does; the outcomes for the queue, its log, and their copies."""
    handler = f"{queue.component}.{queue.endpoint},ack_wait=1,ordered={str(ordered).lower()}"
    needed = needed_in(queue.namespace, [], durable=[handler], copied=copied)
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
        log = copy_stream(job_log_stream(SELL), "eu")

        async def is_noted() -> bool:
            return any(one.subject.endswith(".end") for one in await jetstream.read(log))

        shops = [processes.begin_job_shop(eu.url) for _ in range(2)]

        def done() -> int:
            of_each = Counter((one.what, one.name) for one in notes(ledger))
            return min(of_each["stored", STEPS[-1]], of_each["worked", "charge"])

        await eventually(lambda: ledger.exists() and done() >= JOBS // 16, what="some are done")
        for shop in shops:
            shop.kill()
        await eventually(is_noted, what="the end of one is copied")
        eu.kill()
        lost_at = len(notes(ledger))

        records = [one.subject.split(".")[4:] for one in await jetstream.read(log)]
        ended = {job for job, *record in records if record == ["end"]}
        stored = {(int(job[2:]), int(of[2])) for job, *of in records if of[:2] == ["log", "step"]}
        assert ended
        assert len(ended) < JOBS

        with pytest.raises(Unavailable, match="give --lost"):
            await take_over(us, SELL, lost=False)
        with anyio.move_on_after(0.15):
            await take_over(us, SELL)
        first, _ = await asyncio.gather(take_over(us, SELL), take_over(us, SELL))
        assert not first.answered
        assert first.silent is not None
        assert not set(first.jobs) & ended
        assert (await take_over(us, SELL)).jobs == ()
        await take_over(us, CHARGE)
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


class Desk(Actor, namespace="demo"):
    """Notes the steps that it does, and waits for a second signal."""

    done: ClassVar[list[str]] = []

    @handler(durable=True, ack_wait=1.0, backoff=0.1)
    async def settle(self, number: int) -> list[str]:
        first = await step("first", self.note, f"{self.instance_id} first {number}")
        one = await signal("go", str)
        if context().attempt == 1:
            raise ValueError("the first try fails")
        two = await signal("go", str)
        return [first, one, two, f"{self.instance_id} in try {context().attempt}"]

    async def note(self, text: str) -> str:
        self.done.append(text)
        return text

    @handler(durable=True, ack_wait=1.0, ordered_by="customer")
    async def ship(self, order: Order) -> str:
        self.done.append(f"{order.customer} {order.number}")
        return self.instance_id


SETTLE = EndpointName.of("demo", "Desk", "settle")
SHIP = EndpointName.of("demo", "Desk", "ship")


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    Desk.done.clear()


async def test_jobs_that_are_moved_on_purpose_go_on_after_their_steps_and_signals(
    tmp_path: Path,
) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        eu, us = regions["eu"], regions["us"]
        await make(eu, SETTLE)
        await make(us, SETTLE, ["eu"])
        at_home, elsewhere = [
            await exits.enter_async_context(Runtime.connect(one.url)) for one in (eu, us)
        ]
        worker = await at_home.start(Desk, instance_id="in-eu")
        desk = at_home.client(Desk).settle
        begun = await desk.submit(1, idempotency_key="begun")
        await begun.signal("go", "one")

        async def has_waited() -> bool:
            # Outside of its process, after the signal that it took.
            log = JobLog(at_home.bus.data.jetstream, SETTLE)
            state, _ = await log.run_state("begun")
            return state is not None and len(await log.steps("begun")) == 2

        await eventually(has_waited, what="the job waits for its second signal")
        await worker.stop()
        later = await desk.submit(2, delay=3600.0, priority=1)
        with pytest.raises(ConfigError, match="is in region eu itself"):
            await take_over(eu, SETTLE)

        with anyio.move_on_after(1.2):
            await take_over(us, SETTLE, lost=False)
        taken = await take_over(us, SETTLE, lost=False)

        assert taken.answered
        for name in ("begun", later.id.rpartition(".")[2]):
            assert await JobQueue(elsewhere.bus, SETTLE).state(name)
            with pytest.raises(NoJob):
                await JobQueue(at_home.bus, SETTLE).state(name)
        job = elsewhere.job(f"{SETTLE}.begun", Desk.settle)
        await elsewhere.start(Desk, instance_id="in-us")
        await job.signal("go", "two")
        assert await job.result(PATIENCE) == ["in-eu first 1", "one", "two", "in-us in try 2"]
        assert Desk.done == ["in-eu first 1"]
        [waiting] = await WorkQueue(elsewhere.bus, SETTLE).find(later.id.rpartition(".")[2])
        assert lane_of_subject(waiting.subject) == "high"
        assert (await elsewhere.job(later.id, Desk.settle).state()).status == "waiting"
        # The region goes on with jobs of its own.
        await at_home.start(Desk, instance_id="in-eu")
        own = await desk.submit(3)
        for value in ("one", "two"):
            await own.signal("go", value)
        assert (await own.result(PATIENCE))[0] == "in-eu first 3"


async def test_jobs_that_are_done_leave_their_queue_while_the_region_that_copies_it_is_lost(
    tmp_path: Path,
) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        eu, us = regions["eu"], regions["us"]
        await make(eu, PACK)
        await make(us, PACK, ["eu"])
        at_home = await exits.enter_async_context(Runtime.connect(eu.url))
        await at_home.start(Packer)
        pack = at_home.client(Packer).pack
        assert await pack("first") == "first"
        jetstream = at_home.bus.data.jetstream

        async def messages() -> int:
            return (await jetstream.stream_info(work_stream(PACK))).messages

        async def is_heard() -> bool:
            async with reached(us) as connection:
                copy = await connection.jetstream.stream_info(copy_stream(work_stream(PACK), "eu"))
            return copy.silent is not None

        await eventually(is_heard, what="the copies hear of the region")
        us.kill()
        for number in range(50):
            assert await pack(str(number)) == str(number)

        async def is_empty() -> bool:
            return not await messages()

        await eventually(is_empty, 5.0, what="the jobs that are done are gone")
        # They never come to the copies, and nobody waits for them.
        await us.start()
        taken = await take_over(us, PACK, lost=False)
        assert (taken.jobs, taken.answered) == ((), True)


async def test_jobs_that_are_taken_over_keep_their_order(tmp_path: Path) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions, AsyncExitStack() as exits:
        eu, us = regions["eu"], regions["us"]
        await make(eu, SHIP, ordered=True)
        await make(us, SHIP, ["eu"], ordered=True)
        async with Runtime.connect(eu.url) as customer:
            for number in range(20):
                await customer.client(Desk).ship.submit(Order(number, number % 3))
            await eventually(lambda: is_whole(us, SHIP, 20), what="all jobs are copied")
        eu.kill()

        await take_over(us, SHIP)

        elsewhere = await exits.enter_async_context(Runtime.connect(us.url))
        await elsewhere.start(Desk)
        await eventually(lambda: len(Desk.done) == 20, what="all jobs are done")
        for customer_number in range(3):
            of = [one for one in Desk.done if one.startswith(f"{customer_number} ")]
            assert of == [
                f"{customer_number} {number}"
                for number in range(20)
                if number % 3 == customer_number
            ]


async def is_whole(server: RunningServer, queue: EndpointName, jobs: int) -> bool:
    async with reached(server) as connection:
        info = await connection.jetstream.stream_info(copy_stream(work_stream(queue), "eu"))
    return info.last_sequence >= jobs


async def test_jobs_that_were_purged_or_have_ended_are_neither_moved_nor_kept(
    tmp_path: Path,
) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions:
        eu, us = regions["eu"], regions["us"]
        await make(eu, SHIP)
        await make(us, SHIP, ["eu"])
        async with reached(eu) as there:
            for number in range(3):
                subject = work_subject(SHIP, f"job-{number}", "normal")
                await there.jetstream.publish(subject, b"{}")
            assert await purge_queue(there, str(SHIP)) == 3
            await there.jetstream.publish(work_subject(SHIP, "job-3", "normal"), b"{}")
            await there.jetstream.publish(work_subject(SHIP, "job-4", "normal"), b"{}")
            end = JobResult(Outcome.DONE, b"null")
            await JobLog(there.jetstream, SHIP).end("job-4", end, 60.0)
        await eventually(lambda: is_whole(us, SHIP, 5), what="all jobs are copied")

        async with reached(us) as here:
            taking = TakeOver(here, SHIP, "eu")
            copy = copy_stream(work_stream(SHIP), "eu")
            await eventually(lambda: has_end(here), what="the end is copied")

            assert (await taking.run(lost=False, dry=True)).jobs == ("job-3",)
            assert [one.sequence for one in await here.jetstream.read(copy)] == [4]
            assert (await taking.run(lost=False)).jobs == ("job-3",)
            assert await here.jetstream.read(copy) == []


async def has_end(connection: Connection) -> bool:
    log = copy_stream(job_log_stream(SHIP), "eu")
    records = await connection.jetstream.read(log)
    return any(one.subject.endswith(".end") for one in records)


async def test_regions_without_copies_or_with_no_name_are_refused(
    tmp_path: Path, own_server: RunningServer
) -> None:
    async with joined_regions(tmp_path, ("eu", "us")) as regions:
        us = regions["us"]
        with pytest.raises(ConfigError, match="region eu has no queue demo.Desk.ship"):
            await make(us, SHIP, ["eu"])
        await make(us, SHIP)
        with pytest.raises(ConfigError, match="there is no stream DYNBUS_COPY_eu_WORK_demo"):
            await take_over(us, SHIP)
        with pytest.raises(ConfigError, match="'e.u' is no region"):
            await make(us, SHIP, ["e.u"])
        with pytest.raises(Unavailable, match="region ap does not answer"):
            await make(us, SHIP, ["ap"])
    with pytest.raises(ConfigError, match="the server is in none"):
        await make(own_server, SHIP, ["eu"])


async def test_a_region_that_does_not_say_what_it_took_over_is_waited_for_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(job_stream, "MOVES_WITHIN", 1.0)
    async with joined_regions(tmp_path, ("eu",)) as regions, AsyncExitStack() as exits:
        eu = regions["eu"]
        await make(eu, SHIP, ordered=True)
        async with reached(eu) as connection:
            await connection.jetstream.note(work_stream(SHIP), "dynbus.copied-by.ap", "eu")
        runtime = await exits.enter_async_context(Runtime.connect(eu.url))
        await runtime.start(Desk, instance_id="in-eu")

        job = await runtime.client(Desk).ship.submit(Order(1))

        assert await job.result(PATIENCE) == "in-eu"
    assert "it is not known which of them another region has taken over" in caplog.text


async def test_the_commands_keep_copies_and_say_what_they_move(tmp_path: Path) -> None:
    async def command(group: click.Command, server: RunningServer, *arguments: str) -> Result:
        # In a thread: the command has a loop of its own.
        given = [*arguments, "--nats", server.url]
        return await asyncio.to_thread(CliRunner().invoke, group, given)

    async with joined_regions(tmp_path, ("eu", "us")) as regions:
        eu, us = regions["eu"], regions["us"]
        durable = ["demo", "--durable", "Desk.settle"]
        assert (await command(setup, us, "demo", "--copies-of", "eu")).exit_code != 0
        assert (await command(setup, eu, *durable)).exit_code == 0
        assert (await command(setup, us, *durable, "--copies-of", "eu")).exit_code == 0
        async with Runtime.connect(eu.url) as customer:
            await customer.client(Desk).settle.submit(1, idempotency_key="one")
        async with reached(eu) as there:
            log = JobLog(there.jetstream, SETTLE)
            await log.store_firing(7.0, 0)
        await eventually(lambda: is_whole(us, SETTLE, 1), what="the job is copied")
        taking = ("take-over", str(SETTLE), "--from", "eu")

        looked = await command(queue_commands, us, *taking, "--dry-run")
        assert looked.stdout.splitlines() == [
            "to be taken over: one",
            f"1 jobs of {SETTLE} to be taken over from region eu",
        ]
        assert "not heard of region eu since" in looked.stderr or "eu answers" in looked.stderr

        async def is_heard() -> bool:
            async with reached(us) as here:
                infos = [
                    await here.jetstream.stream_info(copy_stream(stream, "eu"))
                    for stream in (work_stream(SETTLE), job_log_stream(SETTLE))
                ]
            return all(info.silent is not None for info in infos)

        await eventually(is_heard, what="the copies say how old they are")
        eu.kill()
        refused = await command(queue_commands, us, *taking)
        assert isinstance(refused.exception, Unavailable)
        taken = json.loads((await command(queue_commands, us, *taking, "--lost", "--json")).stdout)
        assert (taken["jobs"], taken["answered"], taken["full"]) == (["one"], False, [])
        again = await command(queue_commands, us, *taking, "--lost")
        assert again.stdout == f"0 jobs of {SETTLE} taken over from region eu\n"
        assert "is on its disks alone" in again.stderr
        async with reached(us) as here:
            assert (await JobLog(here.jetstream, SETTLE).last_firing())[0] == 7.0
