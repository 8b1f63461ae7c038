"""`dynbus dlq` lists, shows, retries and drops dead letters."""

from __future__ import annotations

import asyncio
import json
import secrets

import pytest
from click.testing import CliRunner, Result

from dynbus.bus.bus import Bus
from dynbus.bus.commands.dlq import dlq
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, PayloadTooLarge
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import EndpointName, work_subject
from dynbus.bus.work_queue import NoDeadLetter, WorkQueue, WorkQueueConfig

pytestmark = pytest.mark.anyio


async def test_dead_letters_are_listed_shown_tried_again_and_dropped(
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
            CliRunner().invoke, dlq, [*arguments, "--nats", nats_server.url]
        )

    nothing = await command("list", namespace)
    for job_id in ("one", "two", "three"):
        await queue.put(b"page \x1b[31m", job_id=job_id, headers={"colour": "red"})
    async with queue.take() as taker:
        for _ in range(3):
            await (await anext(taker)).bury("no [paper]")
    listed = json.loads((await command("list", f"{namespace}.Printer.print", "--json")).output)
    table = (await command("list", namespace)).output
    one, two, three = (letter["letter"] for letter in listed)
    shown = (await command("show", namespace, one)).output
    as_json = json.loads((await command("show", namespace, one, "--json")).output)
    await bus.data.jetstream.publish(
        work_subject(queue.name), bytes(bus.data.jetstream.max_payload - 100), message_id="large"
    )
    async with queue.take() as taker:
        await (await anext(taker)).bury("too large")
    *_, large = json.loads((await command("list", namespace, "--json")).output)
    empty = await command("retry", namespace, large["letter"])
    retried = await command("retry", namespace, one)
    dropped = await command("purge", namespace, two)
    rest = await command("purge", namespace, "--all")
    again = await command("retry", namespace, one)

    assert "has no dead letters" in nothing.output
    assert [letter["job"] for letter in listed] == ["one", "two", "three"]
    assert listed[0]["error"] == "no [paper]"
    assert (listed[0]["headers"], listed[0]["bytes"]) == ({"colour": "red"}, 10)
    assert "no [paper]" in " ".join(table.split())
    assert "queue: " + f"{namespace}.Printer.print" in shown
    assert "\x1b" not in shown
    assert as_json["data"] == "page \x1b[31m"
    assert retried.output == f"retried: {one} one\n"
    assert dropped.output == f"dropped: {two} two\n"
    assert rest.output == f"dropped: {three} three\ndropped: {large['letter']} large\n"
    assert isinstance(empty.exception, PayloadTooLarge)
    assert large["lost_bytes"] == bus.data.jetstream.max_payload - 100
    assert isinstance(again.exception, NoDeadLetter)
    assert (await queue.depth(max_age=0.0)).waiting == 1
    await bus.close()


def test_what_is_no_queue_or_no_letter_is_refused(nats_server: RunningServer) -> None:
    def command(*arguments: str) -> Result:
        return CliRunner().invoke(dlq, [*arguments, "--nats", nats_server.url])

    for where in ("a.b.c.d", "a.>", "*", ""):
        assert isinstance(command("list", where).exception, ConfigError), where
    assert isinstance(command("show", "demo", "*").exception, NoDeadLetter)
    assert command("purge", "demo").exit_code == 2
    assert command("purge", "demo", "0123456789abcdef", "--all").exit_code == 2
