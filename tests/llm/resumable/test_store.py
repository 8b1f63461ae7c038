"""Questions whether an owner goes on with a stream: what they cost, and who hears the answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Final

import pytest
from tests.conditions import eventually

from dynbus.bus.transport import Message
from dynbus.llm.resumable.names import stream_owner_subject
from dynbus.llm.resumable.records import OwnerWatch
from dynbus.llm.resumable.store import YES, StreamStore
from dynbus.testing import TestKit

pytestmark = pytest.mark.anyio

OWNER: Final = "another"


def _owns_nothing(key: str) -> bool:
    return False


@pytest.fixture
async def kit() -> AsyncGenerator[TestKit]:
    async with TestKit() as kit:
        yield kit


@pytest.fixture
async def store(kit: TestKit) -> AsyncGenerator[StreamStore]:
    store = StreamStore(kit.caller, _owns_nothing)
    await store.make_ready()
    yield store
    store.close()


async def asked(kit: TestKit) -> list[Message]:
    """The questions to the other front end, as they come."""
    questions: list[Message] = []
    kit.caller.bus.data.subscribe(stream_owner_subject(OWNER), questions.append)
    await kit.caller.bus.data.barrier()
    return questions


async def test_a_question_costs_as_much_however_many_others_wait(
    kit: TestKit, store: StreamStore
) -> None:
    await asked(kit)

    def cost(watches: list[OwnerWatch]) -> float:
        # Of this thread: others may have the processor meanwhile.
        began = time.thread_time()
        for watch in watches:
            store.ask("key", OWNER, watch)
        for watch in watches:
            store.forget(watch)
            store.ask("key", OWNER, watch)
        return (time.thread_time() - began) / len(watches)

    few = min(cost([OwnerWatch() for _ in range(64)]) for _ in range(8))
    many = min(cost([OwnerWatch() for _ in range(4096)]) for _ in range(2))

    assert many < 8 * few


async def test_an_answer_is_heard_by_who_asked_last_and_by_nobody_who_left(
    kit: TestKit, store: StreamStore
) -> None:
    questions = await asked(kit)
    data = kit.caller.bus.data
    watches = [OwnerWatch() for _ in range(4)]
    for watch in watches:
        store.ask("key", OWNER, watch)
    store.forget(watches[1])
    store.ask("key", OWNER, watches[2])
    await eventually(lambda: len(questions) == 5)

    # The last but one answers a question that was asked again since.
    for question in questions[:4]:
        data.publish(question.reply, YES)
    await eventually(lambda: watches[3].lives)

    assert [watch.lives for watch in watches] == [True, None, None, True]
    data.publish(questions[4].reply, YES)
    await eventually(lambda: watches[2].lives)
