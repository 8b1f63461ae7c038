"""What dynbus keeps in JetStream: the page of the protocol, `dynbus setup` and use agree on it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio.to_thread
import msgspec
import pytest
from click.testing import CliRunner
from tests.conditions import eventually
from tests.llm.models.tiny_model import tiny_folder
from tests.transfer.kv_blocks import small_layout

from dynbus import Actor, ConfigError, EndpointName, Runtime, Topic, handler, subscribe
from dynbus.bus.flight import FlightRecorder, Sampling
from dynbus.bus.nats.connection import NatsConnection
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.nats.stream_config import stream_request
from dynbus.bus.protocol.names import ComponentName, job_log_stream, topic_stream, work_stream
from dynbus.bus.records.instance_records import INSTANCES_STREAM
from dynbus.bus.transport import StoredMessage
from dynbus.bus.work_queue import DeadLetters, DeathReason, WorkQueue, dead_letter_config
from dynbus.kvrouter import KvEventPublisher
from dynbus.kvrouter.stream import SnapshotStore
from dynbus.kvrouter.stream.election import Election
from dynbus.kvrouter.stream.snapshots import Coverage
from dynbus.llm import ModelInput, ModelType, register_llm
from dynbus.llm.batches.store import BatchStore
from dynbus.llm.commands.setting_up import needed_in
from dynbus.llm.commands.setting_up import set_up as set_up_at
from dynbus.llm.commands.setup import setup
from dynbus.llm.disaggregated.settings import change_settings
from dynbus.llm.responses.store import ResponseStore
from dynbus.llm.resumable.store import LOGS_STREAM, StreamStore
from dynbus.llm.tenants.limits import Limits, tenant_quota
from dynbus.llm.tenants.recording import UsageRecorder
from dynbus.llm.tenants.tenants import Tenants
from dynbus.llm.tenants.usage import Payer, Tally
from dynbus.spi import NeededStream
from dynbus.transfer.descriptors import AgentDescription
from dynbus.transfer.exchange import MAX_RECORD_BYTES, announced
from dynbus.transfer.layout import Region

from .workload import Source

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
DEMO = {"ns": "demo", "component": "Printer", "endpoint": "print", "topic": "printed"}
HANDLER = "Printer.print"
TOPIC = "printed"


def listed() -> set[str]:
    """The streams of the page's table, for the namespace `demo` and one durable handler, of a
    server that is of no region."""
    table = PAGE.read_text().partition("## Bucket, stream, consumer")[2].partition("\n### ")[0]
    found: set[str] = set()
    for what, name in re.findall(r"^\| ([^|]+) \| ([^|]+) \|", table, re.MULTILINE):
        for spelled in re.findall(r"`([^`]+)`", name):
            if "consumer" in what or "region" in what:
                continue
            stream = spelled.format(**DEMO)
            if "object bucket" in name:
                stream = f"OBJ_{stream}"
            elif not stream.startswith(("KV_", "OBJ_", "DYNBUS_")):
                stream = f"KV_{stream}"
            found.add(stream)
    return found


async def kept(connection: NatsConnection) -> dict[str, dict[str, Any]]:
    """The streams of a server by name, each as it is set up, with its durable consumers."""
    jetstream = connection.jetstream
    names: list[str] = (await jetstream.api("STREAM.NAMES", {}, timeout=5.0)).get("streams") or []
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        config: dict[str, Any] = (await jetstream.api(f"STREAM.INFO.{name}", {}, timeout=5.0))[
            "config"
        ]
        answer = await jetstream.api(f"CONSUMER.LIST.{name}", {}, timeout=5.0)
        consumers: list[dict[str, dict[str, Any]]] = answer["consumers"] or []
        durable = [one["config"] for one in consumers if one["config"].get("durable_name")]
        for one in [config, *durable]:
            one.pop("metadata", None)
        found[name] = {**config, "consumers": durable}
    return found


class Page(msgspec.Struct):
    name: str


class Printer(Actor, namespace="demo"):
    @handler(durable=True)
    async def print(self, page: str) -> str:
        return page


sold = Topic("sold", str, namespace="demo", retain="1h")


class Hearing(Actor, namespace="demo"):
    @subscribe(sold, group="books", from_="all", ack_wait=5.0)
    async def book(self, page: str) -> None: ...

    @subscribe(sold, group="audit", ordered=True, from_=datetime(2026, 1, 31, 6, tzinfo=UTC))
    async def check(self, page: str) -> None: ...


class Ordered(Actor, namespace="demo"):
    @handler(durable=True, ordered_by="name")
    async def take(self, page: Page) -> None: ...


async def generate(request: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield {"token_ids": [1]}


async def use_everything(exits: AsyncExitStack, runtime: Runtime, folder: Path) -> None:
    """Have each part of dynbus keep something."""
    bus, jetstream = runtime.bus, runtime.bus.data.jetstream
    await runtime.start(Source)
    publisher = KvEventPublisher(bus.data, "demo", "Engine", "one", background=bus.background)
    await exits.enter_async_context(publisher)
    election = Election(jetstream, "demo", "Engine", "one")
    await exits.enter_async_context(election)
    await eventually(lambda: election.is_elected)
    coverage = Coverage(sequence=1, created=1.0)
    await SnapshotStore(jetstream, "demo").write(
        "Engine", coverage, b"nothing", blocks=0, instances=0
    )
    large = AgentDescription(
        "demo.Engine.1", "e", small_layout(), (Region(2**20, 2**20),) * 2, bytes(MAX_RECORD_BYTES)
    )
    await exits.enter_async_context(announced(bus, bus.background, large))
    await exits.enter_async_context(
        runtime.serve_endpoints("demo", "Worker", {"generate": generate})
    )
    endpoint = runtime.endpoint("demo.Worker.generate")
    await register_llm(ModelInput.Tokens, ModelType.Chat, endpoint, tiny_folder(folder), "tiny")
    await change_settings(jetstream, ComponentName("demo", "Engine"), {"local_prompt_tokens": 1})
    store = StreamStore(runtime, lambda _: False)
    exits.callback(store.close)
    await store.make_ready()
    await BatchStore(jetstream).ensure()
    await ResponseStore(runtime).ensure()
    tenants = await exits.enter_async_context(Tenants(runtime, from_bus=True))
    limits = Limits(requests_per_minute=1)
    await tenants.counts.take(tenant_quota("ada", limits), limits.counted)
    usage = await exits.enter_async_context(UsageRecorder(runtime, "front"))
    usage.mark(Tally(Payer("ada", "k", "tiny")), "a-stream")
    printer = await runtime.start(Printer)
    assert await runtime.client(Printer).print("a page") == "a page"
    await printer.stop()
    queue = WorkQueue(bus, EndpointName("demo", "Printer", "print"))
    await queue.put(b"", job_id="one")
    async with queue.take() as taker:
        await (await anext(taker)).bury("no paper")
    await Topic(TOPIC, bytes, namespace="demo").publish(b"", runtime=runtime)
    recorder = FlightRecorder(bus.data, bus.background, "demo", Sampling(10**6))
    await eventually(lambda: recorder.is_ready)


def set_up(server: RunningServer, *arguments: str) -> dict[str, str]:
    """What `dynbus setup` says of each stream."""
    result = CliRunner().invoke(
        setup,
        [
            "demo",
            "--durable",
            HANDLER,
            "--topic",
            TOPIC,
            "--json",
            "--nats",
            server.url,
            *arguments,
        ],
    )
    assert result.exit_code in (0, 1), result.output
    return {one["stream"]: one["status"] for one in json.loads(result.output)}


async def test_what_is_used_is_what_setup_makes_and_what_the_page_lists(
    own_server: RunningServer, tmp_path: Path
) -> None:
    other = await run_server(store_dir=tmp_path / "other")
    try:
        async with (
            Runtime.connect(own_server.url) as using,
            Runtime.connect(other.url) as made,
        ):
            async with AsyncExitStack() as exits:
                await use_everything(exits, using, tmp_path / "tiny")
            statuses = await anyio.to_thread.run_sync(set_up, other)
            by_use, by_setup = [
                await kept(cast(NatsConnection, runtime.bus.data)) for runtime in (using, made)
            ]
    finally:
        await other.stop()

    assert set(by_setup) == listed()
    assert by_use == by_setup
    assert statuses == dict.fromkeys(by_setup, "made")
    assert {one["num_replicas"] for one in by_setup.values()} == {1}


async def test_an_ordered_handler_is_set_up_as_it_would_make_its_own_streams(
    own_server: RunningServer, tmp_path: Path
) -> None:
    name = EndpointName("demo", "Ordered", "take")
    streams = {work_stream(name), job_log_stream(name)}
    other = await run_server(store_dir=tmp_path / "other")
    try:
        async with Runtime.connect(own_server.url) as using, Runtime.connect(other.url) as made:
            await using.start(Ordered)
            needed = needed_in("demo", [], durable=["Ordered.take,ordered=true"])
            outcomes = await set_up_at(made.bus.data.jetstream, needed)
            by_use, by_setup = [
                await kept(cast(NatsConnection, runtime.bus.data)) for runtime in (using, made)
            ]
    finally:
        await other.stop()

    assert {one.stream for one in outcomes} > streams
    assert {one: by_use[one] for one in streams} == {one: by_setup[one] for one in streams}


async def test_groups_are_set_up_as_they_would_make_their_own_consumers(
    own_server: RunningServer, tmp_path: Path
) -> None:
    needed = needed_in(
        "demo",
        [],
        topics=["sold,retain=1h"],
        groups=[
            "Hearing.book,topic=sold,group=books,from=all,ack_wait=5",
            "demo.Hearing.check,topic=sold,group=audit,ordered=true,from=2026-01-31T07:00+01:00",
        ],
    )
    name = EndpointName("demo", "Hearing", "check")
    streams = {topic_stream("demo", "sold"), job_log_stream(name)}
    other = await run_server(store_dir=tmp_path / "other")
    try:
        async with Runtime.connect(own_server.url) as using, Runtime.connect(other.url) as made:
            jetstream = made.bus.data.jetstream
            await using.start(Hearing)
            missing = await set_up_at(jetstream, needed[-1:], dry_run=True)
            await set_up_at(jetstream, [NeededStream(one.stream) for one in needed])
            without = await set_up_at(jetstream, needed[-1:], dry_run=True)
            first = await set_up_at(jetstream, needed)
            second = await set_up_at(jetstream, needed)
            taken = needed_in("demo", [], groups=["A.b,topic=sold,group=books"])
            differs = await set_up_at(jetstream, taken[-1:])
            by_use, by_setup = [
                await kept(cast(NatsConnection, runtime.bus.data)) for runtime in (using, made)
            ]
    finally:
        await other.stop()

    outcomes = [missing, without, first, second, differs]
    assert [one[-1].status for one in outcomes] == [
        "missing",
        "missing",
        "made",
        "there",
        "differs",
    ]
    assert "books is that of demo.Hearing.book" in differs[-1].text
    assert {one: by_use[one] for one in streams} == {one: by_setup[one] for one in streams}


async def test_setup_changes_nothing_that_is_there_and_says_what_it_found(
    own_server: RunningServer,
) -> None:
    missing = await anyio.to_thread.run_sync(partial(set_up, own_server, "--dry-run"))
    async with Runtime.connect(own_server.url) as runtime:
        connection = cast(NatsConnection, runtime.bus.data)
        assert await kept(connection) == {}
        narrow = stream_request(INSTANCES_STREAM) | {"max_bytes": 1024 * 1024}
        await connection.jetstream.api(f"STREAM.CREATE.{INSTANCES_STREAM.name}", narrow, timeout=5)
        shown = stream_request(LOGS_STREAM) | {"republish": {"src": ">", "dest": "shown.>"}}
        await connection.jetstream.api(f"STREAM.CREATE.{LOGS_STREAM.name}", shown, timeout=5)
        before = await kept(connection)

        first = await anyio.to_thread.run_sync(partial(set_up, own_server))
        second = await anyio.to_thread.run_sync(partial(set_up, own_server))
        after = await kept(connection)

    others = listed() - {INSTANCES_STREAM.name, LOGS_STREAM.name}
    assert missing == dict.fromkeys(listed(), "missing")
    told = {INSTANCES_STREAM.name: "differs", LOGS_STREAM.name: "refused"}
    assert first == dict.fromkeys(others, "made") | told
    assert second == dict.fromkeys(others, "there") | told
    assert {name: after[name] for name in before} == before


async def test_records_and_dead_letters_go_into_no_stream_that_shows_them(
    own_server: RunningServer,
) -> None:
    """Also where such a stream was made before anybody else came."""
    shown = {"republish": {"src": ">", "dest": "shown.>"}}
    letters = dead_letter_config("demo")
    queue = EndpointName("demo", "Printer", "print")
    async with Runtime.connect(own_server.url) as runtime:
        jetstream = cast(NatsConnection, runtime.bus.data).jetstream
        for config in (INSTANCES_STREAM, letters):
            made = stream_request(config) | shown
            await jetstream.api(f"STREAM.CREATE.{config.name}", made, timeout=5.0)

        with pytest.raises(ConfigError, match="KV_dynbus_instances exists with republish = "):
            await runtime.start(Source)
        job = StoredMessage("demo.Printer._work.print.normal.one", 1, 1.0, {}, b"secret")
        with pytest.raises(ConfigError, match="DYNBUS_DEAD_demo exists with republish = "):
            await DeadLetters(jetstream, "demo").put(
                queue, "one", job, DeathReason.REFUSED, "no paper", 1, lane="normal"
            )
        infos = [
            await jetstream.stream_info(name) for name in (INSTANCES_STREAM.name, letters.name)
        ]

    assert [info.messages for info in infos] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["demo.Printer"], "namespace"),
        (["demo", "--queue", "print"], "write COMPONENT.ENDPOINT"),
        (["demo", "--queue", "A.b,tries=1"], "there are ack_wait, max_jobs, max_bytes"),
        (["demo", "--queue", "A.b,max_jobs=x"], "max_jobs = 'x' is not a number"),
        (["demo", "--queue", "A.b,max_jobs=0"], "max_jobs = 0 is not usable"),
        (["demo", "--topic", "a..b"], "'a..b' is not a valid name"),
        (["demo", "--topic", "a.b,tries=1"], "there are retain, max_bytes"),
        (["demo", "--topic", "a.b,retain=soon"], "topic a.b: retain='soon' must be"),
        (["demo", "--topic", "a.b,max_bytes=0"], "max_bytes=0 is not usable"),
        (["demo", "--group", "A.b,topic=c"], "is not a group: write [NAMESPACE.]COMPONENT.METHOD"),
        (["demo", "--group", "A,topic=c,group=d"], "is not a group: write"),
        (["demo", "--group", "A.b,topic=c,group=d.e"], "group 'd.e' is not a valid name"),
        (["demo", "--group", "A.b,topic=c,group=d,from=monday"], "from = 'monday' is none of"),
        (["demo", "--group", "A.b,topic=c,group=d,tries=1"], "there are topic, group, from"),
        (["demo", "--durable", "A"], "write COMPONENT.ENDPOINT"),
        (["demo", "--durable", "A.b,ordered=1"], "ordered = '1' is not true or false"),
    ],
)
def test_setup_refuses_what_is_no_name_and_no_queue(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(setup, arguments)

    assert isinstance(result.exception, ConfigError)
    assert why in str(result.exception)
