"""Events of a region that a group of another one goes on with."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from tests.conditions import eventually
from tests.joined_regions import joined_regions

from dynbus import Actor, ConfigError, Runtime, Topic, context, subscribe
from dynbus.bus.commands.topic import topic as topic_commands
from dynbus.bus.nats.connection import connect
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import copy_stream
from dynbus.llm.commands.setup import setup

pytestmark = pytest.mark.anyio

closed = Topic("conversation.closed", int, namespace="demo")
NAME = "demo.conversation.closed"


def billing(heard: dict[str, list[int]]) -> type[Actor]:
    """A group of the topic, which notes its events under their ids."""

    class Billing(Actor, namespace="demo"):
        @subscribe(closed, group="billing", ordered=True)
        async def bill(self, event: int) -> None:
            heard.setdefault(context().idempotency_key, []).append(event)

    return Billing


async def command(group: click.Command, server: RunningServer, *arguments: str) -> Result:
    """The outcome of a command, which has a loop of its own in a thread."""
    given = [*arguments, "--nats", server.url]
    return await asyncio.to_thread(CliRunner().invoke, group, given)


async def has_copied(server: RunningServer, events: int) -> bool:
    """True if a region's copy of `eu` has so many events, and says when it heard of it."""
    connection = await connect([server.url])
    try:
        stream = copy_stream("DYNBUS_TOPIC_demo+conversation+closed", "eu")
        info = await connection.jetstream.stream_info(stream)
    finally:
        await connection.close()
    return info.messages == events and info.silent is not None


async def test_a_group_goes_on_with_the_events_of_a_lost_region(tmp_path: Path) -> None:
    there: dict[str, list[int]] = {}
    here: dict[str, list[int]] = {}
    topic = ("demo", "--topic", closed.name)
    async with joined_regions(tmp_path, ("eu", "us")) as regions:
        eu, us = regions["eu"], regions["us"]
        assert (await command(setup, eu, *topic)).exit_code == 0
        made = await command(setup, us, *topic, "--copies-of", "eu")
        assert made.exit_code == 0, made.output
        assert "copy of the events of region eu" in made.output
        async with Runtime.connect(eu.url) as runtime:
            member = await runtime.start(billing(there))
            await closed.publish(1, key="a", runtime=runtime)
            await closed.publish(2, key="b", runtime=runtime)
            await eventually(lambda: len(there) == 2)
            await member.stop()
            await closed.publish(3, key="a", runtime=runtime)
        await eventually(lambda: has_copied(us, 3), what="the events are copied")
        async with Runtime.connect(us.url) as runtime:
            await runtime.start(billing(here))
            await closed.publish(4, key="a", runtime=runtime)
            await eventually(lambda: list(here.values()) == [[4]])
            eu.kill()

            replayed = await command(
                topic_commands, us, "replay", NAME, "billing", "--of", "eu", "--from", "all"
            )
            assert replayed.exit_code == 0, replayed.output
            await eventually(lambda: len(here) == 4)
            again = await command(
                topic_commands, us, "replay", NAME, "billing", "--of", "eu", "--from", "0s"
            )

        assert replayed.stdout == "replayed: 3 events to billing\n"
        assert "the copy heard of region eu" in replayed.stderr
        assert again.stdout == "replayed: 0 events to billing\n"
        # An effect that goes by the id of its event is had once by both regions.
        assert there.items() <= here.items()
        assert sorted(here.values()) == [[1], [2], [3], [4]]

        await eu.restart()
        async with Runtime.connect(eu.url) as runtime:
            await runtime.start(billing(there))
            await eventually(lambda: len(there) == 3)


async def test_what_is_no_copy_of_another_region_is_refused(tmp_path: Path) -> None:
    topic = ("demo", "--topic", closed.name)
    async with joined_regions(tmp_path, ("eu", "us")) as regions:
        us = regions["us"]
        async with Runtime.connect(us.url) as runtime:
            await runtime.start(billing({}))
            replay = ("replay", NAME, "billing", "--from", "all", "--of")

            for group, arguments, wrong in (
                (setup, (*topic, "--copies-of", "eu"), "region eu has no stream DYNBUS_TOPIC_demo"),
                (setup, (*topic, "--copies-of", "us"), "in region us itself"),
                (setup, ("demo", "--copies-of", "eu"), "--durable and --topic"),
                (topic_commands, (*replay, "eu"), "no copy of demo.conversation.closed of region"),
                (topic_commands, (*replay, "us"), "in region us itself"),
                (topic_commands, (*replay, "e u"), "'e u' is no region"),
            ):
                refused = await command(group, us, *arguments)
                assert isinstance(refused.exception, ConfigError), arguments
                assert wrong in str(refused.exception)
