"""Calls are decided, wait, are charged and let go, however they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from dynbus import (
    DeadlineExceeded,
    Draining,
    Migrate,
    Overloaded,
    call_options,
    handler,
)
from dynbus.kvrouter.routing.config import RouterConfig
from dynbus.kvrouter.routing.router import KvRouter, open_router
from dynbus.testing import TestKit, run

from .routing_fixtures import by_name, until
from .worker import Prompt, Worker, prompt, running, start, waiting, where


def test_load_is_given_back_however_a_call_ends() -> None:
    async def story() -> tuple[int, int]:
        async with TestKit() as kit:
            await start(kit, "a")
            router = KvRouter()
            client = kit.client(Worker, routing=router)
            await where(client, prompt())
            stream = client.generate(prompt(of=1))
            async for _ in stream:
                break
            await stream.aclose()
            left = asyncio.create_task(where(client, prompt(of=2, hold=True)))
            await until(lambda: running(router) == 1)
            left.cancel()
            await asyncio.wait({left})
            with pytest.raises(TimeoutError), call_options(timeout=0.5):
                await where(client, prompt(of=3, hold=True))
            statistics = router.statistics()
            assert statistics is not None
            return statistics.decisions, statistics.running

    assert run(story()) == (4, 0)


def test_a_call_waits_for_room_and_leaves_the_queue_when_its_caller_leaves() -> None:
    async def story() -> tuple[int, int, str]:
        async with TestKit() as kit:
            workers = await start(kit, "a", max_batched_tokens="64")
            config = RouterConfig(queue_threshold=1.0, queue_limit=2)
            router = KvRouter(config=config)
            client = kit.client(Worker, routing=router)

            first = asyncio.create_task(where(client, prompt(5, 1, hold=True)))
            await until(lambda: running(router) == 1)
            leaves = asyncio.create_task(where(client, prompt(5, 2)))
            stays = asyncio.create_task(where(client, prompt(5, 3)))
            await until(lambda: waiting(router) == 2)
            with pytest.raises(Overloaded):
                await where(client, prompt(5, 4))
            leaves.cancel()
            await asyncio.wait({leaves})
            after_leaving = waiting(router)
            workers["a"].held.set()
            await first
            return after_leaving, waiting(router), await stays

    assert run(story()) == (1, 0, "a")


def test_a_call_that_waits_goes_to_an_instance_that_comes_although_nobody_else_calls() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            workers = await start(kit, "a", max_batched_tokens="64")
            config = RouterConfig(queue_threshold=1.0)
            async with open_router(kit.caller, Worker, exact=False, config=config) as router:
                client = kit.client(Worker, routing=router)
                first = asyncio.create_task(where(client, prompt(5, 1, hold=True)))
                await until(lambda: running(router) == 1)
                waits = asyncio.create_task(where(client, prompt(5, 2)))
                await until(lambda: "1 waiting" in repr(router))

                await start(kit, "b", max_batched_tokens="64")
                async with asyncio.timeout(2.0):
                    name = await waits

                workers["a"].held.set()
                await first
                return name

    assert run(story()) == "b"


@pytest.mark.parametrize("share", [True, False])
def test_calls_that_wait_end_with_draining_when_their_router_closes(share: bool) -> None:
    async def story() -> tuple[list[BaseException | str], int, str]:
        async with TestKit() as kit:
            workers = await start(kit, "a", max_batched_tokens="64")
            config = RouterConfig(queue_threshold=1.0)
            opened = open_router(kit.caller, Worker, exact=False, share=share, config=config)
            async with opened as router:
                client = kit.client(Worker, routing=router)
                first = asyncio.create_task(where(client, prompt(5, 1, hold=True)))
                await until(lambda: running(router) == 1)
                queued = [asyncio.create_task(where(client, prompt(5, of))) for of in (2, 3)]
                await until(lambda: waiting(router) == 2)

            async with asyncio.timeout(5.0):
                ended = await asyncio.gather(*queued, return_exceptions=True)
            left = waiting(router)

            workers["a"].held.set()
            return ended, left, await first

    ended, left, served = run(story())

    for error in ended:
        assert isinstance(error, Draining)
        assert not error.started
    assert left == 0
    assert served == "a"


def test_a_call_that_leaves_the_queue_at_its_deadline_says_that_it_was_there() -> None:
    async def story() -> str:
        async with TestKit() as kit:
            workers = await start(kit, "a", max_batched_tokens="16")
            router = KvRouter(config=RouterConfig(queue_threshold=1.0))
            client = kit.client(Worker, routing=router)
            first = asyncio.create_task(where(client, prompt(hold=True)))
            await until(lambda: running(router) == 1)
            with call_options(timeout=5.0), pytest.raises(DeadlineExceeded) as caught:
                await where(client, prompt(of=1))
            workers["a"].held.set()
            await first
            return str(caught.value)

    assert "waited 5 s in the router's queue" in run(story())


class Choosy(Worker, namespace="llm"):
    """Has all calls continue elsewhere but those to the one of the last name."""

    @handler(migration_limit=2)
    async def generate(self, prompt: Prompt) -> AsyncGenerator[str, None]:
        if self.name != "c":
            raise Migrate("not here")
        yield self.name


def test_a_decision_says_which_instances_earlier_attempts_of_its_call_have_tried() -> None:
    async def story() -> list[tuple[int, dict[str, str]]]:
        async with TestKit() as kit:
            for name in ("a", "b", "c"):
                await kit.start(Choosy, instance_id=name, name=name, metadata={})
            router = KvRouter(policy=by_name)
            client = kit.client(Choosy, routing=router)
            with call_options(request_id="mine"):
                for of in range(2):
                    assert await where(client, prompt(of=of)) == "c"
            found = router.decisions("mine")
            return [(decision.attempt, dict(decision.excluded)) for decision in found]

    tried = "tried before, by attempt {}, which ended with Migrate"
    of_one_call: list[tuple[int, dict[str, str]]] = [
        (1, {}),
        (2, {"a": tried.format(1)}),
        (3, {"a": tried.format(1), "b": tried.format(2)}),
    ]
    found = [(attempt, dict(sorted(excluded.items()))) for attempt, excluded in run(story())]

    assert found == of_one_call * 2
