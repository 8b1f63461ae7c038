"""Whether anybody listens where an instance would is learned from the server alone."""

from __future__ import annotations

import asyncio

from dynbus.bus.bus import Bus
from dynbus.bus.config import BusConfig
from dynbus.bus.memory.bus import MemoryBus
from dynbus.bus.protocol.names import InstanceName
from dynbus.bus.transport import Message
from dynbus.testing import run

KEY = InstanceName("demo", "Engine", "a")


async def answers(
    *, listens: bool, breaks: bool = False, answered: bool = False
) -> list[bool | None]:
    """What a question is answered with.

    Args:
        listens: whether somebody is at the instance's control subject.
        breaks: whether the connection breaks, and comes back, before the answer.
        answered: whether who listens answers where only the server may.
    """
    memory = MemoryBus()
    data, control = await memory.connect(), await memory.connect()
    bus = await Bus.over(BusConfig(), data, control)
    other = await memory.connect()
    heard: list[Message] = []

    def hear(message: Message) -> None:
        heard.append(message)
        if answered:
            other.publish(message.reply, b"")

    if listens:
        other.subscribe(KEY.control_subject, hear)
    await other.barrier()
    found: list[bool | None] = []

    bus.questions.ask_for(KEY, found.append)
    if breaks:
        data.disconnect()
    if breaks:
        data.reconnect()
    while not found:  # noqa: ASYNC110 - an answer takes a few turns
        await asyncio.sleep(0)
    left = dict(bus.bounce_handlers)
    await bus.close()

    assert left == {}
    assert len(heard) <= 1
    return found


def test_nobody_is_told_by_the_server() -> None:
    assert run(answers(listens=False)) == [False]


def test_somebody_is_told_by_its_silence() -> None:
    assert run(answers(listens=True)) == [True]


def test_who_listens_cannot_speak_for_the_server() -> None:
    assert run(answers(listens=True, answered=True)) == [True]


def test_a_connection_that_broke_meanwhile_tells_nothing() -> None:
    assert run(answers(listens=False, breaks=True)) == [None]


def test_a_bus_that_has_failed_knows_nothing() -> None:
    async def fail() -> None:
        raise ValueError("on purpose")

    async def story() -> None:
        memory = MemoryBus()
        data, control = await memory.connect(), await memory.connect()
        bus = await Bus.over(BusConfig(), data, control)
        other = await memory.connect()
        other.subscribe(KEY.control_subject, lambda _: None)
        await other.barrier()
        failed = asyncio.Event()
        bus.on_failure(failed.set)
        found: list[bool | None] = []

        bus.background.start(fail, name="fails")
        bus.questions.ask_for(KEY, found.append)
        await failed.wait()
        later = await bus.questions.is_there(KEY)

        assert found == [None]
        assert later is None
        assert bus.bounce_handlers == {}
        await bus.close()

    run(story())
