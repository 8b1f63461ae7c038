"""Jobs and their steps while the processes that do them, and the server, are killed.

A tiny story runs at every push, the others nightly; large ones are soaks, whose figures are in the
guarantees.
`JOBS_SCALE=0.1` makes them a tenth as large, kills and jobs alike.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import anyio
import msgspec
import pytest
from examples.billing.actors import Charge
from pydantic_core import to_jsonable_python
from tests.conditions import PATIENCE, eventually

from dynbus import EndpointName, JobHandle, Overloaded, Runtime, Unavailable
from dynbus.bus.nats.jetstream import NatsJetStream
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import job_log_stream, work_stream
from dynbus.bus.work_queue import DeadLetters

from .cluster import three_servers
from .job_shop import CUSTOMERS, DATABASE, LEDGER, STEPS, Note, NotedBilling, Order, Shop
from .processes import Process, Processes

pytestmark = pytest.mark.anyio

SCALE = float(os.environ.get("JOBS_SCALE", "1"))
SHOPS = 4
AT_A_TIME = 256
"""Jobs that are submitted and have not ended."""
PASSED_ON = 1.0
"""Seconds in which a taker writes down that it begins what had not ended when it looked."""


class Size(NamedTuple):
    """How large a story is."""

    jobs: int
    taker_kills: int
    server_kills: int

    def scaled(self) -> Size:
        return Size(*(max(1, round(of * SCALE)) for of in self))


# Servers -------------------------------------------------------------------------------------


class Servers(Protocol):
    """What the shops and their customers connect to."""

    @property
    def url(self) -> str: ...
    async def kill_one(self, runtime: Runtime) -> None:
        """Kill a server with SIGKILL, and start it again."""
        ...


class OneServer:
    """A server alone."""

    def __init__(self, server: RunningServer) -> None:
        self.url = server.url
        self._server = server

    async def kill_one(self, runtime: Runtime) -> None:
        self._server.kill()
        await self._server.start()


class ThreeServers:
    """A cluster, which keeps everything three times."""

    def __init__(self, url: str, servers: list[RunningServer]) -> None:
        self.url = url
        self._servers = servers

    async def kill_one(self, runtime: Runtime) -> None:
        one = random.choice(self._servers)
        one.kill()
        await asyncio.sleep(random.uniform(0.0, 1.0))
        await one.start()
        await eventually(lambda: self._are_whole(runtime), what="every server has everything")

    async def _are_whole(self, runtime: Runtime) -> bool:
        jetstream = runtime.bus.data.jetstream
        assert isinstance(jetstream, NatsJetStream)
        try:
            answer = await jetstream.api("STREAM.LIST", {}, timeout=5.0)
        except Unavailable:
            return False
        clusters = [one.get("cluster", {}) for one in answer["streams"]]
        return not answer.get("missing") and all(
            one.get("leader") and all(peer.get("current") for peer in one.get("replicas", ()))
            for one in clusters
        )


@asynccontextmanager
async def servers_of(kind: str, server: RunningServer, folder: Path) -> AsyncGenerator[Servers]:
    if kind == "one server":
        yield OneServer(server)
        return
    async with three_servers(folder) as cluster:
        yield ThreeServers(cluster.url, cluster.servers)


# The story -----------------------------------------------------------------------------------


class Story:
    """Jobs of one handler, submitted under keys by this process and done by others.

    Attributes:
        confirmed: when the submitter had the result of a job.
        results: what they were.
        killed: when each process was.
    """

    def __init__(self, servers: Servers, processes: Processes, ledger: Path, size: Size) -> None:
        self.size = size
        self.confirmed: dict[int, float] = {}
        self.results: dict[int, Any] = {}
        self.killed: dict[int, float] = {}
        self._servers = servers
        self._processes = processes
        self._ledger = ledger
        self._shops: list[Process] = []

    async def run(
        self,
        runtime: Runtime,
        submit: Callable[[int], Coroutine[Any, Any, JobHandle[Any]]],
    ) -> None:
        """Have all jobs done, with the kills spread over them."""
        self._shops = [self._processes.begin_job_shop(self._servers.url) for _ in range(SHOPS)]
        await self._shops[0].says("takes jobs")
        numbers = count()
        began = time.monotonic()

        async def work() -> None:
            while (number := next(numbers)) < self.size.jobs:
                job = await self._submitted(submit, number)
                self.results[number] = await job.result()
                self.confirmed[number] = time.monotonic()

        async with anyio.create_task_group() as tasks:
            for _ in range(AT_A_TIME):
                tasks.start_soon(work)
            await self._kill(runtime)
            jobs = partial(self._has_confirmed, self.size.jobs)
            await eventually(jobs, 600.0, what="all jobs end")
        print(
            f"{self.size.jobs} jobs, {self.size.taker_kills} kills of takers, "
            f"{self.size.server_kills} of a server: {time.monotonic() - began:.0f} s"
        )

    async def _submitted(
        self, submit: Callable[[int], Coroutine[Any, Any, JobHandle[Any]]], number: int
    ) -> JobHandle[Any]:
        """A job under its own key, however often the server is away meanwhile."""
        while True:
            try:
                return await submit(number)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after)
            except Unavailable:
                await asyncio.sleep(0.1)

    async def _kill(self, runtime: Runtime) -> None:
        kills = ["taker"] * self.size.taker_kills + ["server"] * self.size.server_kills
        random.shuffle(kills)
        for number, kill in enumerate(kills, 1):
            due = self.size.jobs * number // (len(kills) + 1)
            await eventually(partial(self._has_confirmed, due), 600.0, what="jobs end")
            await asyncio.sleep(random.uniform(0.0, 0.1))
            if kill == "server":
                await self._servers.kill_one(runtime)
            else:
                await eventually(lambda: bool(self._taking()), what="a shop takes jobs")
                at = random.choice(self._taking())
                self._shops[at].kill()
                self.killed[self._shops[at].pid] = time.monotonic()
                self._shops[at] = self._processes.begin_job_shop(self._servers.url)

    def _has_confirmed(self, jobs: int) -> bool:
        for at, shop in enumerate(self._shops):
            if shop.returncode is not None:
                # It could not start; `dynbus run` starts such a process again, too.
                self._shops[at] = self._processes.begin_job_shop(self._servers.url)
        return len(self.confirmed) >= jobs

    def _taking(self) -> list[int]:
        return [at for at, shop in enumerate(self._shops) if "takes jobs" in shop.output]

    @property
    def notes(self) -> list[Note]:
        """The ledger, in the order of time."""
        lines = self._ledger.read_text().rpartition("\n")[0].splitlines()
        return sorted(map(Note.read, lines))

    async def check(self, runtime: Runtime, queue: EndpointName) -> list[Note]:
        """What holds for jobs of every handler; the ledger.

        Raises:
            AssertionError: a job was lost, begun after its end, or recorded twice.
        """
        assert self.results.keys() == set(range(self.size.jobs))
        notes = self.notes
        begun = Counter(one.number for one in notes if one.what == "begun")
        late = [
            one
            for one in notes
            if one.what == "begun" and one.when > self.confirmed[one.number] + PASSED_ON
        ]
        again = sum(begun.values()) - len(begun)
        print(f"begun again before their end: {again}; after it: {len(late)}")
        assert begun.keys() == self.results.keys()
        assert late == []

        jetstream = runtime.bus.data.jetstream

        async def is_empty() -> bool:
            return not (await jetstream.stream_info(work_stream(queue))).messages

        await eventually(is_empty, what="the queue is empty")
        assert await DeadLetters(jetstream, queue.namespace).find() == []
        ends = [
            one
            for one in await jetstream.read(job_log_stream(queue), timeout=PATIENCE)
            if one.subject.endswith(".end")
        ]
        assert len({one.subject for one in ends}) == len(ends) == self.size.jobs
        recorded = Counter(msgspec.json.encode(msgspec.json.decode(one.data)) for one in ends)
        given = map(to_jsonable_python, self.results.values())
        assert recorded == Counter(map(msgspec.json.encode, given))
        return notes


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "ledger"
    monkeypatch.setenv(LEDGER, str(path))
    return path


def soak(*size: int) -> Any:
    """A size that is run on demand."""
    return pytest.param(Size(*size).scaled(), marks=[pytest.mark.soak, pytest.mark.timeout(3600)])


@pytest.mark.parametrize("size", [Size(300, 4, 2), soak(100_000, 200, 100)], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "one server",
        pytest.param(
            "a cluster",
            marks=pytest.mark.nightly(
                "tests/scenarios/test_jobs_under_kills.py::test_no_job_is_lost_or_begun_after_its_end_and_each_key_has_one_result"
            ),
        ),
    ],
)
async def test_no_job_is_lost_or_begun_after_its_end_and_each_key_has_one_result(
    own_server: RunningServer,
    processes: Processes,
    tmp_path: Path,
    ledger: Path,
    size: Size,
    kind: str,
) -> None:
    async with servers_of(kind, own_server, tmp_path) as servers:
        story = Story(servers, processes, ledger, size)
        async with Runtime.connect(servers.url, wait=PATIENCE) as runtime:
            pack = runtime.client(Shop).pack
            await story.run(
                runtime, lambda number: pack.submit(Order(number), idempotency_key=f"k-{number}")
            )
            await story.check(runtime, EndpointName.of("shop", "Shop", "pack"))

            assert all(of.startswith(f"{number} by ") for number, of in story.results.items())
            # A key has one result, also when it is asked for again.
            for number in random.sample(range(size.jobs), 50):
                again = await pack.submit(Order(-1), idempotency_key=f"k-{number}")
                assert await again.result() == story.results[number]


@pytest.mark.nightly(
    "tests/contracts/test_steps_contract.py::test_another_instance_goes_on_after_the_last_finished_step",
    "tests/contracts/test_steps_contract.py::test_a_step_is_finished_by_the_last_instance_alone_that_has_taken_its_job_over",
    "tests/contracts/test_work_queue_contract.py::test_the_jobs_of_a_process_that_is_gone_begin_once_elsewhere_at_once",
)
@pytest.mark.parametrize("size", [Size(60, 4, 2), soak(10_000, 200, 50)], ids=str)
async def test_no_finished_step_is_done_again(
    own_server: RunningServer, processes: Processes, ledger: Path, size: Size
) -> None:
    story = Story(OneServer(own_server), processes, ledger, size)
    async with Runtime.connect(own_server.url, wait=PATIENCE) as runtime:
        sell = runtime.client(Shop).sell
        await story.run(
            runtime, lambda number: sell.submit(Order(number), idempotency_key=f"k-{number}")
        )
        notes = await story.check(runtime, EndpointName.of("shop", "Shop", "sell"))

    stored: dict[tuple[str, int], float] = {}
    again: list[float] = []
    for one in notes:
        if one.what == "stored":
            stored.setdefault((one.name, one.number), one.when)
        elif one.what == "step" and (one.name, one.number) in stored:
            again.append(one.when - stored[one.name, one.number])
    begun = Counter((one.name, one.number) for one in notes if one.what == "step")
    print(
        f"steps begun again: {sum(begun.values()) - len(begun)} unfinished, {len(again)} finished"
    )
    assert again == []
    for number, steps in story.results.items():
        # What a step gave is what its one record says, whoever went on with the job.
        assert [one.partition(" by ")[0] for one in steps] == [f"{of} {number}" for of in STEPS]


@pytest.mark.parametrize("size", [soak(20_000, 200, 50)], ids=str)
async def test_a_key_and_an_effect_in_one_transaction_have_it_counted_once(
    own_server: RunningServer,
    processes: Processes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ledger: Path,
    size: Size,
) -> None:
    monkeypatch.setenv(DATABASE, str(tmp_path / "billing.sqlite"))
    story = Story(OneServer(own_server), processes, ledger, size)
    async with Runtime.connect(own_server.url, wait=PATIENCE) as runtime:
        charge = runtime.client(NotedBilling).charge
        await story.run(
            runtime,
            lambda number: charge.submit(
                Charge(account=f"a{number % 7}", cents=number), idempotency_key=f"k-{number}"
            ),
        )
        notes = await story.check(runtime, EndpointName.of("billing", "Billing", "charge"))

    with closing(sqlite3.connect(tmp_path / "billing.sqlite")) as database:
        booked = dict(database.execute("SELECT name, cents FROM accounts"))
        receipts = dict(database.execute("SELECT key, number FROM receipts"))
    worked = Counter(one.number for one in notes if one.what == "worked")
    print(f"transactions that were tried again: {sum(worked.values()) - len(worked)}")
    assert booked == {f"a{of}": sum(range(of, size.jobs, 7)) for of in range(7)}
    assert receipts == {f"k-{number}": of.number for number, of in story.results.items()}


@pytest.mark.nightly(
    "tests/contracts/test_jobs_contract.py::test_jobs_are_done_in_the_order_of_a_field",
    "tests/contracts/test_work_queue_contract.py::test_the_jobs_of_a_process_that_is_gone_begin_once_elsewhere_at_once",
    "tests/scenarios/test_jobs_under_kills.py::test_no_job_is_lost_or_begun_after_its_end_and_each_key_has_one_result",
)
@pytest.mark.parametrize("size", [Size(200, 4, 2), soak(20_000, 200, 50)], ids=str)
async def test_jobs_of_a_customer_are_done_in_order_and_one_at_a_time(
    own_server: RunningServer, processes: Processes, ledger: Path, size: Size
) -> None:
    story = Story(OneServer(own_server), processes, ledger, size)
    async with Runtime.connect(own_server.url, wait=PATIENCE) as runtime:
        ship = runtime.client(Shop).ship
        # Who submits for a customer does so in turn.
        turns: defaultdict[int, int] = defaultdict(int)
        changed = anyio.Event()

        async def submit(number: int) -> JobHandle[str]:
            nonlocal changed
            turn, customer = divmod(number, CUSTOMERS)
            while turns[customer] != turn:
                await changed.wait()
            job = await ship.submit(Order(number, customer), idempotency_key=f"k-{number}")
            turns[customer] += 1
            changed.set()
            changed = anyio.Event()
            return job

        await story.run(runtime, submit)
        notes = await story.check(runtime, EndpointName.of("shop", "Shop", "ship"))

    running: defaultdict[int, set[Note]] = defaultdict(set)
    worked, twice, most = set[int](), 0, 0
    for one in notes:
        of = running[one.number % CUSTOMERS]
        of -= {other for other in of if story.killed.get(other.pid, one.when) < one.when}
        if one.what == "worked":
            worked.add(one.number)
            of -= {other for other in of if (other.number, other.pid) == (one.number, one.pid)}
            continue
        # A server that is killed as it hands a job out may hand the same one out again.
        assert {other.number for other in of} <= {one.number}, (of, one)
        assert one.number < CUSTOMERS or one.number - CUSTOMERS in worked, one
        assert one.number + CUSTOMERS not in worked, one
        twice += bool(of)
        of.add(one)
        most = max(most, sum(map(bool, running.values())))
    print(f"customers served at a time: {most}; jobs that ran twice at once: {twice}")
    assert most > 1
    assert twice <= size.server_kills * SHOPS
