"""Settings of disaggregated serving: validated, kept in one record, followed while workers run."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.conditions import eventually

from dynbus.bus.bus import Bus
from dynbus.bus.clock import JumpingLoop
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.instance_records import ensure_bucket, record_subject
from dynbus.llm.commands.tuning import tune
from dynbus.llm.disaggregated.settings import (
    NOTHING_STORED,
    SETTINGS_STREAM,
    DisaggregationSettings,
    change_settings,
    follow_settings,
    parse_changes,
    read_settings,
    remove_settings,
    stored_components,
)

pytestmark = pytest.mark.anyio

DECODE = ComponentName("demo", "Decode")
OWN = DisaggregationSettings(local_prompt_tokens=64)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": JumpingLoop}


@pytest.fixture
def server() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
async def bus(server: MemoryBus) -> AsyncIterator[Bus]:
    one = await Bus.over(BusConfig(), await server.connect(), await server.connect())
    yield one
    await one.close()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"local_prompt_token": "1"},
            r"'local_prompt_token' is not a setting .*mean local_prompt_tokens.*: there are mode,",
        ),
        ({"local_prompt_tokens": "many"}, "= 'many' is not usable: give a whole number"),
        ({"local_prompt_tokens": "-1"}, "local_prompt_tokens = -1 is not usable: give 0 or more"),
        ({"max_queue_length": "0"}, "max_queue_length = 0 is not usable: give 1 or more, or mode"),
        ({"resume_share": "1.5"}, "resume_share = 1.5 is not usable: give a number from 0 to 1"),
        ({"busy_decode_load": "nan"}, "busy_decode_load = nan is not usable"),
        ({"mode": "far"}, "mode = 'far' is not usable: give one of auto, local, remote"),
        ({"through": ""}, "through = '' is not usable"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_the_reason(
    changes: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_changes(changes)


def test_what_a_person_types_becomes_settings() -> None:
    typed = {"local_prompt_tokens": "256", "resume_share": "0.25", "through": "queue"}

    assert parse_changes(typed) == {
        "local_prompt_tokens": 256,
        "resume_share": 0.25,
        "through": "queue",
    }


async def test_workers_follow_the_record_and_keep_their_own_where_it_says_nothing(
    bus: Bus,
) -> None:
    js = bus.data.jetstream
    async with follow_settings(bus, DECODE, OWN) as live:
        assert live.current == OWN
        stored = await change_settings(js, DECODE, {"max_queue_length": 9})
        await eventually(lambda: live.revision == stored.revision)
        assert live.current == OWN.changed({"max_queue_length": 9})

        await change_settings(js, DECODE, {"local_prompt_tokens": 7})
        await eventually(lambda: live.current.local_prompt_tokens == 7)
        await change_settings(js, DECODE, {"through": "queue"}, unset=["local_prompt_tokens"])
        await eventually(lambda: live.current.through == "queue")

        assert live.current == OWN.changed({"max_queue_length": 9, "through": "queue"})
    async with follow_settings(bus, DECODE, OWN) as later:
        await eventually(lambda: later.current.max_queue_length == 9)
    assert await stored_components(js) == [DECODE]


async def test_what_is_no_settings_is_ignored_and_those_before_hold(bus: Bus) -> None:
    js = bus.data.jetstream
    subject = f"$KV.dynbus_disaggregation.{DECODE}"
    await change_settings(js, DECODE, {"max_queue_length": 9})
    async with follow_settings(bus, DECODE, OWN) as live:
        await eventually(lambda: live.current.max_queue_length == 9)
        bads = (
            *(b"", b"[]", b'{"max_queue_length": -1}', b'{"mode": 5}', b"\xff"),
            *(b'{"mode": "\xff"}', b'{"later": ' + 10_000 * b"["),
        )
        for bad in bads:
            await js.publish(subject, bad)
        # A later version's record may say more.
        await js.publish(subject, b'{"max_queue_length": 3, "of_later": true}')
        await eventually(lambda: live.current.max_queue_length == 3)
        # What it says of others stays.
        await change_settings(js, DECODE, {}, unset=["max_queue_length"])
        left = await js.last("KV_dynbus_disaggregation", subject)
        assert left is not None
        assert json.loads(left.data) == {"of_later": True}

        await js.publish(subject, b"", headers={"KV-Operation": "DEL"})
        await eventually(lambda: live.current == OWN)


async def test_settings_are_followed_over_outages_and_a_bucket_that_is_made_again(
    server: MemoryBus, bus: Bus
) -> None:
    js = bus.data.jetstream
    await change_settings(js, DECODE, {"max_queue_length": 9})
    async with follow_settings(bus, DECODE, OWN) as live:
        await eventually(lambda: live.current.max_queue_length == 9)
        server.stop()
        assert live.current.max_queue_length == 9
        server.start()
        await change_settings(js, DECODE, {"max_queue_length": 8})
        await eventually(lambda: live.current.max_queue_length == 8)

        await js.delete_stream(SETTINGS_STREAM.name)
        await js.ensure_stream(SETTINGS_STREAM)
        await eventually(lambda: live.current == OWN)


async def test_workers_start_without_jetstream_and_follow_when_it_is_there(
    server: MemoryBus, bus: Bus
) -> None:
    server.jetstream.stall()
    async with follow_settings(bus, DECODE, OWN) as live:
        await asyncio.sleep(30)
        assert live.current == OWN
        server.jetstream.stall(False)
        await change_settings(bus.data.jetstream, DECODE, {"max_queue_length": 9})
        await eventually(lambda: live.current.max_queue_length == 9)


async def test_two_who_change_settings_at_once_both_have_their_way(bus: Bus) -> None:
    js = bus.data.jetstream

    await asyncio.gather(
        change_settings(js, DECODE, {"max_queue_length": 9}),
        change_settings(js, DECODE, {"local_prompt_tokens": 7}),
        change_settings(js, DECODE, {"resume_share": 0.25}),
    )

    assert (await read_settings(js, DECODE)).changes == {
        "max_queue_length": 9,
        "local_prompt_tokens": 7,
        "resume_share": 0.25,
    }


async def test_a_record_that_says_nothing_is_none(bus: Bus) -> None:
    js = bus.data.jetstream
    assert await change_settings(js, DECODE, {}, unset=["mode"]) == NOTHING_STORED
    await change_settings(js, DECODE, {"max_queue_length": 9})
    async with follow_settings(bus, DECODE, OWN) as live:
        await eventually(lambda: live.current.max_queue_length == 9)

        await change_settings(js, DECODE, {}, unset=["max_queue_length"])

        assert await stored_components(js) == []
        await eventually(lambda: live.current == OWN)
        await change_settings(js, DECODE, {"max_queue_length": 7})
        await eventually(lambda: live.current.max_queue_length == 7)


@pytest.mark.parametrize("bad", [b"{", b"[]", b"\xff", b'{"mode": 5}'])
async def test_a_record_that_is_none_can_be_removed(bus: Bus, bad: bytes) -> None:
    js = bus.data.jetstream
    assert await remove_settings(js, DECODE) == NOTHING_STORED
    await change_settings(js, DECODE, {"max_queue_length": 9})
    await js.publish(f"$KV.dynbus_disaggregation.{DECODE}", bad)
    with pytest.raises(ConfigError, match="--reset|or unset it"):
        await change_settings(js, DECODE, {"max_queue_length": 8})

    assert (await remove_settings(js, DECODE)).changes == {}

    assert await stored_components(js) == []
    await change_settings(js, DECODE, {"max_queue_length": 8})
    assert (await read_settings(js, DECODE)).changes == {"max_queue_length": 8}


def announced(component: str, instance: str, own: DisaggregationSettings) -> tuple[str, bytes]:
    """The record of a decode instance."""
    namespace, name = component.split(".")
    record = InstanceRecord(
        namespace=namespace,
        component=name,
        instance_id=instance,
        incarnation="1",
        endpoints={},
        started=1.0,
        metadata=own.metadata(),
    )
    return record_subject(namespace, name, instance), encode_record(record)


def test_the_command_tells_the_workers_own_values_from_those_that_hold(
    nats_server: RunningServer,
) -> None:
    component = f"n{secrets.token_hex(4)}.decode"

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(tune, [*arguments, "--nats", nats_server.url])

    async def announce() -> None:
        async with terminal.server(BusConfig(servers=(nats_server.url,)), "test") as server:
            js = server.connection.jetstream
            await ensure_bucket(js)
            for instance, tokens in (("a", 64), ("b", 128)):
                own = DisaggregationSettings(local_prompt_tokens=tokens)
                await js.publish(*announced(component, instance, own))

    nobody = command(component, "max_queue_length=9").stderr
    asyncio.run(announce())
    table = command(component, "mode=local")
    typed = command(f"{component}r", "mode=local").stderr
    told = json.loads(command(component, "--json").stdout)
    command(f"{component}r", "--reset")

    assert f"no decode instance of {component} is there" in nobody
    assert table.stderr == ""
    assert [line.split() for line in table.stdout.splitlines()[1:5]] == [
        ["mode", "local", "auto", "the", "record"],
        ["through", "direct", "direct", "default"],
        ["local_prompt_tokens", "128,", "64", "128,", "64", "the", "workers'", "own"],
        ["idle_local_prompt_tokens", "0", "0", "default"],
    ]
    assert f"(did you mean {component}?)" in typed
    assert told["workers"]["a"]["own"]["local_prompt_tokens"] == 64
    assert told["workers"]["b"]["own"]["max_queue_length"] == 4
    assert told["workers"]["b"]["live"]["max_queue_length"] == 9


def test_the_command_shows_and_changes_settings(nats_server: RunningServer) -> None:
    component = f"n{secrets.token_hex(4)}.Decode"

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(tune, [*arguments, "--nats", nats_server.url])

    before = json.loads(command(component, "--json").stdout)
    after = json.loads(command(component, "max_queue_length=9", "mode=local", "--json").stdout)
    listed = json.loads(command("--json").stdout)
    table = command(component).stdout
    unset = json.loads(command(component, "mode=", "--json").stdout)
    refused = command(component, "max_queue_length=nine")
    unknown = command(component, "maximum=")

    assert (before["changed"], before["settings"]["max_queue_length"]) == ([], 4)
    assert after["changed"] == ["max_queue_length", "mode"]
    assert (after["settings"]["max_queue_length"], after["settings"]["mode"]) == (9, "local")
    assert component in listed
    assert [line.split()[:2] for line in table.splitlines() if "the record" in line] == [
        ["mode", "local"],
        ["max_queue_length", "9"],
    ]
    assert (unset["changed"], unset["settings"]["mode"]) == (["max_queue_length"], "auto")
    assert isinstance(refused.exception, ConfigError)
    assert isinstance(unknown.exception, ConfigError)
    assert json.loads(command(component, "--json").stdout) == unset
    assert command(component, "mode").exit_code == 2
    assert command(component, "mode=", "--reset").exit_code == 2
    assert command("--reset").exit_code == 2
    assert command(component, "--reset").exit_code == 0
    assert component not in json.loads(command("--json").stdout)
