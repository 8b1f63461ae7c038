"""`dynbus kv` tells what the caches hold, now and before, from a real stream."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, DynbusError
from dynbus.bus.nats.connection import NatsConnection, connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.wire import InstanceRecord, encode_record
from dynbus.bus.records.instance_records import INSTANCES_STREAM, record_subject
from dynbus.bus.transport import NoStream
from dynbus.kvrouter.commands.kv import kv
from dynbus.kvrouter.commands.kv_arguments import parse_points, parse_prefix, parse_time
from dynbus.kvrouter.commands.kv_contents import rank_rows
from dynbus.kvrouter.commands.kv_reports import dump_caches
from dynbus.kvrouter.events import BlockRemoved, BlockStored, KvEvent, Tier, encode_events
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.radix.snapshot import dump_index
from dynbus.kvrouter.stream.event_stream import EventStream, ensure_stream
from dynbus.kvrouter.stream.history import NOW, NoHistory, Point, index_at
from dynbus.kvrouter.stream.snapshots import Coverage, SnapshotStore

TOKENS = list(range(32))
BLOCKS: list[int] = block_hashes(TOKENS, 16).tolist()


class Served(NamedTuple):
    url: str
    namespace: str

    def kv(self, *arguments: str, namespace: str | None = None) -> Result:
        command, *rest = arguments
        words = [command, "--namespace", namespace or self.namespace, "--nats", self.url, *rest]
        return CliRunner().invoke(kv, words)

    def json(self, *arguments: str) -> Any:
        ended = self.kv(*arguments, "--json")
        assert ended.exception is None, ended.output
        return json.loads(ended.stdout)


async def publish(
    connection: NatsConnection, namespace: str, instance: str, *messages: list[KvEvent]
) -> None:
    first_id = 0
    for events in messages:
        data = encode_events(events, event_epoch=1, first_id=first_id)
        await connection.jetstream.publish(f"{namespace}.Engine._kv.{instance}.0", data)
        first_id += len(events)


async def fill(url: str, namespace: str) -> None:
    """Four messages, a snapshot after the second, and the lease of one of two instances."""
    connection = await connect([url], name="test")
    jetstream = connection.jetstream
    await ensure_stream(jetstream, EventStream(namespace))
    array = np.array(BLOCKS, dtype=np.uint64)
    await publish(
        connection,
        namespace,
        "a",
        [BlockStored(None, array, array)],
        [BlockStored(BLOCKS[-1], [77], [77], Tier.DEVICE), BlockStored(None, [5], [5], Tier.HOST)],
    )
    past = await index_at(jetstream, namespace, "Engine")
    created = (await jetstream.stream_info(f"DYNBUS_EVENTS_{namespace}")).created
    await SnapshotStore(jetstream, namespace).write(
        "Engine", Coverage(created, 2), dump_index(past.index, 2), blocks=4, instances=1
    )
    events: list[list[KvEvent]] = [[BlockStored(None, array, array)], [BlockRemoved([BLOCKS[1]])]]
    await publish(connection, namespace, "b", *events)
    await jetstream.ensure_stream(INSTANCES_STREAM)
    record = InstanceRecord(
        namespace=namespace,
        component="Engine",
        instance_id="a",
        incarnation="x",
        endpoints={},
        started=1.0,
        address="host:1",
        metadata={"kv_block_size": "16"},
    )
    await jetstream.publish(
        record_subject(namespace, "Engine", "a"), encode_record(record), ttl=600.0
    )
    await connection.close()


async def withdraw(url: str, namespace: str) -> None:
    """The end of that lease: an id is taken on the whole bus, and the server is that of others."""
    connection = await connect([url], name="test")
    subject = record_subject(namespace, "Engine", "a")
    await connection.jetstream.publish(subject, b"", ttl=1.0, deleted=True)
    await connection.close()


@pytest.fixture(scope="module")
def served(nats_server: RunningServer) -> Iterator[Served]:
    # Other processes that run tests take some of this module, and may give them back: then it is
    # made once more, on the same server.
    namespace = f"kv{secrets.token_hex(6)}"
    asyncio.run(fill(nats_server.url, namespace))
    yield Served(nats_server.url, namespace)
    asyncio.run(withdraw(nats_server.url, namespace))


def test_top_lists_instances_by_blocks_and_the_prefixes_that_most_of_them_hold(
    served: Served,
) -> None:
    found = served.json("top", "--all")

    assert [
        (row["instance"], row["blocks"], row["device"], row["host"], row["lease"])
        for row in found["ranks"]
    ] == [("a", 4, 3, 1, True), ("b", 1, 1, 0, False)]
    assert found["prefixes"][0] == {
        "block_hashes": [f"{BLOCKS[0]:#018x}"],
        "instances": ["a", "b"],
    }
    assert found["left_out"] == []
    assert (found["sequence"], found["snapshot"], found["whole"]) == (4, "Engine/2", True)


@pytest.mark.parametrize("command", [["top"], ["show", *map(str, BLOCKS)]])
def test_instances_without_a_lease_do_not_count_and_are_named(
    command: list[str], served: Served
) -> None:
    found = served.json(*command)
    ended = served.kv(*command)

    rows = found["ranks"] if command == ["top"] else found["holders"]
    assert [row["instance"] for row in rows] == ["a"]
    assert all("b" not in prefix["instances"] for prefix in found.get("prefixes", []))
    assert found["left_out"] == ["b"]
    assert "1 instance without a lease left out (b): --all has them" in ended.stderr


def test_top_is_a_table_for_people(served: Served) -> None:
    ended = served.kv("top", "--component", "Engine")

    lines = ended.stdout.splitlines()
    assert lines[0].split() == [
        *("INSTANCE", "RANK", "LEASE", "BLOCKS", "DEVICE", "HOST", "DISK", "EXTERNAL", "STATE"),
    ]
    assert lines[1].split() == ["a", "0", "yes", "4", "3", "1", "0", "0", "whole"]


@pytest.mark.parametrize(
    "prefix",
    [
        [f"{number:#x}" for number in BLOCKS],
        [",".join(map(str, BLOCKS))],
        [json.dumps(TOKENS)],
        ["--block-size", "16", json.dumps([*TOKENS, 1, 2, 3])],
    ],
    ids=["hexadecimal", "decimal", "tokens", "block size"],
)
def test_show_tells_who_holds_a_prefix(prefix: list[str], served: Served) -> None:
    found = served.json("show", "--all", *prefix)

    assert [(row["instance"], row["blocks"], row["device"]) for row in found["holders"]] == [
        ("a", 2, 2),
        ("b", 1, 1),
    ]


def test_a_prefix_that_nobody_holds_is_no_failure(served: Served) -> None:
    ended = served.kv("show", "12345")

    assert (ended.exit_code, ended.stdout) == (0, "")
    assert "nobody holds the first of these 1 blocks" in ended.stderr


def test_a_dump_of_the_fleet_has_blocks_by_ranks_and_no_hashes(served: Served) -> None:
    caches = asyncio.run(dump_caches(BusConfig(servers=(served.url,))))

    cache = caches[f"{served.namespace}.Engine"]
    assert [(row["instance"], row["blocks"], row["lease"]) for row in cache["ranks"]] == [
        ("a", 4, True),
        ("b", 1, False),
    ]
    assert "block_hashes" not in json.dumps(caches)


def test_dump_prints_everything_as_lines_of_json(served: Served) -> None:
    ended = served.kv("dump")

    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [line["kind"] for line in lines[:3]] == ["index", "rank", "rank"]
    held = {
        (one["instance"], one["tier"]): set(run["block_hashes"][: one["end"] - run["start"]])
        for run in lines[3:]
        for one in run["holders"]
    }
    assert set(held) == {("a", "device"), ("b", "device"), ("a", "host")}
    assert held["a", "host"] == {f"{5:#018x}"}


def test_at_tells_what_was_held_at_a_sequence_and_what_changed_since(served: Served) -> None:
    then = served.json("at", "--seq", "1")
    since = served.json("at", "--seq", "1", "--to", "now")

    assert [(row["instance"], row["blocks"]) for row in then["ranks"]] == [("a", 2)]
    assert since["changes"] == [
        {
            "instance": "a",
            "dp_rank": 0,
            "gained": 2,
            "lost": 0,
            "blocks_before": 2,
            "blocks_after": 4,
        },
        {
            "instance": "b",
            "dp_rank": 0,
            "gained": 1,
            "lost": 0,
            "blocks_before": 0,
            "blocks_after": 1,
        },
    ]
    assert (since["from"]["sequence"], since["to"]["sequence"]) == (1, 4)


def test_nothing_can_be_told_of_a_time_before_the_stream(served: Served) -> None:
    ended = served.kv("at", "--time", "30d")

    assert isinstance(ended.exception, NoHistory)
    assert "was made at" in str(ended.exception)


def test_before_its_first_message_nothing_was_held(served: Served) -> None:
    found = served.json("at", "--seq", "0")

    assert (found["sequence"], found["ranks"], found["whole"]) == (0, [], True)


def test_a_block_size_that_no_instance_has_is_told(served: Served) -> None:
    ended = served.kv("show", "--block-size", "8", json.dumps(TOKENS))

    assert (ended.exit_code, ended.stdout) == (0, "")
    assert "--block-size 8 is not what the instances say (16)" in ended.stderr


@pytest.mark.parametrize("command", [["top"], ["dump"], ["show", "5"], ["at", "--seq", "1"]])
def test_a_component_without_events_is_refused_with_those_that_have_some(
    command: list[str], served: Served
) -> None:
    ended = served.kv(*command, "--component", "Engin")

    assert isinstance(ended.exception, ConfigError)
    assert str(ended.exception) == (
        f"component Engin of {served.namespace} has no KV events; those that have some: Engine"
    )


@pytest.mark.parametrize(
    "place",
    [
        ["--component", "{}.Engine"],
        ["--namespace", "{}", "--component", "{}.Engine"],
    ],
)
def test_a_component_may_be_named_with_its_namespace(place: list[str], served: Served) -> None:
    words = [word.format(served.namespace) for word in place]

    ended = CliRunner().invoke(kv, ["top", "--nats", served.url, "--json", *words])

    assert json.loads(ended.stdout)["component"] == "Engine"


async def fill_namespaces(url: str, namespaces: list[str], component: str) -> None:
    """In each namespace an instance with a lease and one block, but in the last without events."""
    connection = await connect([url], name="test")
    jetstream = connection.jetstream
    await jetstream.ensure_stream(INSTANCES_STREAM)
    message = encode_events([BlockStored(None, [1], [1])], event_epoch=1, first_id=0)
    for namespace in namespaces:
        instance = f"only-{namespace}"
        if namespace is not namespaces[-1]:
            await ensure_stream(jetstream, EventStream(namespace))
            await jetstream.publish(f"{namespace}.{component}._kv.{instance}.0", message)
        record = InstanceRecord(
            namespace=namespace,
            component=component,
            instance_id=instance,
            incarnation="x",
            endpoints={},
            started=1.0,
            address="host:1",
        )
        subject = record_subject(namespace, component, instance)
        await jetstream.publish(subject, encode_record(record), ttl=600.0)
    await connection.close()


def test_without_a_namespace_the_only_one_with_events_is_meant(nats_server: RunningServer) -> None:
    asyncio.run(fill_namespaces(nats_server.url, ["kvalone", "kvwithout"], "Alone"))

    place = ["--nats", nats_server.url, "--component", "Alone"]
    ended = CliRunner().invoke(kv, ["top", "--json", *place])

    found = json.loads(ended.stdout)
    assert (found["namespace"], found["component"]) == ("kvalone", "Alone")


@pytest.mark.parametrize(
    ("namespaces", "message"),
    [
        (
            ["kvone", "kvtwo", "kvwithout"],
            "several namespaces have KV events: give --namespace, or --component as "
            "namespace.component, of kvone, kvtwo",
        ),
        (
            ["kvwithout"],
            "no namespace with an instance has KV events: give --namespace, or --component as "
            "namespace.component",
        ),
    ],
    ids=["several", "none"],
)
def test_without_a_namespace_it_is_asked_for_where_not_just_one_has_events(
    namespaces: list[str], message: str, nats_server: RunningServer
) -> None:
    component = f"Of{len(namespaces)}"
    asyncio.run(fill_namespaces(nats_server.url, namespaces, component))

    place = ["--nats", nats_server.url, "--component", component]
    ended = CliRunner().invoke(kv, ["top", *place])

    assert isinstance(ended.exception, ConfigError)
    assert str(ended.exception) == message


def test_snapshots_are_listed_with_what_they_are_good_for(served: Served) -> None:
    [found] = served.json("snapshots", "--check")

    assert (found["component"], found["sequence"], found["blocks"], found["state"]) == (
        "Engine",
        2,
        4,
        "usable",
    )


def test_snapshots_of_a_component_that_nobody_knows_are_refused_with_those_that_are(
    served: Served,
) -> None:
    ended = served.kv("snapshots", "--component", "Wrong")

    assert isinstance(ended.exception, ConfigError)
    assert str(ended.exception) == (
        f"component Wrong of {served.namespace} has no KV events; those that have some: Engine"
    )


@pytest.mark.parametrize("command", ["top", "dump", "snapshots"])
def test_without_a_stream_it_is_asked_whether_anybody_publishes(
    command: str, served: Served
) -> None:
    ended = served.kv(command, namespace="nobody")

    assert isinstance(ended.exception, NoStream)
    assert str(ended.exception) == "no KV events in namespace nobody: is a publisher running?"


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["at", "--seq", "99"], NoHistory, "sequence 99 is not there yet"),
        (["show", "--block-size", "64", json.dumps(TOKENS)], ConfigError, "make no block of 64"),
        (["top", "--component", "no name"], ConfigError, "not a valid name"),
    ],
)
def test_what_cannot_be_told_is_said_with_the_reason(
    arguments: list[str], kind: type[DynbusError], message: str, served: Served
) -> None:
    ended = served.kv(*arguments)

    assert isinstance(ended.exception, kind)
    assert message in str(ended.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["at"], "give either --time or --seq"),
        (["at", "--seq", "1", "--time", "5m"], "give either --time or --seq"),
        (["at", "--time", "yesterday"], "is not a time"),
        (["at", "--seq", "3", "--to", "2"], "--to lies before"),
        (["at", "--seq", "3", "--to", "5m"], "it is a sequence, or now"),
        (["top", "--component", "llm.Engine"], "--component names one of llm"),
        (["show", "0xnothing"], "is not a block hash"),
        (["show", "[1, -1]"], "token ids are integers"),
    ],
)
def test_a_wrong_command_line_says_what_to_write(
    arguments: list[str], message: str, served: Served
) -> None:
    ended = served.kv(*arguments)

    assert ended.exit_code == 2
    assert message in " ".join(ended.stderr.split())


def test_times_are_iso_unix_seconds_or_so_long_ago() -> None:
    assert parse_time("2026-01-31T12:00:00Z") == 1769860800.0
    assert parse_time("1769860800.5") == 1769860800.5
    assert parse_time("2m") == pytest.approx(parse_time("60s") - 60.0, abs=1.0)


def test_points_are_of_one_kind() -> None:
    assert parse_points(None, 3, "7") == (Point(3), Point(7))
    assert parse_points("1769860800", None, "now") == (Point(time=1769860800.0), NOW)


def test_a_prefix_is_hashes_or_token_ids() -> None:
    assert parse_prefix(["0x10", "17"]) == ([16, 17], None)
    assert parse_prefix(["[1,", "2]"]) == (None, [1, 2])


def test_what_a_rank_says_of_its_own_events_is_in_its_row() -> None:
    index = RadixIndex()
    events = [BlockStored(None, [1], [1])]
    for instance in ("a", "b"):
        index.apply(instance, encode_events(events, event_epoch=1, first_id=0))
    index.ranks[Rank("b", 0)].stated = "degraded (messages lost)"

    assert [row["awareness"] for row in rank_rows(index)] == ["exact", "degraded (messages lost)"]
