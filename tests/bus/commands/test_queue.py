"""`dynbus queue` lists queues and dead letters, and redrives or discards these."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import cast

import anyio
import pytest
from click.testing import CliRunner, Result

from dynbus.bus.bus import Bus
from dynbus.bus.commands.queue import queue as command_group
from dynbus.bus.commands.queue_report import Counts, Rates, read_queue
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import ConfigError, PayloadTooLarge
from dynbus.bus.nats.jetstream import NatsJetStream
from dynbus.bus.nats.server_process import RunningServer
from dynbus.bus.protocol.names import (
    EndpointName,
    dead_letter_stream,
    dead_letter_subject,
    work_stream,
    work_subject,
)
from dynbus.bus.work_queue import DeadLetters, JobLog, NoDeadLetter, WorkQueue, WorkQueueConfig

pytestmark = pytest.mark.anyio


async def test_a_letter_that_cannot_be_redriven_keeps_no_other_from_it(
    nats_server: RunningServer,
) -> None:
    namespace = f"n{secrets.token_hex(6)}"
    bus = await Bus.connect(BusConfig(servers=(nats_server.url,)))
    queue = WorkQueue(
        bus, EndpointName(namespace, "Printer", "print"), WorkQueueConfig(in_memory=True)
    )
    jetstream = bus.data.jetstream
    await queue.put(b"page", job_id="one")
    async with queue.take() as taker:
        await (await anext(taker)).bury("no paper")
    [letter] = await DeadLetters(jetstream, namespace).find()
    # As nobody writes it by dynbus, and as the oldest of them.
    subject = dead_letter_subject(namespace, "Other", "take", "0" * 16)
    await jetstream.purge(dead_letter_stream(namespace))
    block = b"NATS/1.0\r\nDynbus-Job: \x1b[31m\r\n\r\n"
    bus.data.publish(subject, b"", headers=block)
    await bus.data.barrier()
    # One whose queue is nowhere.
    nowhere = dead_letter_subject(namespace, "Other", "take", "1" * 16)
    await jetstream.publish(nowhere, b"page", headers={"Dynbus-Job": "two"})
    again = dead_letter_subject(namespace, "Printer", "print", letter.letter_id)
    await jetstream.publish(again, b"page", headers={"Dynbus-Job": "one"})

    redriven = await asyncio.to_thread(
        CliRunner().invoke,
        command_group,
        ["redrive", namespace, "--all", "--nats", nats_server.url],
    )
    left = await DeadLetters(jetstream, namespace).find()
    await bus.close()

    assert f"redriven: {letter.letter_id} one\n" in redriven.output
    assert redriven.exit_code != 0
    assert [one.letter_id for one in left] == ["0" * 16, "1" * 16]


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
    async with queue.take() as taker:
        await (await anext(taker)).bury("no paper")
    await bus.data.jetstream.delete_stream(work_stream(queue.name))
    only_dead = await command("show", str(queue.name))

    assert "has no dead letters" in nothing.output
    assert no_queue.output == f"{namespace} has no queue\n"
    assert other.output == f"{namespace}.Other has no queue\n"
    assert queues == [
        {
            "queue": f"{namespace}.Printer.print",
            "waiting": 0,
            "held": 0,
            "dead": 4,
            "oldest": None,
        },
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
    queue_name, *counts, age = row.split()
    assert (queue_name, counts) == (f"{namespace}.Printer.print", ["1", "0", "0"])
    assert age.endswith("s")
    assert isinstance(only_dead.exception, ConfigError)
    assert f"only dead letters (1): `dynbus queue dead {queue.name}`" in str(only_dead.exception)
    await bus.close()


async def test_a_queue_shows_what_it_holds_how_old_and_how_often_tried_it_is_and_how_it_moves(
    nats_server: RunningServer,
) -> None:
    namespace = f"n{secrets.token_hex(6)}"
    name = EndpointName(namespace, "Printer", "print")
    bus = await Bus.connect(BusConfig(servers=(nats_server.url,)))
    queue = WorkQueue(bus, name, WorkQueueConfig(in_memory=True, retry_delay=0.0))
    jetstream = cast(NatsJetStream, bus.data.jetstream)

    async def show(*arguments: str) -> Result:
        return await asyncio.to_thread(
            CliRunner().invoke,
            command_group,
            ["show", str(name), *arguments, "--nats", nats_server.url],
        )

    none = await show()
    await queue.put(b"", job_id="first")
    await queue.put(b"", job_id="urgent", priority=1)
    async with queue.take(limit=2) as taker:
        await (await anext(taker)).nak("no paper")
        held = [await anext(taker), await anext(taker)]
        await queue.put(b"", job_id="also")
        for number in range(3):
            await queue.put(b"", job_id=f"low-{number}", priority=-1)
        with anyio.fail_after(30.0):
            # A taker tells what it holds a moment later.
            while sum((report := await read_queue(jetstream, name)).tries.values()) < 2:
                pass
        table = (await show("-n", "0.1")).output
        as_json = json.loads((await show("--interval", "0.1", "--json")).output)
        for job in held:
            await job.ack()
        after = await read_queue(jetstream, name)
    await jetstream.purge(work_stream(name))
    empty = json.loads((await show("--interval", "0.1", "--json")).output)
    await jetstream.delete_stream(work_stream(name))
    await bus.close()

    assert {job.job_id for job in held} == {"first", "urgent"}
    assert isinstance(none.exception, ConfigError)
    assert f"there is no queue {name}: `dynbus queue ls {namespace}` lists" in str(none.exception)
    age = as_json["oldest"].pop("age")
    rates = as_json.pop("rates")
    waiting, held_now, lanes = (as_json.pop(one) for one in ("waiting", "held", "lanes"))
    assert as_json == {
        "queue": str(name),
        "paused": False,
        "dead": 0,
        "tried_before": as_json["tried_before"],
        "tries": {"1": 1, "2": 1},
        "takers": 1,
        "bytes": report.size,
        "oldest": {"job": "first"},
    }
    # What the taker had asked for before it had enough is held too, until another one takes it.
    assert (waiting + held_now, held_now >= 2, as_json["tried_before"] >= 1) == (6, True, True)
    assert list(lanes) == ["high", "normal", "low"]
    assert sum(lane["waiting"] for lane in lanes.values()) == waiting
    assert sum(lane["held"] for lane in lanes.values()) == held_now
    assert age > 0.0
    assert rates == {"put": 0.0, "taken": 0.0, "left": 0.0}
    assert f"waiting: {waiting} (" in table
    assert " in lane " in table
    assert f"held: {held_now} with a taker or to be tried again (" in table
    assert "takers: 1 say that they hold jobs\n" in table
    assert "\ntries: 1 in try 1, 1 in try 2\n" in table
    assert "oldest: first, " in table
    assert "rates: put 0.0/s, taken 0.0/s, left 0.0/s\n" in table
    assert (after.counts.left, after.counts.put) == (2, 6)
    assert (empty["oldest"], empty["waiting"], empty["held"]) == (None, 0, 0)


def test_rates_are_of_what_happened_between_two_looks() -> None:
    before = Counts(10.0, put=100, taken=90, left=80)

    assert Rates.between(before, Counts(12.0, 110, 94, 81)) == (5.0, 2.0, 0.5)
    # It was deleted, and made anew.
    assert Rates.between(before, Counts(12.0, 2, 1, 0)) == (0.0, 0.0, 0.0)


def test_what_is_no_queue_or_no_letter_is_refused(nats_server: RunningServer) -> None:
    def command(*arguments: str) -> Result:
        return CliRunner().invoke(command_group, [*arguments, "--nats", nats_server.url])

    for where in ("a.b.c.d", "a.>", "*", ""):
        assert isinstance(command("ls", where).exception, ConfigError), where
    for name in ("a.b", "a.b.c.d", "a.b.>"):
        assert isinstance(command("show", name).exception, ConfigError), name
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
    log = JobLog(bus.data.jetstream, name)

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
        await log.ensure()
        for job_id in ("three", "elsewhere"):
            await log.store_step(job_id, 0, b"", claim=0)
        unsure = await command("purge", str(name))
        purged = await command("purge", str(name), "--yes")
        absent = [
            await command("pause", f"{name}er"),
            await command("resume", f"{name}er"),
            await command("purge", f"{name}er", "--yes"),
        ]
        depth = await queue.depth(max_age=0.0)
        steps = await log.steps("three"), await log.steps("elsewhere")
    finally:
        await bus.data.jetstream.delete_stream(work_stream(name))
        await bus.data.jetstream.delete_stream(log.stream)
        await bus.close()

    assert steps == ({}, {0: b""})
    assert (paused.output, resumed.output) == (f"paused: {name}\n", f"resumed: {name}\n")
    assert (unsure.exit_code, "Aborted" in unsure.output) == (1, True)
    assert purged.output == f"dropped: 2 jobs of {name}\n"
    assert all(f"`dynbus queue ls {name.namespace}` lists" in str(one.exception) for one in absent)
    assert depth == (0, 0)
