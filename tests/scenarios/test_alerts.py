"""Each alert fires on its fault, and none where nothing is wrong.

What Prometheus would have scraped every 15 seconds while an actor misbehaves is what its own
`promtool` evaluates the rules with. Time is virtual but for two servers that stand still.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import anyio
import httpx2
import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.bus.servers import server_stopped
from tests.conditions import eventually
from tests.llm.disaggregated.test_worker import REMOTE, Pair, greedy
from tests.llm.disaggregated.tiny_engine import tiny_engine
from tests.llm.http.served import Served, served
from tests.llm.text.tiny_tokenizer import tiny_json
from tests.llm.verifying.lying import prompt
from tests.llm.verifying.test_worker import PREFIX, SIZE, ask, damage_block, start
from tests.llm.verifying.test_worker import Worker as VerifyingWorker
from tests.llm.weights.tiny_models import TINY_MODELS

from dynbus import Actor, DynbusError, Overloaded, handler
from dynbus.actors.documents.alerts import ALERTS, rules
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import run_server
from dynbus.bus.telemetry.telemetry import Telemetry
from dynbus.kvrouter import RouterConfig, open_router
from dynbus.llm import GenerateRequest, MockWorker, Step, StepFailed
from dynbus.llm.mock import MockConfig, MockEngine, Timing
from dynbus.testing import TestKit, run

PROMTOOL: Final = shutil.which("promtool")
SCRAPED_EVERY: Final = 15.0

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool: see CONTRIBUTING")


class Scrapes:
    """What Prometheus gets of this process, every 15 seconds.

    Attributes:
        telemetry: to be given to what is watched.
    """

    def __init__(self) -> None:
        self._reader = PrometheusMetricReader()
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(None, meters)
        self._series: dict[str, dict[int, float]] = {}
        self._count = 0

    def close(self) -> None:
        """Take no more part in what this process tells."""
        self._reader.shutdown()  # pyright: ignore[reportUnknownMemberType]

    def scrape(self, times: int = 1) -> None:
        """Have the values that there are now at the next times."""
        page = generate_latest(REGISTRY).decode()
        for _ in range(times):
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    if not sample.name.startswith(("dynbus_", "gen_ai_")):
                        continue
                    labels = {**sample.labels, "job": "dynbus", "instance": "here"}
                    text = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items())
                    self._series.setdefault(f"{sample.name}{{{text}}}", {})[self._count] = (
                        sample.value
                    )
            self._count += 1

    def value(self, name: str) -> float:
        """The sum of a metric as it is now."""
        families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
        return sum(one.value for each in families for one in each.samples if one.name == name)

    @asynccontextmanager
    async def every_interval(self) -> AsyncGenerator[None]:
        """Scrape while the block runs."""

        async def go_on() -> None:
            while True:
                self.scrape()
                await anyio.sleep(SCRAPED_EVERY)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(go_on)
            yield
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def kit(self) -> AsyncGenerator[TestKit]:
        """A test kit whose runtimes are scraped, in virtual time, while the block runs."""
        async with TestKit(telemetry=self.telemetry) as kit, self.every_interval():
            yield kit

    def fired(self, folder: Path) -> set[str]:
        """The alerts that fired at any time, by promtool; a target that is down has no series."""
        assert PROMTOOL is not None
        (folder / "alerts.yaml").write_text(json.dumps(rules()))
        series = [
            {
                "series": name,
                "values": " ".join(str(at.get(number, "_")) for number in range(self._count)),
            }
            for name, at in self._series.items()
        ]
        names = [alert.name for alert in ALERTS]
        ends = f"{int(SCRAPED_EVERY) * self._count}s"
        tests: list[dict[str, Any]] = [
            {
                "interval": "15s",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": "count(count_over_time(ALERTS"
                        f'{{alertname="{name}", alertstate="firing"}}[12h]))',
                        "eval_time": ends,
                        "exp_samples": [],
                    }
                    for name in names
                ],
            }
        ]
        (folder / "tests.yaml").write_text(
            json.dumps({"rule_files": ["alerts.yaml"], "evaluation_interval": "5s", "tests": tests})
        )
        done = subprocess.run(
            [PROMTOOL, "test", "rules", "tests.yaml"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        output = done.stdout + done.stderr
        fired = {name for name in names if f'alertname="{name}"' in output.replace("\\", "")}
        assert done.returncode == (1 if fired else 0), output
        return fired


Fault = Callable[[Scrapes], Coroutine[Any, Any, None]]
FAULTS: Final = dict[Fault, set[str]]()
"""The alerts that each fault sets off."""


def of(*alerts: str) -> Callable[[Fault], Fault]:
    """Register a fault with the alerts that it sets off."""

    def register(fault: Fault) -> Fault:
        FAULTS[fault] = set(alerts)
        return fault

    return register


class Worker(Actor, namespace="test"):
    """Does what it is told."""

    @handler
    async def work(self, word: str) -> str:
        """Work, or fail."""
        if word == "fail":
            raise ValueError("broken")
        if word == "refuse":
            raise Overloaded("full", retry_after=30.0)
        return word

    @handler(durable=True, tries=1)
    async def job(self, word: str) -> None:
        """Fail, or go on for ever."""
        if word == "fail":
            raise ValueError("broken")
        await asyncio.sleep(1e6)


async def works(kit: TestKit, word: str, times: int = 1) -> None:
    """Call `work` every five seconds."""
    for _ in range(times):
        with suppress(DynbusError):
            await kit.client(Worker, timeout=1.0).work(word)
        await anyio.sleep(5.0)


@of("DynbusDisconnected", "DynbusLeaseLapsed")
async def the_server_is_gone(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        instance = await kit.start(Worker)
        await anyio.sleep(60.0)
        await kit.kill(instance)
        await anyio.sleep(60.0)


@of("DynbusReconnectsOften")
async def a_connection_flaps(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        instance = await kit.start(Worker)
        link: Any = instance.actor.runtime.bus.data
        for _ in range(8):
            await anyio.sleep(20.0)
            link.disconnect()
            await anyio.sleep(1.0)
            link.reconnect()
        await anyio.sleep(30.0)


@of("DynbusMessagesRefused")
async def a_client_speaks_nonsense(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        instance = await kit.start(Worker)
        await works(kit, "well", 5)
        stranger = await kit.bus.connect(name="stranger")
        stranger.publish(instance.name.control_subject, b"\xff")
        await anyio.sleep(30.0)


@of("DynbusCallsFail")
async def a_handler_raises(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(Worker)
        await works(kit, "well", 5)
        await works(kit, "fail", 50)


@of("DynbusOverloaded")
async def all_instances_are_full(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(Worker)
        await works(kit, "well", 5)
        await works(kit, "refuse", 60)


STARTS: Final = itertools.count()


async def generates(client: MockWorker, tokens: int, prompt: int = 64) -> None:
    """Have an engine make tokens for a prompt of its own; an answer that fails is one, too."""
    first = prompt * next(STARTS)
    request = GenerateRequest(list(range(first, first + prompt)), tokens)
    with suppress(DynbusError):
        async for _ in client.generate(request):
            pass


@of("DynbusInstancesLost")
async def an_instance_is_cut_off(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        first = await kit.start(MockWorker)
        async with anyio.create_task_group() as calls:
            for _ in range(12):
                calls.start_soon(generates, kit.client(MockWorker), 2_000)
            await anyio.sleep(5.0)
            second = await kit.start(MockWorker)
            await kit.caller.discovery.wait_for_instance(second.name)
            bus: Any = first.actor.runtime.bus
            with kit.bus.partition(bus.data, bus.lane.connection, notice_after=60.0):
                await anyio.sleep(5.0)
        await anyio.sleep(30.0)


@of("DynbusJobsWait")
async def a_job_takes_for_ever(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(Worker)
        await kit.client(Worker).job.submit("")
        await anyio.sleep(900.0)


@of("DynbusDeadLetters")
async def a_job_fails_for_good(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(Worker)
        await anyio.sleep(30.0)
        await kit.client(Worker).job.submit("fail")
        await anyio.sleep(60.0)


@of("DynbusRouterDegraded")
async def an_engine_publishes_no_events(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(MockWorker)
        await kit.start(MockWorker, kv_events=False)
        async with open_router(kit.caller, MockWorker) as router:
            await generates(kit.client(MockWorker, routing=router), 5)
            await anyio.sleep(120.0)


class FaultyEngine(MockEngine):
    """An engine that stands still, or breaks, with its 100th step."""

    breaks = False

    def __init__(self, config: MockConfig) -> None:
        super().__init__(config)
        self._steps = 0

    def step(self) -> Step:
        self._steps += 1
        if self._steps < 100:
            return super().step()
        if self.breaks:
            raise StepFailed("CUDA error: an illegal memory access", ())
        return Step((), delay=1e6)


class BreakingEngine(FaultyEngine):
    """An engine that breaks."""

    breaks = True


class FaultyWorker(MockWorker, namespace="test"):
    """Has such an engine."""

    engine: ClassVar[type[FaultyEngine]] = FaultyEngine

    def make_engine(self) -> MockEngine:
        return self.engine(MockConfig(timing=Timing(speedup_ratio=0.05)))


class BreakingWorker(FaultyWorker, namespace="test"):
    """Has one that breaks."""

    engine = BreakingEngine


@of("DynbusEngineStalled")
async def an_engine_stands_still(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(FaultyWorker)
        with anyio.move_on_after(400.0):
            await generates(kit.client(FaultyWorker), 1000)


class HungEngine(MockEngine):
    """An engine that schedules nothing."""

    def step(self) -> Step:
        return Step((), delay=0.1)


class HungWorker(MockWorker, namespace="test"):
    """Has such an engine."""

    def make_engine(self) -> MockEngine:
        return HungEngine(MockConfig())


@of("DynbusHangs")
async def an_engine_hangs(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(HungWorker, hang_least=1.0)
        await anyio.sleep(30.0)
        with anyio.move_on_after(60.0):
            await generates(kit.client(HungWorker), 10)
        await anyio.sleep(30.0)


@of("DynbusEngineFails")
async def a_step_fails(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(BreakingWorker)
        await anyio.sleep(30.0)
        await generates(kit.client(BreakingWorker), 1000)
        await anyio.sleep(30.0)


@of("DynbusEnginesFull")
async def requests_want_more_blocks_than_there_are(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(MockWorker, blocks=33, block_size=16)
        client = kit.client(MockWorker)
        with anyio.move_on_after(200.0):
            async with anyio.create_task_group() as calls:
                for _ in range(8):
                    calls.start_soon(_again_and_again, client)


async def _again_and_again(client: MockWorker) -> None:
    while True:
        await generates(client, 20, prompt=500)


@of("DynbusRouterQueue")
async def every_candidate_has_enough_to_do(scrapes: Scrapes) -> None:
    async with scrapes.kit() as kit:
        await kit.start(MockWorker, max_num_seqs=1, speedup_ratio=0.1)
        config = RouterConfig(queue_threshold=0.01)
        async with open_router(kit.caller, MockWorker, config=config) as router:
            client = kit.client(MockWorker, routing=router)
            with anyio.move_on_after(500.0):
                async with anyio.create_task_group() as calls:
                    for _ in range(4):
                        calls.start_soon(_again_and_again, client)


@of("DynbusTransfersFail")
async def transfers_fail(scrapes: Scrapes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_engine(Path(folder))
        async with scrapes.kit() as kit:
            pair = Pair(kit, model)
            await pair.start("prefill")
            await pair.start("decode", disaggregation=REMOTE)
            for seed in range(60):
                pair.wire.fails = seed > 5
                async for _ in pair.client.generate(greedy(100, seed=seed)):
                    pass
                await anyio.sleep(5.0)


async def small_worker(kit: TestKit, folder: str, **options: Any) -> VerifyingWorker:
    """A worker of a tiny model that verifies each answer; it has heard of no request."""
    TINY_MODELS["llama"].write_folder(Path(folder))
    (Path(folder) / "tokenizer.json").write_bytes(tiny_json())
    return await start(kit, folder, **options)


@of("DynbusCacheDamaged")
async def a_cache_is_damaged(scrapes: Scrapes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with TestKit(telemetry=scrapes.telemetry) as kit:
            worker = await small_worker(kit, folder)
            verifier = worker.verification.verifier
            assert verifier is not None
            await ask(kit, [*PREFIX, 5])
            await ask(kit, [*PREFIX, 6])
            await eventually(lambda: verifier.figures.answers["verified"] == 1)
            scrapes.scrape(10)
            damage_block(worker, 2)
            await ask(kit, [*PREFIX, 7])
            await eventually(lambda: scrapes.value("dynbus_kv_verification_damages_total") == 1)
            scrapes.scrape(5)


@of("DynbusBlocksDamaged")
async def the_memory_of_a_host_is_damaged(scrapes: Scrapes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with TestKit(telemetry=scrapes.telemetry) as kit:
            worker = await small_worker(kit, folder, host_memory_mib=1.0)
            store, rates = worker.tiers.store, worker.tiers.rates
            assert store is not None
            assert rates is not None
            # Of a model as slow as larger ones are.
            rates.note_prefill(100, 1000.0)
            # What one prompt has takes the place of what the one before had.
            for number in range(8):
                await ask(kit, prompt(number, 30 * SIZE))
            await eventually(lambda: store.statistics.blocks > 0)
            scrapes.scrape(10)
            [region] = store.memory.regions
            data = (ctypes.c_uint8 * region.size).from_address(region.address)
            for at in range(region.size):
                data[at] ^= 1
            await ask(kit, prompt(0, 30 * SIZE))
            await eventually(lambda: scrapes.value("dynbus_tiers_host_damaged_total") > 0)
            scrapes.scrape(5)


async def asks(front: Served, words: str) -> None:
    """Ask a front end once; an error is an answer, too."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": words}]}
    async with httpx2.AsyncClient(timeout=30.0) as client:
        await client.post(f"{front.url}/v1/chat/completions", json=body)


@of("DynbusRequestsFail", "DynbusCallsFail")
async def a_model_fails(scrapes: Scrapes) -> None:
    async with served(telemetry=scrapes.telemetry) as front:
        await asks(front, "say well")
        scrapes.scrape(10)
        for _ in range(6):
            await asks(front, "fail")
            scrapes.scrape(5)


@of("DynbusFirstTokenLate")
async def a_model_is_slow(scrapes: Scrapes) -> None:
    async with served(telemetry=scrapes.telemetry) as front:
        await asks(front, "say well")
        scrapes.scrape(10)
        await asks(front, "late")
        scrapes.scrape(30)


@of("DynbusServerSlow", "DynbusUnsent")
async def a_server_stands_still(scrapes: Scrapes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = await run_server(store_dir=Path(folder))
        async with server_stopped(server):
            connection = await connect([server.url])
            scrapes.telemetry.follow_connection("data", connection)
            await connection.barrier()
            scrapes.scrape(10)
            server.pause()
            for _ in range(40):
                connection.publish("anything", bytes(1_000_000))
            await asyncio.sleep(0.5)
            scrapes.scrape(5)
            server.resume()
            await eventually(lambda: connection.round_trip > 0.3, what="the ping is answered")
            scrapes.scrape(10)
            await connection.close()


IN_REAL_TIME: Final = (
    a_model_fails,
    a_model_is_slow,
    a_server_stands_still,
    a_cache_is_damaged,
    the_memory_of_a_host_is_damaged,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_sets_off_its_alerts_and_no_other(fault: Fault, tmp_path: Path) -> None:
    scrapes = Scrapes()
    try:
        if fault in IN_REAL_TIME:
            anyio.run(fault, scrapes)
        else:
            run(fault(scrapes))
    finally:
        scrapes.close()

    assert scrapes.fired(tmp_path) == FAULTS[fault]


def test_every_alert_has_a_fault_that_sets_it_off() -> None:
    # A target that is down tells nothing: Prometheus says so by itself.
    assert set().union(*FAULTS.values()) == {one.name for one in ALERTS} - {"DynbusTargetDown"}
