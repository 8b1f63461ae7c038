"""`dynbus queue` lists queues and dead letters, and redrives or discards these."""

from __future__ import annotations

import asyncio
import json
import secrets

import anyio
import pytest
from click.testing import CliRunner, Result

from dynbus.bus.bus import Bus
from dynbus.bus.commands.queue import queue as command_group
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, PayloadTooLarge
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import EndpointName, work_stream, work_subject
from dynbus.bus.work_queue import NoDeadLetter, WorkQueue, WorkQueueConfig

pytestmark = pytest.mark.anyio


async def test_dead_letters_are_listed_shown_redriven_and_discarded(
    nats_server: RunningServer,
) -> None:
    namespace = f"n{secrets.token_hex(6)}"
    bus = await Bus.connect(BusConfig(servers=(nats_server.url,)))
    queue = WorkQueue(
        bus, EndpointName(namespace, "Printer", "print"), WorkQueueConfig(in_memory=True)
    )

    async def command(*arguments: str) -> Result:
        # In a thread: the command has a loop of its own.
        return await asyncio.to_thread(
            CliRunner().invoke, command_group, [*arguments, "--nats", nats_server.url]
        )

    nothing, no_queue = await command("dead", namespace), await command("ls", namespace)
    for job_id in ("one", "two", "three"):
        await queue.put(b"page \x1b[31m", job_id=job_id, headers={"colour": "red"})
    async with queue.take() as taker:
        for _ in range(3):
            await (await anext(taker)).bury("no [paper]")
    listed = json.loads((await command("dead", f"{namespace}.Printer.print", "--json")).output)
    table = (await command("dead", namespace)).output
    one, two, three = (letter["letter"] for letter in listed)
    shown = (await command("dead", namespace, one)).output
    as_json = json.loads((await command("dead", namespace, one, "--json")).output)
    await bus.data.jetstream.publish(
        work_subject(queue.name, "large"),
        bytes(bus.data.jetstream.max_payload - 100),
        message_id="large",
    )
    async with queue.take() as taker:
        await (await anext(taker)).bury("too large")
    queues = json.loads((await command("ls", f"{namespace}.Printer", "--json")).output)
    other = await command("ls", f"{namespace}.Other")
    *_, large = json.loads((await command("dead", namespace, "--json")).output)
    empty = await command("redrive", namespace, large["letter"])
    retried = await command("redrive", namespace, one)
    dropped = await command("discard", namespace, two)
    rest = await command("discard", namespace, "--all")
    again = await command("redrive", namespace, one)
    [row] = (await command("ls", namespace)).output.splitlines()[1:]

    assert "has no dead letters" in nothing.output
    assert no_queue.output == f"{namespace} has no queue\n"
    assert other.output == f"{namespace}.Other has no queue\n"
    assert queues == [
        {"queue": f"{namespace}.Printer.print", "waiting": 0, "held": 0, "dead": 4},
    ]
    assert [letter["job"] for letter in listed] == ["one", "two", "three"]
    assert listed[0]["error"] == "no [paper]"
    assert (listed[0]["headers"], listed[0]["bytes"]) == ({"colour": "red"}, 10)
    assert "no [paper]" in " ".join(table.split())
    assert "queue: " + f"{namespace}.Printer.print" in shown
    assert "\x1b" not in shown
    assert as_json["data"] == "page \x1b[31m"
    assert retried.output == f"redriven: {one} one\n"
    assert dropped.output == f"discarded: {two} two\n"
    assert rest.output == f"discarded: {three} three\ndiscarded: {large['letter']} large\n"
    assert isinstance(empty.exception, PayloadTooLarge)
    assert large["lost_bytes"] == bus.data.jetstream.max_payload - 100
    assert isinstance(again.exception, NoDeadLetter)
    assert row.split() == [f"{namespace}.Printer.print", "1", "0", "0"]
    await bus.close()


def test_what_is_no_queue_or_no_letter_is_refused(nats_server: RunningServer) -> None:
    def command(*arguments: str) -> Result:
        return CliRunner().invoke(command_group, [*arguments, "--nats", nats_server.url])

    for where in ("a.b.c.d", "a.>", "*", ""):
        assert isinstance(command("ls", where).exception, ConfigError), where
    assert isinstance(command("dead", "demo", "*").exception, NoDeadLetter)
    assert command("discard", "demo").exit_code == 2
    assert command("discard", "demo", "0123456789abcdef", "--all").exit_code == 2


async def test_a_queue_is_paused_for_all_takers_resumed_and_purged(
    nats_server: RunningServer,
) -> None:
    namespace = f"n{secrets.token_hex(6)}"
    bus = await Bus.connect(BusConfig(servers=(nats_server.url,)))
    name = EndpointName(namespace, "Printer", "print")
    queue = WorkQueue(bus, name, WorkQueueConfig(in_memory=True))

    async def command(*arguments: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke, command_group, [*arguments, "--nats", nats_server.url]
        )

    try:
        await queue.put(b"", job_id="one")
        async with queue.take(limit=2) as taker:
            held = await anext(taker)
            paused = await command("pause", str(name))
            await queue.put(b"", job_id="two")
            async with queue.take() as later:
                for one in (taker, later):
                    with anyio.move_on_after(0.3) as waiting:
                        await anext(one)
                    assert waiting.cancelled_caught
            await held.ack()
            resumed = await command("resume", str(name))
            with anyio.fail_after(30.0):
                await (await anext(taker)).ack()
        for job_id in ("three", "four"):
            await queue.put(b"", job_id=job_id)
        unsure = await command("purge", str(name))
        purged = await command("purge", str(name), "--yes")
        depth = await queue.depth(max_age=0.0)
    finally:
        await bus.data.jetstream.delete_stream(work_stream(name))
        await bus.close()

    assert (paused.output, resumed.output) == (f"paused: {name}\n", f"resumed: {name}\n")
    assert (unsure.exit_code, "Aborted" in unsure.output) == (1, True)
    assert purged.output == f"dropped: 2 jobs of {name}\n"
    assert depth == (0, 0)
