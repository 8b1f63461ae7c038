"""`$SRV` answers as ADR-32 of NATS writes it: types, names of fields and kinds of values."""

# nats-py's own annotations have holes.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError
from pydantic import BaseModel
from tests.bus.near_side import serving
from tests.conditions import PATIENCE, eventually

from dynbus import Actor, ActorInstance, HandlerError, Runtime, call_options, handler
from dynbus.bus.clock import monotonic
from dynbus.bus.drops import DropReason
from dynbus.bus.extras import own_version
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.serving.services import JITTER_ABOVE, MAX_HELD_BACK, MAX_JITTER, ServiceResponder
from dynbus.testing import run

pytestmark = pytest.mark.anyio


class Prompt(BaseModel):
    text: str


class Splitting(Actor, abstract=True):
    @handler
    async def count(self, prompt: Prompt) -> int:
        if not prompt.text:
            raise RuntimeError("nothing to count")
        return len(prompt.text)

    @handler
    async def split(self, prompt: Prompt) -> AsyncGenerator[str, None]:
        for word in prompt.text.split():
            yield word


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(4)}"


@pytest.fixture
async def runtime(nats_server: RunningServer) -> AsyncIterator[Runtime]:
    async with Runtime.connect(nats_server.url) as runtime:
        yield runtime


@pytest.fixture
async def client(nats_server: RunningServer) -> AsyncIterator[Client]:
    client = await nats.connect(nats_server.url)
    yield client
    await client.close()


@pytest.fixture
async def instance(runtime: Runtime, namespace: str) -> ActorInstance:
    class Splitter(Splitting, namespace=namespace):
        pass

    return await runtime.start(Splitter, instance_id="one")


async def ask(client: Client, subject: str) -> dict[str, Any]:
    reply = await client.request(subject, b"", timeout=60)
    answer: dict[str, Any] = json.loads(reply.data)
    return answer


@pytest.mark.parametrize("verb", ["PING", "INFO", "STATS"])
@pytest.mark.parametrize("suffix", ["", ".{name}", ".{name}.one"])
async def test_every_subject_of_the_protocol_is_answered(
    client: Client, instance: ActorInstance, namespace: str, verb: str, suffix: str
) -> None:
    subject = f"$SRV.{verb}" + suffix.format(name=f"{namespace}_Splitter")
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)

    await client.publish(subject, b"", reply=inbox)

    # Other tests of the same server may answer `$SRV.PING` too.
    async with asyncio.timeout(60):
        while json.loads((await answers.next_msg(timeout=60)).data)["name"] != (
            f"{namespace}_Splitter"
        ):
            pass


async def test_ping_is_the_identity_and_nothing_else(
    client: Client, instance: ActorInstance, namespace: str, runtime: Runtime
) -> None:
    assert await ask(client, f"$SRV.PING.{namespace}_Splitter") == {
        "type": "io.nats.micro.v1.ping_response",
        "name": f"{namespace}_Splitter",
        "id": "one",
        "version": "1.0.0",
        "metadata": {
            "dynbus.namespace": namespace,
            "dynbus.incarnation": runtime.bus.incarnation,
        },
    }


async def test_the_name_and_the_version_are_as_the_protocol_wants_them(
    client: Client, instance: ActorInstance, namespace: str
) -> None:
    answer = await ask(client, f"$SRV.PING.{namespace}_Splitter")

    assert re.fullmatch(r"[A-Za-z0-9_-]+", answer["name"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", answer["version"])


async def test_info_lists_the_endpoints_with_their_schemas(
    client: Client, instance: ActorInstance, namespace: str
) -> None:
    info = await ask(client, f"$SRV.INFO.{namespace}_Splitter")

    schemas = [json.loads(one["metadata"].pop("dynbus.schema")) for one in info["endpoints"]]
    assert info["type"] == "io.nats.micro.v1.info_response"
    assert info["description"] == f"dynbus component {namespace}.Splitter"
    assert info["endpoints"] == [
        {
            "name": "count",
            "subject": f"{namespace}.Splitter.count",
            "queue_group": "Splitter",
            "metadata": {"dynbus.namespace": namespace, "dynbus.kind": "unary"},
        },
        {
            "name": "split",
            "subject": f"{namespace}.Splitter.split",
            "queue_group": "Splitter",
            "metadata": {"dynbus.namespace": namespace, "dynbus.kind": "stream"},
        },
    ]
    assert schemas[0] == {
        "request": Prompt.model_json_schema(),
        "response": {"type": "integer"},
    }


async def test_the_endpoint_that_info_names_can_be_called(
    client: Client, instance: ActorInstance, namespace: str
) -> None:
    info = await ask(client, f"$SRV.INFO.{namespace}_Splitter")

    reply = await client.request(info["endpoints"][0]["subject"], b'{"text":"abc"}', timeout=60)

    assert reply.data == b"3"


async def test_stats_begin_at_zero(client: Client, instance: ActorInstance, namespace: str) -> None:
    stats = await ask(client, f"$SRV.STATS.{namespace}_Splitter")

    assert stats["type"] == "io.nats.micro.v1.stats_response"
    said = stats["endpoints"][0]["data"]
    assert said.pop("version") == own_version()
    assert abs(said.pop("time") - time.time()) < PATIENCE
    assert stats["endpoints"][0] == {
        "name": "count",
        "subject": f"{namespace}.Splitter.count",
        "queue_group": "Splitter",
        "num_requests": 0,
        "num_errors": 0,
        "last_error": "",
        "processing_time": 0,
        "average_processing_time": 0,
        "data": {"running": 0, "waiting": 0, "draining": False},
    }


async def test_the_start_is_a_time_in_utc(
    client: Client, instance: ActorInstance, namespace: str
) -> None:
    stats = await ask(client, f"$SRV.STATS.{namespace}_Splitter")

    assert stats["started"].endswith("Z")
    age = datetime.now(UTC) - datetime.fromisoformat(stats["started"])
    assert timedelta(0) <= age < timedelta(seconds=30)


async def test_stats_count_what_really_happened(
    client: Client, instance: ActorInstance, namespace: str
) -> None:
    endpoint = instance.server.served["count"].address
    caller = await instance.actor.runtime.endpoint(endpoint).client()
    await caller.wait_for_instances(timeout=60)
    await caller.generate({"text": "abc"})
    with pytest.raises(HandlerError):
        await caller.generate({"text": ""})
    streamer = await instance.actor.runtime.endpoint(
        instance.server.served["split"].address
    ).client()
    for _ in range(2):
        assert len([item async for item in streamer.generate({"text": "a b c"})]) == 3

    count, split = (await ask(client, f"$SRV.STATS.{namespace}_Splitter"))["endpoints"][:2]

    assert (split["num_requests"], split["data"]["items"]) == (2, 6)
    assert (count["num_requests"], count["num_errors"]) == (2, 1)
    assert count["last_error"] == "HandlerError: RuntimeError: nothing to count"
    assert isinstance(count["processing_time"], int)
    assert isinstance(count["average_processing_time"], int)
    assert (
        0 < count["average_processing_time"] == pytest.approx(count["processing_time"] / 2, abs=1)
    )


async def test_stats_name_the_oldest_requests_where_they_are_asked_for(
    client: Client, runtime: Runtime, namespace: str
) -> None:
    begun, going_on = asyncio.Event(), asyncio.Event()

    class Waiting(Actor, namespace=namespace):
        @handler(concurrency=1)
        async def wait(self) -> int:
            begun.set()
            await going_on.wait()
            return 1

        @handler
        async def idle(self) -> int:
            return 1

    async def told(question: bytes) -> list[Any]:
        reply = await client.request(f"$SRV.STATS.{namespace}_Waiting", question, timeout=60)
        named: list[Any] = []
        for one in json.loads(reply.data)["endpoints"]:
            requests = one["data"].get("requests")
            named.append(requests and [(each["id"], each["waits"]) for each in requests])
        return named[:2]

    instance = await runtime.start(Waiting)
    caller = await runtime.endpoint(instance.server.served["wait"].address).client()
    await caller.wait_for_instances(timeout=60)
    calls: list[asyncio.Task[Any]] = []
    for name in ("first", "second", "third"):
        with call_options(request_id=name):
            calls.append(asyncio.ensure_future(caller.generate(None)))
        await eventually(lambda: instance.server.execution.load == len(calls))
    await begun.wait()

    assert await told(b'{"requests": 2}') == [[("first", False), ("second", True)], []]
    assert len((await told(b'{"requests": 1000000}'))[0]) == 3
    for question in (b"", b"[1]", b"\xff", b'{"requests": -1}', b" " * 2000 + b'{"requests": 1}'):
        assert await told(question) == [None, None]
    going_on.set()
    await asyncio.gather(*calls)
    assert await told(b'{"requests": 2}') == [[], []]


async def test_stats_name_the_oldest_requests_that_the_process_holds(
    client: Client, runtime: Runtime, namespace: str
) -> None:
    class Idle(Actor, namespace=namespace):
        @handler
        async def idle(self) -> int:
            return 1

    async def held(question: bytes) -> Any:
        reply = await client.request(f"$SRV.STATS.{namespace}_Idle", question, timeout=60)
        return json.loads(reply.data).get("held")

    await runtime.start(Idle)
    engines = [ComponentName("llm", "Engine"), ComponentName("other", "Engine")]
    holding = runtime.bus.held
    # One client has the id of another.
    with holding.hold("one", engines), holding.hold("one", engines[:1]), holding.hold("two", []):
        most, plain = await held(b'{"requests": 2}'), await held(b"")
    none = await held(b'{"requests": 2}')

    first, second = most["requests"]
    assert (first["id"], first["awaits"]) == ("one", ["llm.Engine", "other.Engine"])
    assert (second["id"], second["awaits"]) == ("one", ["llm.Engine"])
    assert 0 <= second["age"] <= first["age"] < 60
    assert (most["count"], plain, none["requests"]) == (3, None, [])
    assert most["process"] == runtime.bus.replies.client_id[:8]


async def test_a_stopped_instance_answers_no_more(
    client: Client, instance: ActorInstance, namespace: str
) -> None:
    await instance.stop()

    with pytest.raises(NoRespondersError):
        await ask(client, f"$SRV.PING.{namespace}_Splitter")


async def test_an_unsafe_reply_subject_is_not_answered(
    client: Client, instance: ActorInstance, namespace: str, runtime: Runtime
) -> None:
    trap = await client.subscribe(f"{namespace}.trap")
    before = runtime.bus.drops[DropReason.UNSAFE_REPLY]

    await client.publish(f"$SRV.PING.{namespace}_Splitter", b"", reply=f"{namespace}.trap")
    # The answer to the second request shows that the first one has been looked at.
    await ask(client, f"$SRV.PING.{namespace}_Splitter")

    assert runtime.bus.drops[DropReason.UNSAFE_REPLY] == before + 1
    assert trap.pending_msgs == 0


@pytest.mark.parametrize(
    ("known", "is_spread"), [(0, False), (JITTER_ABOVE, False), (JITTER_ABOVE + 1, True)]
)
def test_answers_are_spread_only_above_a_number_of_instances(known: int, is_spread: bool) -> None:
    async def story() -> float:
        async with serving() as given:
            await ServiceResponder(given.instance, {}).start()
            given.bus.count_instances(known)
            asked_at = monotonic()

            given.client.connection.publish("$SRV.PING", b"", reply=f"{given.client.base}.1")
            await given.client.reply()

            return monotonic() - asked_at

    waited = run(story())

    assert waited <= MAX_JITTER
    assert (waited > 0.0) is is_spread


async def test_answers_that_wait_for_their_pause_are_bounded_and_all_are_given(
    client: Client, instance: ActorInstance, namespace: str, runtime: Runtime
) -> None:
    runtime.bus.count_instances(JITTER_ABOVE + 1)
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)  # pyright: ignore[reportUnknownMemberType]
    asked = 2 * MAX_HELD_BACK

    for _ in range(asked):
        await client.publish(f"$SRV.PING.{namespace}_Splitter", b"", reply=inbox)
    for _ in range(asked):
        assert (await answers.next_msg(timeout=60)).data
