"""A survey is bounded, and passes over what no instance of ours would say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bus.servers import server_stopped, survey_of

from dynbus.bus.commands import survey as module
from dynbus.bus.commands.survey import InstanceReport
from dynbus.bus.context import MAX_ID_LENGTH
from dynbus.bus.errors import Unavailable
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer, free_port, run_server
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_subject
from dynbus.bus.serving.services import MOST_REQUESTS
from dynbus.bus.transport import Message


def stats(instance_id: str = "i1", **changes: Any) -> bytes:
    answer: dict[str, Any] = {
        "name": "demo_Hello",
        "id": instance_id,
        "started": "2026-01-01T00:00:00Z",
        "metadata": {"dynbus.namespace": "demo"},
        "endpoints": [{"name": "greet", "data": {"running": 1, "waiting": 0}}],
    }
    return json.dumps(answer | changes).encode()


@pytest.mark.parametrize(
    "data",
    [
        stats(id="\x1b[2J"),
        stats(id=""),
        stats(name="demo_"),
        stats(name="demo_a.b"),
        stats(name="_Hello", metadata={"dynbus.namespace": ""}),
        stats(metadata={"dynbus.namespace": "de mo"}, name="de mo_Hello"),
        b'{"name":"a_b","id":"c","x":' + b"[" * 100_000,
        b'{"name":"\xff"}',
    ],
)
def test_an_answer_with_a_name_that_is_none_is_passed_over(data: bytes) -> None:
    assert InstanceReport.read(data) is None


def at_endpoint(data: dict[str, Any], **counts: int) -> bytes:
    return stats(endpoints=[{"name": "greet", "data": data, **counts}])


def held(requests: int, components: int, request_id: str = "a") -> bytes:
    one = {"id": request_id, "age": 1.0, "awaits": ["demo.Hello"] * components}
    return stats(held={"process": "p", "count": 1, "requests": [one] * requests})


@pytest.mark.parametrize(
    "data",
    [
        at_endpoint({}, processing_time=10**400),
        at_endpoint({}, num_requests=10**400),
        at_endpoint({"running": 2**70}),
        at_endpoint({"waiting": -1}),
        at_endpoint({"requests": [{"id": "a" * 200}]}),
        at_endpoint({"requests": [{"id": "a"}] * 10_000}),
        stats(endpoints=[{"name": "a" * 1000, "data": {}}]),
        # Each of them is a line, which has the id: megabytes would be gigabytes.
        held(1, 50_000),
        held(50_000, 1),
        held(1, 1, "a" * 500_000),
    ],
)
def test_an_answer_that_cannot_be_counted_or_makes_much_of_little_is_passed_over(
    data: bytes,
) -> None:
    assert InstanceReport.read(data) is None


def test_an_answer_with_as_many_requests_as_an_instance_names_is_read() -> None:
    requests = [{"id": "a" * MAX_ID_LENGTH}] * MOST_REQUESTS
    of_endpoint = InstanceReport.read(at_endpoint({"requests": requests}))
    of_process = InstanceReport.read(held(MOST_REQUESTS, 8, "a" * MAX_ID_LENGTH))

    assert of_endpoint is not None
    assert len(of_endpoint.requests or ()) == MOST_REQUESTS
    assert of_process is not None
    assert of_process.held is not None


@given(
    st.one_of(st.binary(max_size=80), st.text(max_size=30).map(lambda text: stats(started=text)))
)
def test_no_answer_raises(data: bytes) -> None:
    found = InstanceReport.read(data)

    assert found is None or found.instance_id == "i1"


@pytest.mark.anyio
async def test_without_jetstream_the_instances_that_answer_are_shown(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = await run_server(store_dir=tmp_path_factory.mktemp("s"), config="jetstream: false")
    async with server_stopped(server):
        connection = await connect([server.url])

        def respond(message: Message) -> None:
            connection.publish(message.reply, stats())

        connection.subscribe("$SRV.STATS", respond)
        await connection.barrier()
        found = await survey_of(server.url)
        await connection.close()

    assert [(row.instance_id, row.state) for row in found.rows] == [("i1", "unlisted")]
    assert "the records cannot be read" in found.notice
    assert "JetStream" in found.notice


@pytest.mark.anyio
async def test_a_jetstream_that_is_silent_costs_bounded_time(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.0)
    connection = await connect([own_server.url])
    await connection.jetstream.ensure_stream(INSTANCES_STREAM)
    await connection.close()

    before = asyncio.all_tasks()
    found = await survey_of(own_server.url)

    assert found.rows == []
    assert "reading KV_dynbus_instances timed out after 0 s" in found.notice
    assert asyncio.all_tasks() == before


@pytest.mark.anyio
async def test_a_record_that_speaks_of_another_instance_than_its_key_is_not_listed(
    own_server: RunningServer,
) -> None:
    connection = await connect([own_server.url])
    await connection.jetstream.ensure_stream(INSTANCES_STREAM)
    for key, instance_id in (("good", "good"), ("other", "another"), ("odd", "\x1b[2J")):
        record = InstanceRecord(
            namespace="demo",
            component="Hello",
            instance_id=instance_id,
            incarnation="x",
            endpoints={},
            started=1.0,
            address="",
        )
        subject = record_subject("demo", "Hello", key)
        await connection.jetstream.publish(subject, encode_record(record), ttl=60)
    await connection.close()

    found = await survey_of(own_server.url)

    assert [row.instance_id for row in found.rows] == ["good"]


@pytest.mark.anyio
async def test_a_server_that_is_not_there_is_said_to_be_unavailable() -> None:
    with pytest.raises(Unavailable):
        await survey_of(f"nats://127.0.0.1:{free_port()}")
