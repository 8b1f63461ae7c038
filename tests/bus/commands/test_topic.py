"""`dynbus topic` lists topics, shows and publishes events, and gives groups events once more."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.conditions import eventually

from dynbus import Actor, ConfigError, InvalidRequest, Overloaded, Runtime, Topic, subscribe
from dynbus.bus import topics
from dynbus.bus.commands import topic as topic_module
from dynbus.bus.commands.terminal import terminal
from dynbus.bus.commands.topic import topic as command_group
from dynbus.bus.nats import direct_get
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.transport import StreamFull

pytestmark = pytest.mark.anyio

Command = Callable[..., Coroutine[Any, Any, Result]]


class Office:
    """A topic, two groups of it, and what they have heard."""

    def __init__(self, runtime: Runtime, **options: Any) -> None:
        self.namespace = f"n{secrets.token_hex(6)}"
        self.topic = Topic("conversation.closed", int, namespace=self.namespace, **options)
        self.name = f"{self.namespace}.conversation.closed"
        self.runtime = runtime
        self.heard: dict[str, list[int]] = {"billing": [], "search": []}

    async def open(self) -> None:
        for group in self.heard:
            await self.runtime.start(self.member(group, ordered=group == "billing"))

    def member(self, group: str, *, ordered: bool) -> type[Actor]:
        heard = self.heard[group]

        class Member(Actor, namespace=self.namespace, component=group.title()):
            @subscribe(self.topic, group=group, ordered=ordered)
            async def on_closed(self, event: int) -> None:
                heard.append(event)

        return Member

    async def publish(self, *events: int) -> None:
        for event in events:
            await self.topic.publish(event, key="k", runtime=self.runtime)

    async def wait(self, group: str, count: int) -> list[int]:
        await eventually(lambda: len(self.heard[group]) >= count)
        return self.heard[group]


@pytest.fixture
async def runtime(nats_server: RunningServer) -> AsyncIterator[Runtime]:
    async with Runtime.connect(nats_server.url) as made:
        yield made


@pytest.fixture
def command(nats_server: RunningServer) -> Command:
    async def run(*arguments: str, code: int = 0) -> Result:
        # In a thread: the command has a loop of its own.
        result = await asyncio.to_thread(
            CliRunner().invoke, command_group, [*arguments, "--nats", nats_server.url]
        )
        assert code or result.exception is None, result.exception
        return result

    return run


async def test_topics_are_listed_with_their_groups(runtime: Runtime, command: Command) -> None:
    office = Office(runtime)
    nothing = await command("ls", office.namespace)
    await office.open()
    await office.publish(1, 2)
    await office.wait("billing", 2)
    await office.wait("search", 2)
    listed: list[Any] = []

    async def none_is_held() -> bool:
        # Handlers hear of an event before it is acknowledged.
        listed[:] = json.loads((await command("ls", office.namespace, "--json")).output)
        return all(group["held"] == 0 for row in listed for group in row["groups"])

    await eventually(none_is_held, what=lambda: f"{listed}")
    table = (await command("ls", office.name)).output.splitlines()

    assert nothing.output == f"{office.namespace} has no topic that keeps events\n"
    [row] = listed
    assert (row["topic"], row["events"], row["retain"]) == (office.name, 2, 7 * 86400)
    assert row["groups"] == [
        {
            "group": group,
            "method": f"{office.namespace}.{group.title()}.on_closed",
            "ordered": group == "billing",
            "waiting": 0,
            "held": 0,
        }
        for group in ("billing", "search")
    ]
    assert table[1].split()[:2] == [office.name, "2"]
    assert table[2].split()[0] == "search"


async def test_a_group_and_no_other_gets_again_what_it_has_had(
    runtime: Runtime, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_get, "PAGE", 2)
    office = Office(runtime)
    await office.open()
    await office.publish(1, 2, 3)
    await office.wait("billing", 3)
    await office.wait("search", 3)

    replayed = await command("replay", office.name, "billing", "--from", "all")
    none = await command("replay", office.name, "search", "--from", "0s")
    await office.publish(4)

    assert replayed.output == "replayed: 3 events to billing\n"
    assert none.output == "replayed: 0 events to search\n"
    assert await office.wait("billing", 7) == [1, 2, 3, 1, 2, 3, 4]
    assert await office.wait("search", 4) == [1, 2, 3, 4]


async def test_a_full_topic_has_no_room_for_a_replay_or_an_event(
    runtime: Runtime, command: Command
) -> None:
    office = Office(runtime, max_bytes=1000)
    await office.open()
    await office.publish(1, 2, 3)
    await office.wait("billing", 3)

    refused = await command("replay", office.name, "billing", "--from", "all", code=1)
    full = await command("publish", office.name, f'"{"x" * 1000}"', code=1)

    assert isinstance(refused.exception, StreamFull)
    assert "were given to billing again" in str(refused.exception)
    assert isinstance(full.exception, Overloaded)
    assert full.exception.retry_after


async def test_events_that_cannot_be_given_again_keep_no_others_from_it(
    runtime: Runtime, command: Command
) -> None:
    office = Office(runtime)
    await office.open()
    data, stream = runtime.bus.data, office.topic.config().stream
    subject = f"{office.namespace}._topic.conversation.closed._event.k"
    # Plain clients publish as well, and who may ask the server names where it answers.
    data.publish(subject, b"1" * data.max_payload)
    data.publish(subject, b"2", headers="NATS/1.0\r\nDynbus-Job: ä\r\n\r\n".encode())
    data.publish(f"$JS.API.STREAM.INFO.{stream}", b"", reply=subject)
    await office.publish(3)
    await office.wait("search", 1)

    replayed = await command("replay", office.name, "search", "--from", "all")

    assert replayed.stdout == "replayed: 1 events to search\n"
    assert [line.partition(":")[0] for line in replayed.stderr.splitlines()] == ["left out"] * 2
    assert await office.wait("search", 2) == [3, 3]


async def test_events_of_another_region_are_given_whatever_its_clock_says(
    runtime: Runtime, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(runtime)
    await office.open()
    asked: list[dict[str, Any]] = []

    async def replay(*_: object, **options: Any) -> int:
        asked.append(options)
        return 0

    async def age(*_: object) -> str:
        return ""

    monkeypatch.setattr(topics, "replay", replay)
    monkeypatch.setattr(topic_module, "_age_of_copy", age)
    for arguments in (("--of", "eu"), ("--of", "eu", "--until", "2027-01-31"), ()):
        await command("replay", office.name, "search", "--from", "all", *arguments)

    of_copy, until, own = (one["until"] for one in asked)
    assert of_copy == math.inf
    assert until == 1801353600.0
    assert own < math.inf


async def test_an_event_is_published_and_shown(runtime: Runtime, command: Command) -> None:
    office = Office(runtime)
    await office.open()

    published = await command("publish", office.name, "7", "--key", "c1")
    assert await office.wait("billing", 1) == [7]
    shown = json.loads(
        (await command("tail", office.name, "--from", "1h", "--count", "1", "--json")).output
    )
    line = (await command("tail", office.name, "--from", "all", "--count", "1")).output.split()

    event_id = published.output.removeprefix("published: ").strip()
    assert (shown["id"], shown["key"], shown["data"]) == (event_id, "c1", "7")
    assert line[1:] == ["c1", "7"]


async def test_what_is_published_later_is_shown_also_where_nothing_is_kept(
    runtime: Runtime, command: Command, nats_server: RunningServer
) -> None:
    kept = Office(runtime)
    await kept.open()
    for office in (kept, Office(runtime, retain=None)):
        tailing = asyncio.create_task(command("tail", office.name, "--count", "1"))
        # It listens from some moment on; events before it are not shown.
        while not tailing.done():
            await office.publish(5)
            await asyncio.sleep(0)

        shown = (await tailing).output
        assert shown.split()[-2:] == ["k", "5"]
        assert ("waiting for what is published" in shown) == (office is not kept)
    assert "no stream keeps" in (await command("publish", office.name, "6")).output


async def test_the_place_of_a_group_is_forgotten(runtime: Runtime, command: Command) -> None:
    office = Office(runtime)
    member = await runtime.start(office.member("billing", ordered=True))
    await member.stop()
    other = office.member("billing", ordered=False)
    with pytest.raises(ConfigError, match="dynbus topic forget"):
        await runtime.start(other)

    forgotten = await command("forget", office.name, "billing", "--yes")
    again = await command("forget", office.name, "billing", "--yes", code=1)
    await runtime.start(other)

    assert forgotten.output == f"forgotten: billing of {office.name}\n"
    assert isinstance(again.exception, ConfigError)
    assert "has no group 'billing'" in str(again.exception)


async def test_a_name_that_nothing_has_is_told_before_anything_is_asked_with_the_nearest(
    runtime: Runtime, command: Command
) -> None:
    office = Office(runtime)
    await office.open()
    misspelt = office.name.replace("closed", "closd")
    unkept = Topic("conversation.closd", int, namespace=office.namespace, retain=None)

    no_group = await command("forget", office.name, "biling", code=1)
    no_topic = await command("forget", misspelt, "billing", code=1)
    tailing = asyncio.create_task(command("tail", misspelt, "--count", "1"))
    while not tailing.done():
        # Not by the command: two at a time would write to one output.
        await unkept.publish(5, runtime=runtime)
        await asyncio.sleep(0)

    assert "has no group 'biling' (did you mean billing?)" in str(no_group.exception)
    assert f"{misspelt} (did you mean {office.name}?), so it has no" in str(no_topic.exception)
    assert "Drop the place" not in no_group.output + no_topic.output
    assert f"(did you mean {office.name}?): waiting for" in (await tailing).output


async def test_what_is_no_topic_no_event_or_no_time_is_refused(command: Command) -> None:
    for name in ("desk", "desk.", "desk.a..b", "desk.>", "a b.c"):
        assert isinstance((await command("tail", name, code=1)).exception, ConfigError), name
    no_json = (await command("publish", "desk.closed", "{no", code=1)).exception
    assert isinstance(no_json, InvalidRequest)
    before = (await command("tail", "desk.unkept", "--from", "1h", code=1)).exception
    assert "leave --from out" in str(before)
    for text in ("yesterday", "2027-01-31T07:00", "-2h"):
        with pytest.raises(ConfigError, match="is no time"):
            terminal.parse_time(text, "--from")
    assert terminal.parse_time("2h", "--from")(10_000.0) == 2800.0
    assert terminal.parse_time("1970-01-01T01:00+00:00", "--from")(0.0) == 3600.0
    assert terminal.parse_time("1970-01-02", "--from")(0.0) == 86400.0
    assert terminal.parse_time("2h", "--expires", ahead=True)(10_000.0) == 17_200.0
    assert terminal.parse_time("1970-01-02", "--expires", ahead=True)(0.0) == 86400.0
    with pytest.raises(ConfigError, match="--expires 'all' is no time: .* how long from now"):
        terminal.parse_time("all", "--expires", ahead=True)
