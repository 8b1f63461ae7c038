"""What the server is asked for, and how its refusals are named.

What JetStream does is in the contract suite, which the in-memory bus obeys as well.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bus.servers import server_stopped

from dynbus.bus.errors import ConfigError, Unavailable
from dynbus.bus.nats.api_requests import JetStreamError, unix_seconds
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.jetstream import NatsJetStream
from dynbus.bus.nats.server_process import RunningServer, run_server
from dynbus.bus.nats.stream_config import stream_request
from dynbus.bus.transport import Message, NoRollup, NoStream, StreamConfig, StreamLimits

SECOND = 1_000_000_000


@pytest.fixture
def stream() -> str:
    return f"S{secrets.token_hex(6)}"


def test_a_stream_without_limits_is_asked_for_without_any() -> None:
    request = stream_request(StreamConfig("name", ("a.>", "b")))

    assert request["subjects"] == ["a.>", "b"]
    assert (request["max_bytes"], request["max_msgs"], request["max_msgs_per_subject"]) == (
        -1,
        -1,
        -1,
    )
    assert request["max_age"] == 0
    assert request["duplicate_window"] == 120 * SECOND
    assert "allow_msg_ttl" not in request


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (StreamConfig("s", ("a",), work_queue=True), {"retention": "workqueue"}),
        (StreamConfig("s", ("a",)), {"retention": "limits", "storage": "file"}),
        (StreamConfig("s", ("a",), in_memory=True), {"storage": "memory"}),
        (StreamConfig("s", ("a",), replicas=3), {"num_replicas": 3}),
        (
            StreamConfig("s", ("a",), marker_ttl=2.0),
            {"allow_msg_ttl": True, "subject_delete_marker_ttl": 2 * SECOND},
        ),
    ],
)
def test_a_streams_kind_is_asked_for(config: StreamConfig, fields: dict[str, Any]) -> None:
    assert fields.items() <= stream_request(config).items()


@given(st.floats(0.1, 1e6), st.floats(0.1, 1e6))
def test_the_duplicate_window_never_exceeds_the_age(age: float, window: float) -> None:
    limits = StreamLimits(max_age=age, duplicate_window=window)

    request = stream_request(StreamConfig("s", ("a",), limits))

    # The server refuses a stream of which this does not hold.
    assert request["duplicate_window"] <= request["max_age"]


@pytest.mark.anyio
async def test_a_missing_stream_is_named_as_such(connection: NatsConnection, stream: str) -> None:
    with pytest.raises(NoStream, match=f"STREAM.INFO.{stream}"):
        await connection.jetstream.api(f"STREAM.INFO.{stream}", {}, timeout=5.0)


@pytest.mark.anyio
async def test_a_refusal_without_a_name_of_its_own_keeps_the_servers_number(
    connection: NatsConnection, stream: str
) -> None:
    config = stream_request(StreamConfig(stream, (f"{stream}.>",))) | {"num_replicas": 99}

    with pytest.raises(JetStreamError, match=f"STREAM.CREATE.{stream}") as raised:
        await connection.jetstream.api(f"STREAM.CREATE.{stream}", config, timeout=5.0)

    assert raised.value.error_code > 0


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"error": "no"}',
        b'{"error": {"err_code": "x"}}',
        b'{"state": {"messages": "many"}}',
        b'{"created": "yesterday", "state": {"messages": 1, "bytes": 1, "first_seq": 1,'
        b' "last_seq": 1}}',
    ],
)
async def test_an_answer_that_cannot_be_read_is_an_error_with_the_name_of_what_was_asked(
    connection: NatsConnection, stream: str, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    async def request(*_: object, **__: object) -> Message:
        return Message("", "", b"", answer)

    monkeypatch.setattr(connection, "request", request)

    with pytest.raises(JetStreamError, match=f"STREAM.INFO.{stream}"):
        await connection.jetstream.stream_info(stream)


@pytest.mark.anyio
async def test_a_cluster_that_elects_a_leader_is_asked_again_later(
    connection: NatsConnection, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def request(*_: object, **__: object) -> Message:
        error = b'{"code": 503, "err_code": 10008, "description": "temporarily unavailable"}'
        return Message("", "", b"", b'{"error": ' + error + b"}")

    monkeypatch.setattr(connection, "request", request)

    with pytest.raises(Unavailable, match="temporarily unavailable") as raised:
        await connection.jetstream.consumer_info(stream, "takers")

    assert raised.value.retryable


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("code", "description"),
    [
        (10158, "duplicate message id is in process"),
        (10163, "expected last sequence per subject temporarily unavailable"),
        (10167, "too many requests"),
    ],
)
async def test_what_is_stored_while_the_same_is_under_way_is_stored_again_later(
    connection: NatsConnection,
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    description: str,
) -> None:
    async def request(*_: object, **__: object) -> Message:
        error = {"code": 503, "err_code": code, "description": description}
        return Message("", "", b"", msgspec.json.encode({"error": error}))

    monkeypatch.setattr(connection, "request", request)

    with pytest.raises(Unavailable, match=description) as raised:
        await connection.jetstream.publish(f"{stream}.a", b"", timeout=1.0)

    assert raised.value.retryable


@pytest.mark.anyio
async def test_a_consumer_whose_messages_nobody_acknowledges_is_described_too(
    connection: NatsConnection, stream: str
) -> None:
    jetstream = connection.jetstream
    await jetstream.ensure_stream(StreamConfig(stream, (f"{stream}.>",)))
    plain = {"name": "plain", "ack_policy": "none", "deliver_subject": f"_INBOX.{stream}"}
    request = {"stream_name": stream, "action": "create", "config": plain}
    await jetstream.api(f"CONSUMER.CREATE.{stream}.plain", request, timeout=5.0)

    info = await jetstream.consumer_info(stream, "plain")

    await jetstream.delete_stream(stream)
    assert info.ack_wait == 0.0


@pytest.mark.anyio
async def test_a_message_that_cannot_be_read_is_an_error_too(
    connection: NatsConnection, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def request(*_: object, **__: object) -> Message:
        return Message("", "", b"", b'{"message": {"subject": "s", "seq": 1, "data": "?"}}')

    monkeypatch.setattr(connection, "request", request)

    with pytest.raises(JetStreamError, match=f"STREAM.MSG.GET.{stream}"):
        await connection.jetstream.last(stream, "s")
    with pytest.raises(JetStreamError, match=f"STREAM.PURGE.{stream}"):
        await connection.jetstream.purge(stream)
    with pytest.raises(JetStreamError, match="publish to s"):
        await connection.jetstream.publish("s", b"")


@pytest.mark.anyio
async def test_a_server_without_jetstream_is_told_from_a_silent_one(
    tmp_path: Path, stream: str
) -> None:
    server = await run_server(store_dir=tmp_path, config="jetstream: false")

    async with server_stopped(server):
        connection = await connect([server.url])
        try:
            with pytest.raises(Unavailable, match="is JetStream enabled"):
                await connection.jetstream.stream_info(stream)
        finally:
            await connection.close()


@pytest.mark.anyio
async def test_the_server_takes_every_kind_of_stream(
    connection: NatsConnection, stream: str
) -> None:
    limits = StreamLimits(1024 * 1024, 3600.0, 1000, 10, 5.0)
    config = StreamConfig(stream, (f"{stream}.>",), limits, marker_ttl=2.0, in_memory=True)
    await connection.jetstream.ensure_stream(config)

    answer = await connection.jetstream.api(f"STREAM.INFO.{stream}", {}, timeout=5.0)
    await connection.jetstream.delete_stream(stream)

    asked = stream_request(config)
    assert {key: answer["config"].get(key) for key in asked if asked[key]} == {
        key: value for key, value in asked.items() if value
    }


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"subjects": ["{stream}.>", "{stream}-of-others.>"]}, "subjects"),
        ({"retention": "interest"}, "retention = interest, not limits"),
        ({"sources": [{"name": "{stream}-elsewhere"}]}, "sources"),
        ({"republish": {"src": ">", "dest": "shown.>"}}, "republish"),
        ({"subject_transform": {"src": "{stream}.>", "dest": "{stream}.moved.>"}}, "transform"),
        ({"no_ack": True}, "no_ack = True, not none"),
        ({"allow_msg_ttl": False}, "allow_msg_ttl = none, not True"),
        ({"allow_rollup_hdrs": False, "subject_delete_marker_ttl": 0}, "allow_rollup_hdrs = none"),
    ],
)
async def test_a_stream_that_takes_from_others_or_tells_them_is_refused(
    connection: NatsConnection, stream: str, other: dict[str, Any], named: str
) -> None:
    config = StreamConfig(stream, (f"{stream}.>",), marker_ttl=60.0, in_memory=True)
    given = json.loads(json.dumps(other).replace("{stream}", stream))
    if "allow_msg_ttl" in given:
        config = config._replace(marker_ttl=None)
    made = stream_request(config) | given
    await connection.jetstream.api(f"STREAM.CREATE.{stream}", made, timeout=5.0)

    wanted = config._replace(marker_ttl=60.0)
    with pytest.raises(ConfigError, match=f"stream {stream} exists with .*{named}.*dynbus setup"):
        await connection.jetstream.ensure_stream(wanted)
    await connection.jetstream.delete_stream(stream)


@pytest.mark.anyio
@pytest.mark.parametrize("marker_ttl", [None, 0])
async def test_a_stream_of_an_earlier_version_takes_rollups_no_more(
    connection: NatsConnection, stream: str, marker_ttl: float | None
) -> None:
    config = StreamConfig(stream, (f"{stream}.>",), marker_ttl=marker_ttl, in_memory=True)
    earlier = stream_request(config) | {"allow_rollup_hdrs": True}
    if marker_ttl is not None:
        earlier["subject_delete_marker_ttl"] = 60 * SECOND
    await connection.jetstream.api(f"STREAM.CREATE.{stream}", earlier, timeout=5.0)
    await connection.jetstream.publish(f"{stream}.a", b"kept")

    await connection.jetstream.ensure_stream(config)

    with pytest.raises(NoRollup):
        await connection.jetstream.publish(f"{stream}.b", b"", headers={"Nats-Rollup": "all"})
    kept = await connection.jetstream.last(stream, f"{stream}.a")
    found = await connection.jetstream.stream_config(stream)
    await connection.jetstream.delete_stream(stream)
    assert kept is not None
    assert found == config._replace(replicas=1)


@pytest.mark.anyio
@pytest.mark.parametrize("looks", [1, 3])
async def test_a_stream_is_there_once_it_was_made_whoever_else_makes_it_at_once(
    connection: NatsConnection, stream: str, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    jetstream = NatsJetStream(connection)
    api, calls = jetstream.api, list[str]()

    async def asked(call: str, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        calls.append(call.split(".")[1])
        # As servers of a cluster do that make a stream for several at once.
        if calls[-1] == "INFO" and calls.count("INFO") <= 1 + looks:
            raise NoStream(f"{call}: stream not found")
        return await api(call, request, timeout=timeout)

    monkeypatch.setattr(jetstream, "api", asked)

    config = StreamConfig(stream, (f"{stream}.>",), in_memory=True, replicas=1)
    await jetstream.ensure_stream(config)
    await jetstream.delete_stream(stream)

    assert calls == ["INFO", "CREATE", *["INFO"] * (looks + 1), "DELETE"]


@pytest.mark.anyio
async def test_the_limits_of_a_stream_are_its_operators(
    connection: NatsConnection, stream: str
) -> None:
    config = StreamConfig(stream, (f"{stream}.>",), in_memory=True)
    await connection.jetstream.ensure_stream(config)
    narrow = stream_request(config._replace(limits=StreamLimits(max_messages=7)))
    await connection.jetstream.api(f"STREAM.UPDATE.{stream}", narrow, timeout=5.0)

    await connection.jetstream.ensure_stream(config)
    found = await connection.jetstream.stream_config(stream)
    await connection.jetstream.delete_stream(stream)

    assert found.limits.max_messages == 7


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-01T00:00:00Z", 1767225600.0),
        ("2026-01-01T00:00:00.5Z", 1767225600.5),
        ("2026-01-01T01:00:00.5+01:00", 1767225600.5),
        ("2026-01-01T00:00:00.123456789Z", 1767225600.123456),
    ],
)
def test_the_servers_times_are_read_with_any_number_of_digits(text: str, seconds: float) -> None:
    assert unix_seconds(text) == seconds


@given(st.integers(0, 2**32), st.integers(0, 10**9 - 1))
def test_the_servers_times_are_read_to_the_microsecond(whole: int, nanoseconds: int) -> None:
    moment = datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    # Go leaves out zeros at the end.
    digits = f"{nanoseconds:09d}".rstrip("0")
    text = f"{moment}.{digits}Z" if digits else f"{moment}Z"

    assert unix_seconds(text) == pytest.approx(whole + nanoseconds / 1e9, abs=1.5e-6)


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00Z"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="."):
        unix_seconds(text)


@pytest.mark.anyio
async def test_instances_that_make_a_stream_at_the_same_time_take_each_other_for_no_other_region(
    nats_server: RunningServer,
) -> None:
    name = f"S{secrets.token_hex(6)}"
    connections = [await connect([nats_server.url]) for _ in range(8)]
    try:
        for number in range(40):
            config = StreamConfig(f"{name}{number}", (f"{name}.{number}",))
            async with asyncio.TaskGroup() as making:
                for connection in connections:
                    ensuring = connection.jetstream.ensure_stream(config, probe=f"{name}.{number}")
                    making.create_task(ensuring)
    finally:
        for connection in connections:
            await connection.close()
