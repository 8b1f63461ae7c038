"""The stream of events is made with limits, and one that does not fit is refused by name."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from dynbus.bus.errors import ConfigError
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.transport import StreamLimits
from dynbus.kvrouter.stream.event_stream import EventStream, ensure_stream
from dynbus.testing import run

STREAM = EventStream("demo")


def test_events_of_a_namespace_have_one_stream_that_is_bounded_and_drops_the_oldest() -> None:
    config = STREAM.config

    assert config.name == "DYNBUS_EVENTS_demo"
    assert config.subjects == ("demo.*._kv.*.*",)
    assert config.limits == StreamLimits(
        max_bytes=512 * 1024 * 1024, max_age=86400.0, duplicate_window=120.0, discard_new=False
    )


def test_a_stream_that_is_there_with_these_settings_is_taken_as_it_is() -> None:
    async def story() -> int:
        jetstream = (await MemoryBus().connect()).jetstream
        await ensure_stream(jetstream, STREAM)
        await jetstream.publish("demo.Engine._kv.a.0", b"")
        await ensure_stream(jetstream, STREAM)
        return (await jetstream.stream_info(STREAM.name)).messages

    assert run(story()) == 1


CHANGES = [
    ({"max_bytes": 1000}, "max_bytes = 536870912, not 1000"),
    ({"max_age": 60.0}, r"max_age = 86400\.0, not 60\.0, duplicate_window = 120\.0, not 60\.0"),
    ({"in_memory": True}, "in_memory = False, not True"),
]


@pytest.mark.parametrize(("change", "text"), CHANGES)
def test_another_setting_is_named_with_the_remedy(change: dict[str, Any], text: str) -> None:
    async def story() -> None:
        jetstream = (await MemoryBus().connect()).jetstream
        await ensure_stream(jetstream, STREAM)
        await ensure_stream(jetstream, replace(STREAM, **change))

    with pytest.raises(ConfigError, match=f"{text}: give EventStream its settings, or change"):
        run(story())


@pytest.mark.anyio
@pytest.mark.parametrize(("change", "text"), CHANGES)
async def test_a_server_says_how_a_stream_is_set_up(
    nats_server: RunningServer, change: dict[str, Any], text: str
) -> None:
    connection = await connect([nats_server.url])
    stream = EventStream("kvtest")
    try:
        await ensure_stream(connection.jetstream, stream)
        await ensure_stream(connection.jetstream, stream)

        found = await connection.jetstream.stream_config(stream.name)
        # One server keeps it once.
        assert found == stream.config._replace(replicas=1)
        with pytest.raises(ConfigError, match=text):
            await ensure_stream(connection.jetstream, replace(stream, **change))
    finally:
        await connection.jetstream.delete_stream(stream.name)
        await connection.close()


@pytest.mark.parametrize("field", ["max_bytes", "max_age", "replicas"])
def test_a_limit_of_nothing_is_refused(field: str) -> None:
    change: dict[str, Any] = {field: 0}

    with pytest.raises(ConfigError, match=f"event stream of demo: {field} = 0: give > 0"):
        replace(STREAM, **change)


@pytest.mark.parametrize("age", [nan, inf])
def test_an_age_that_is_no_number_of_seconds_is_refused(age: float) -> None:
    with pytest.raises(ConfigError, match=f"event stream of demo: max_age = {age}: give > 0"):
        EventStream("demo", max_age=age)


@pytest.mark.anyio
@pytest.mark.parametrize("age", [100_000 / 7, 0.1 + 0.2 + 1000, 1e9 / 7])
async def test_an_age_of_broken_nanoseconds_fits_the_stream_that_was_made_with_it(
    nats_server: RunningServer, age: float
) -> None:
    connection = await connect([nats_server.url])
    stream = EventStream("kvages", max_age=age)
    try:
        await ensure_stream(connection.jetstream, stream)
        await ensure_stream(connection.jetstream, stream)

        with pytest.raises(ConfigError, match="max_age"):
            await ensure_stream(connection.jetstream, replace(stream, max_age=age + 0.001))
    finally:
        await connection.jetstream.delete_stream(stream.name)
        await connection.close()


def test_a_namespace_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="namespace"):
        EventStream("de.mo")
