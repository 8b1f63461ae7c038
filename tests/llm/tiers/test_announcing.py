"""Conversations that are announced: their blocks are in the cache before the next request comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynbus.bus.errors import Unavailable
from dynbus.llm.engine.interface import Held
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.generation import Announced, Announcement, GenerateRequest, Sampling, Session
from dynbus.llm.mock.engine import MockConfig, MockEngine
from dynbus.llm.mock.worker import MockWorker
from dynbus.testing import TestKit, run

from .remembering import expected
from .test_host_store import GREEDY, SIZE, Engine, prompt

SESSION = Session("chat", 600.0)


def announce(engine: Engine, session: str = "chat", owner: str = "") -> Held:
    engine.engine.announce("announced", owner, session)
    [held] = engine.step().held
    assert not engine.engine.has_work
    return held


def test_a_conversation_that_is_announced_is_in_the_cache_when_it_goes_on() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6), session=SESSION)
    engine.generate(prompt(2, 7))
    assert engine.overlap(prompt(1, 6)).device < 6

    assert announce(engine) == Held("announced", (), 6 * SIZE, 0)
    # Routers know it, and nothing is brought when the request comes.
    assert engine.overlap(prompt(1, 6)).device == 6
    brought = engine.store.statistics.brought
    assert engine.generate(prompt(1, 6)) == (expected(prompt(1, 6), 2), 6 * SIZE)
    assert engine.store.statistics.brought == brought


def test_what_nobody_keeps_is_announced_in_vain() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6), session=SESSION)
    engine.generate(prompt(2, 7))
    free = engine.engine.load

    assert announce(engine, "another") == Held("announced", (), 0, 0)
    # One of another tenant has the same name.
    assert announce(engine, owner="ada") == Held("announced", (), 0, 0)
    assert engine.store.statistics.brought == 0
    assert engine.engine.load == free


def test_what_is_announced_takes_no_block_that_is_in_use() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6), session=SESSION)
    engine.engine.add("runs", GenerateRequest(prompt(2, 5), 9, sampling=GREEDY, ignore_eos=True))
    made: list[int] = []

    def step() -> tuple[Held, ...]:
        step = engine.step()
        made.extend(token for _, item in step.outputs for token in item.token_ids)
        return tuple(step.held)

    step()
    engine.engine.announce("announced", "", "chat")
    [held] = step()
    # Six of eight blocks are in use.
    assert held.computed == 2 * SIZE
    while engine.engine.has_work:
        step()
    assert made == expected(prompt(2, 5), 9)
    assert engine.generate(prompt(1, 6)) == (expected(prompt(1, 6), 2), 6 * SIZE)


def test_what_was_announced_goes_when_others_need_its_room() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6), session=SESSION)
    engine.generate(prompt(2, 7))
    announce(engine)

    assert engine.generate(prompt(3, 7)) == (expected(prompt(3, 7), 2), 0)
    assert engine.engine.load.active_blocks == 0


def test_a_worker_is_told_of_it_by_name() -> None:
    async def story() -> list[Announced]:
        async with TestKit() as kit:
            await kit.start(Mock, block_size=16, blocks=32, host_blocks=64)
            client: Any = kit.client(Mock)
            for number, session in enumerate((Session("chat", 60.0), None)):
                asked = GenerateRequest(
                    [number] * 480, 2, session=session, sampling=Sampling(), cache_salt="ada"
                )
                assert [item async for item in client.generate(asked)]
            asked_for = [("chat", "ada"), ("chat", "ada"), ("chat", "")]
            return [await client.announce(Announcement(*one)) for one in asked_for]

    first, again, others = run(story())

    assert (first.tokens, again) == (480, Announced(480, 0))
    assert first.brought > 400
    assert others == Announced()


class Mock(MockWorker, namespace="mock"):
    pass


class Silent(MockEngine):
    """An engine that does not get round to it."""

    def announce(self, name: str, owner: str, session: str) -> None:
        """Nothing is told of it."""


def test_who_announces_is_told_that_the_engine_is_stopped() -> None:
    async def story() -> None:
        async with EngineRunner(Silent(MockConfig())) as runner:
            waiting = asyncio.create_task(runner.announce("announced", "", "chat"))
            await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="stopped"):
            await waiting
        with pytest.raises(Unavailable, match="stopped"):
            await runner.announce("announced", "", "chat")

    run(story())
