"""KV-aware routing under failure: routers, engines, publishers and the server die under load.

No call hangs, what is gone leaves every router, and what a router cannot know it says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random

import pytest
from tests.conditions import Stopwatch, eventually

from dynbus import DynbusError, Runtime, call_options
from dynbus.bus.nats.server_process import RunningServer
from dynbus.kvrouter import AwarenessLevel, KvRouter, block_hashes, open_router
from dynbus.kvrouter.routing.router_actor import DecisionQuery
from dynbus.llm.generation import GenerateRequest

from .kv_worker import BLOCK_SIZE, Engine, Front
from .processes import Process

pytestmark = pytest.mark.anyio

CALL_LIMIT = 12.0
"""Seconds after which a call counts as hanging: whatever dies is noticed long before."""
LOAD_FORGOTTEN_WITHIN = 6.5
"""Seconds: 5 of silence and a look every 0.5 s, and what a busy machine adds."""
PROMPT_BLOCKS = 32

numbers = count()
Ask = Callable[[list[int], int], Awaitable[object]]
"""Has a prompt continued by so many tokens."""


class Fleet:
    """Engine and router processes that end with their test."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder
        self._started: list[Process] = []

    def begin(self, actor: str, name: str) -> Process:
        log = self._folder / f"{actor}-{len(self._started)}.log"
        process = Process(log, "tests.scenarios.kv_worker", self.url, actor, name)
        self._started.append(process)
        return process

    async def start(self, actor: str, *names: str) -> dict[str, Process]:
        """Processes by name, once all of them serve."""
        begun = {name: self.begin(actor, name) for name in names}
        for process in begun.values():
            await process.says("ready")
        return begun

    def end_all(self) -> None:
        for process in self._started:
            process.kill()


@pytest.fixture
def fleet(own_server: RunningServer, tmp_path: Path) -> Iterator[Fleet]:
    started = Fleet(own_server.url, tmp_path)
    try:
        yield started
    finally:
        started.end_all()


class FrontEnd:
    """A caller with a router of its own."""

    def __init__(self, runtime: Runtime, router: KvRouter) -> None:
        self.runtime = runtime
        self.router = router
        self.engine = runtime.client(Engine, routing=router)

    async def ask(self, prompt: list[int], max_tokens: int = 4) -> str:
        """Have a prompt continued; returns the request id."""
        request_id = f"request-{next(numbers)}"
        with call_options(request_id=request_id, wait=60.0):
            async for _ in self.engine.generate(GenerateRequest(prompt, max_tokens)):
                pass
        return request_id

    def knows(self, prompt: list[int]) -> dict[str, int]:
        """Who is said to hold how many blocks of a prompt."""
        assert self.router.follower is not None
        found = self.router.follower.overlaps(block_hashes(prompt, BLOCK_SIZE))
        return {rank.instance: overlap.total for rank, overlap in found.items() if overlap.total}

    async def sees_no_load(self) -> bool:
        """Whether nothing runs, as far as its router knows."""
        [decision] = self.router.decisions(await self.ask(new_prompt(1), 1))
        return not any(candidate.active_requests for candidate in decision.candidates)

    @property
    def level(self) -> AwarenessLevel:
        return self.router.awareness().level

    async def is_exact(self) -> None:
        await eventually(
            lambda: self.level is AwarenessLevel.EXACT,
            what=f"{self.router!r} is {self.router.awareness()}",
        )


@asynccontextmanager
async def front_end(url: str, engines: int) -> AsyncGenerator[FrontEnd]:
    """A front end, once it knows so many engines and what each of them holds."""
    async with Runtime.connect(url) as runtime, open_router(runtime, Engine) as router:
        await (await runtime.endpoint("scenario.Engine.generate").client()).wait_for_instances(
            10.0, count=engines
        )
        opened = FrontEnd(runtime, router)
        await opened.is_exact()
        yield opened


class Load:
    """Callers that ask one question after the other, about a few documents."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.results = 0
        self.errors: Counter[str] = Counter()
        self.unsafe: list[DynbusError] = []
        self.slowest = 0.0
        self._documents = documents
        self._random = Random(1)

    @property
    def calls(self) -> int:
        return self.results + self.errors.total()

    async def more_results(self, more: int = 20) -> None:
        """Wait until so many more calls had a result."""
        wanted = self.results + more
        await eventually(
            lambda: self.results >= wanted, what=f"{more} results; errors: {self.errors}"
        )

    async def keep_asking(self, ask: Ask) -> None:
        while True:
            prompt = self._random.choice(self._documents) + new_prompt(2)
            watch = Stopwatch()
            try:
                async with asyncio.timeout(CALL_LIMIT):
                    await ask(prompt, 8)
            except DynbusError as error:
                self.errors[error.code] += 1
                # As callers do before they try again.
                await asyncio.sleep(0.05)
            else:
                self.results += 1
            self.slowest = max(self.slowest, watch.seconds())


@asynccontextmanager
async def load_on(*asks: Ask, callers: int = 8) -> AsyncGenerator[Load]:
    """Callers that ask in these ways. A call that hangs, or fails untyped, ends the test."""
    load = Load([new_prompt(8) for _ in range(6)])
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(load.keep_asking(asks[number % len(asks)]))
            for number in range(callers)
        ]
        try:
            await load.more_results()
            yield load
        finally:
            for task in tasks:
                task.cancel()


prompt_tokens = Random(2)


def new_prompt(blocks: int = PROMPT_BLOCKS) -> list[int]:
    """A prompt of whole blocks that nobody has seen before."""
    return [prompt_tokens.randrange(32_000) for _ in range(blocks * BLOCK_SIZE)]


def asking(client: Front) -> Ask:
    """To ask by way of the `RouterActor`s."""

    async def ask(prompt: list[int], max_tokens: int) -> None:
        with call_options(wait=60.0):
            async for _ in client.generate({"token_ids": prompt, "max_tokens": max_tokens}):
                pass

    return ask


async def drain(items: AsyncGenerator[object, None]) -> None:
    async for _ in items:
        pass


async def hold_streams(client: Front, tokens: int, streams: int) -> list[asyncio.Task[str]]:
    """Streams that run, each with its first item; the tasks give the code of what ended them."""
    running = [asyncio.Event() for _ in range(streams)]

    async def read(number: int) -> str:
        fields = {"token_ids": new_prompt(4), "max_tokens": tokens}
        try:
            async with asyncio.timeout(60.0), aclosing(client.generate(fields)) as stream:
                async for _ in stream:
                    running[number].set()
        except DynbusError as error:
            return error.code
        return ""

    tasks = [asyncio.create_task(read(number)) for number in range(streams)]
    for event in running:
        await event.wait()
    return tasks


async def requests_elsewhere(runtime: Runtime, front: str) -> int:
    """How many requests a router takes to run, apart from the one that asks."""
    client = runtime.client(Front)
    request_id = f"probe-{next(numbers)}"
    with call_options(instance=front, request_id=request_id):
        async for _ in client.generate({"token_ids": new_prompt(1), "max_tokens": 1}):
            pass
    with call_options(instance=front):
        [decision] = await client.decisions(DecisionQuery(request_id=request_id))
    return sum(candidate["active_requests"] for candidate in decision["candidates"])


async def test_a_prompt_goes_where_it_is_cached_and_as_much_is_reused_as_was_predicted(
    fleet: Fleet,
) -> None:
    await fleet.start("Engine", "a", "b", "c")
    # Engines that are alike are drawn from: so many do not all have the same one.
    prompts = [new_prompt() for _ in range(16)]
    async with front_end(fleet.url, 3) as first, front_end(fleet.url, 3) as second:
        places: list[str] = []
        for prompt in prompts:
            [decision] = first.router.decisions(await first.ask(prompt))
            places.append(decision.chosen.instance)
            await eventually(
                lambda prompt=prompt, place=decision.chosen.instance: (  # type: ignore[misc]
                    second.knows(prompt) == {place: PROMPT_BLOCKS}
                )
            )

        for prompt, place in zip(prompts, places, strict=True):
            [decision] = second.router.decisions(await second.ask(prompt + new_prompt(1)))

            assert decision.chosen.instance == place
            assert decision.told_reuse == decision.expected_reuse == PROMPT_BLOCKS * BLOCK_SIZE
            assert decision.outcome.reused_tokens == decision.expected_reuse
        statistics = second.router.statistics()
        assert statistics is not None
        expected = len(prompts) * PROMPT_BLOCKS * BLOCK_SIZE
        assert statistics.reused_tokens == statistics.compared_tokens == expected
        assert len(set(places)) > 1


@pytest.mark.nightly(
    "tests/kvrouter/routing/test_load_sharing.py::test_a_router_that_dies_takes_its_load_along_and_one_that_leaves_at_once",
)
async def test_routers_that_are_killed_in_turn_leave_no_call_hanging_and_no_load_behind(
    fleet: Fleet,
) -> None:
    await fleet.start("Engine", "a", "b")
    fronts = await fleet.start("Front", "front-0", "front-1")
    async with Runtime.connect(fleet.url) as runtime:
        client = runtime.client(Front)
        endpoint = await runtime.endpoint("scenario.Front.generate").client()
        await endpoint.wait_for_instances(60.0, count=2)
        for killed, survivor in (("front-0", "front-1"), ("front-1", "front-0")):
            async with load_on(asking(client)) as load:
                with call_options(instance=killed):
                    held = await hold_streams(client, 3000, 6)

                async def is_told(survivor: str = survivor) -> bool:
                    return await requests_elsewhere(runtime, survivor) >= 6

                await eventually(is_told, what=f"{survivor} knows of the streams of {killed}")
                fronts[killed].kill()
                watch = Stopwatch()
                codes = set(await asyncio.gather(*held))
                await load.more_results()

            assert codes == {"StreamLost"}
            assert set(load.errors) <= {"StreamLost"}
            assert load.slowest < CALL_LIMIT

            async def is_forgotten(survivor: str = survivor) -> bool:
                return await requests_elsewhere(runtime, survivor) == 0

            await eventually(is_forgotten, LOAD_FORGOTTEN_WITHIN - watch.seconds())
            fronts |= await fleet.start("Front", killed)
            await endpoint.wait_for_instances(60.0, count=2)


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_membership.py::test_blocks_go_at_once_with_the_lease_that_their_instance_had",
)
async def test_a_killed_engine_leaves_every_router_and_calls_go_on(fleet: Fleet) -> None:
    engines = await fleet.start("Engine", "a", "b", "c")
    async with AsyncExitStack() as exits:
        fronts = [await exits.enter_async_context(front_end(fleet.url, 3)) for _ in range(2)]
        prompt = new_prompt()
        [decision] = fronts[0].router.decisions(await fronts[0].ask(prompt))
        victim = decision.chosen.instance
        async with load_on(*(front.ask for front in fronts)) as load:
            await eventually(lambda: all(victim in front.knows(prompt) for front in fronts))

            engines[victim].kill()
            # Its lease lasts 2 s.
            await eventually(
                lambda: not any(victim in front.knows(prompt) for front in fronts), 6.0
            )
            await load.more_results()

        assert set(load.errors) <= {"StreamLost"}
        for front in fronts:
            await eventually(front.sees_no_load)
            await front.is_exact()
            [decision] = front.router.decisions(await front.ask(prompt))
            candidates = {candidate.rank.instance for candidate in decision.candidates}
            assert candidates == {"a", "b", "c"} - {victim}


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_follower.py::test_a_follower_says_that_the_server_is_out_of_reach_and_heals_after_it"
)
async def test_a_restart_of_the_server_degrades_routing_until_it_is_exact_again(
    own_server: RunningServer, fleet: Fleet
) -> None:
    await fleet.start("Engine", "a", "b")
    async with front_end(fleet.url, 2) as front:
        prompt = new_prompt()
        [decision] = front.router.decisions(await front.ask(prompt))
        async with load_on(front.ask) as load:
            await asyncio.to_thread(own_server.kill)
            await eventually(lambda: front.level is AwarenessLevel.DEGRADED)
            during = front.router.awareness()
            await own_server.start()
            await front.is_exact()
            await load.more_results()

        [after] = front.router.decisions(await front.ask(prompt + new_prompt(1)))
        assert "the server is out of reach" in during.reason
        assert load.errors.total() == 0
        assert after.chosen == decision.chosen
        assert after.outcome.reused_tokens == after.told_reuse == PROMPT_BLOCKS * BLOCK_SIZE


@pytest.mark.nightly(
    "tests/kvrouter/stream/test_follower.py::test_an_instance_whose_publisher_died_is_asked_and_named_as_silent",
    "tests/kvrouter/routing/test_observing.py::test_each_change_of_the_awareness_is_a_warning_with_its_reason",
)
async def test_an_engine_whose_publisher_died_is_named_as_what_cannot_be_relied_on(
    fleet: Fleet,
) -> None:
    await fleet.start("Engine", "a", "b")
    async with front_end(fleet.url, 2) as front:
        direct = front.runtime.client(Engine)
        old, new = ([new_prompt() for _ in range(count)] for count in (12, 18))
        with call_options(instance="a"):
            for prompt in old:
                await drain(direct.generate(GenerateRequest(prompt, 1)))
            await eventually(lambda: all(front.knows(prompt) for prompt in old))
            assert await direct.kill_publisher() > 0
            # What it is last heard to hold it has no room for.
            for prompt in new:
                await drain(direct.generate(GenerateRequest(prompt, 1)))

        decisions = [front.router.decisions(await front.ask(prompt))[0] for prompt in old]

        assert front.level is AwarenessLevel.DEGRADED
        assert "a/0" in front.router.awareness().reason
        misled = [one for one in decisions if one.told_reuse and not one.outcome.reused_tokens]
        assert len(misled) >= 8
        assert all(decision.chosen.instance == "a" for decision in misled)
        assert all(decision.outcome.error == "" for decision in decisions)
