"""Simulations: what a seed fixes, what faults do, what always has to hold, and how one fails."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import secrets
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dynbus import (
    Actor,
    ConfigError,
    Middleware,
    MiddlewareCall,
    UnknownOutcome,
    call_options,
    handler,
)
from dynbus.actors.middleware.passing import Proceed
from dynbus.actors.simulation.processes import Process
from dynbus.actors.simulation.randomness import seeded
from dynbus.bus.transport import PullConsumerConfig, StreamConfig
from dynbus.testing import Fault, Kind, Simulation, SimulationFailed, simulate

KILL = Fault(at=1.0, kind=Kind.KILL, lasts=1.0)
FREEZE = Fault(at=1.0, kind=Kind.FREEZE, lasts=3.0)


class Clerk(Actor, namespace="simulated"):
    """Ticks for as long as it runs."""

    ticks: list[float]
    """When any of them ticked."""

    @handler
    async def greet(self, name: str) -> str:
        await asyncio.sleep(0.1)
        return f"hello {name}"

    @handler
    async def count(self, upto: int) -> AsyncGenerator[int, None]:
        for number in range(upto):
            await asyncio.sleep(0.1)
            yield number

    @handler
    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 20.0:
            await asyncio.sleep(0.1)
            self.ticks.append(loop.time())


async def ordinary(simulation: Simulation) -> None:
    for _ in range(2):
        await simulation.start(Clerk)
    client = simulation.client(Clerk, wait=20.0, retries=20)
    for number in range(10):
        name = f"{number} {secrets.token_hex(4)} {uuid.uuid4()} {random.random()}"
        try:
            assert await client.greet(name) == f"hello {name}"
        except UnknownOutcome:
            simulation.counts["unknown outcome"] += 1
        await asyncio.sleep(simulation.random.random())


def test_the_same_seed_repeats_to_the_byte() -> None:
    digests = simulate(ordinary, seeds=range(6)).digests

    assert simulate(ordinary, seeds=range(6)).digests == digests
    assert len(set(digests.values())) == 6


PROGRAM = """
from dynbus.testing import simulate
from tests.actors.test_simulating import ordinary
for seed, digest in simulate(ordinary, seeds=range(6)).digests.items():
    print(seed, digest)
"""


def test_the_same_seed_repeats_to_the_byte_in_another_process_with_other_hashes() -> None:
    digests = simulate(ordinary, seeds=range(6)).digests

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    assert done.stdout == "".join(f"{seed} {digest}\n" for seed, digest in digests.items())


def drawn() -> list[object]:
    return [
        random.random(),
        random.SystemRandom().random(),
        secrets.token_hex(8),
        uuid.uuid4(),
        os.urandom(4),
    ]


def test_all_that_is_drawn_comes_from_the_seed_and_is_as_before_afterwards() -> None:
    before = random.getstate()

    with seeded("1"):
        first = drawn()
    with seeded("1"):
        again = drawn()
    with seeded("2"):
        other = drawn()

    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))
    assert random.getstate() == before
    assert secrets.token_hex(8) != secrets.token_hex(8)


async def watched_ticks(simulation: Simulation) -> list[float]:
    """The seconds after its start at which the one instance ticked, until 10 s."""
    Clerk.ticks = []
    await simulation.start(Clerk)
    began = simulation.now
    call = asyncio.ensure_future(simulation.client(Clerk, timeout=30.0).tick())
    await asyncio.sleep(10.0)
    ticks = [at - began for at in Clerk.ticks]
    call.cancel()
    await asyncio.wait({call})
    return ticks


def outcome(
    story: Callable[[Simulation], Awaitable[list[float]]], *plan: Fault
) -> tuple[list[float], int]:
    """What a story comes to under a plan, and how many faults were carried out."""
    results: list[list[float]] = []

    async def tell(simulation: Simulation) -> None:
        results.append(await story(simulation))

    report = simulate(tell, seeds=[1], plan=plan)
    return results[0], sum(count for key, count in report.counts.items() if "fault: " in key)


def test_nothing_of_a_process_that_is_killed_runs_any_more() -> None:
    ticks, carried_out = outcome(watched_ticks, KILL)

    assert carried_out == 1
    assert 0.8 < max(ticks) < 1.2


def test_a_process_that_is_frozen_goes_on_where_it_stood() -> None:
    ticks, carried_out = outcome(watched_ticks, FREEZE)

    assert carried_out == 1
    assert not [at for at in ticks if 1.2 < at < 3.7]
    assert max(ticks) > 4.0


def test_the_server_goes_on_when_who_used_it_last_does_not() -> None:
    """What a process has stored expires, and what it took is handed out again, though it stands
    still."""

    async def story(simulation: Simulation) -> None:
        first, second = [
            simulation.kit.process_of(await simulation.kit.runtime()) for _ in range(2)
        ]
        taken: list[int] = []

        async def take(process: Process, count: int) -> None:
            jetstream = process.runtime.bus.data.jetstream
            reader = jetstream.pull(
                "JOBS", "C", lambda _: taken.append(process.number), on_missing=lambda: None
            )
            reader.ask(count)
            await process.runtime.bus.data.barrier()

        async def store() -> None:
            jetstream = first.runtime.bus.data.jetstream
            await jetstream.ensure_stream(StreamConfig("RECORDS", ("record",), marker_ttl=0.0))
            await jetstream.ensure_stream(StreamConfig("JOBS", ("job",), work_queue=True))
            await jetstream.ensure_pull_consumer("JOBS", PullConsumerConfig("C", 2.0))
            await take(first, 1)
            await jetstream.publish("job", b"")

        await first.run(store)
        await second.run(take, second, 2)
        await first.run(first.runtime.bus.data.jetstream.publish, "record", b"", ttl=2.0)
        await first.run(first.runtime.bus.data.jetstream.publish, "job", b"")
        first.freeze()
        await asyncio.sleep(10.0)
        records = await simulation.kit.caller.bus.data.jetstream.stream_info("RECORDS")
        first.thaw()

        assert taken == [first.number, second.number, second.number]
        assert not records.messages

    simulate(story, seeds=[1], plan=[])


def test_another_instance_is_started_in_the_place_of_one_that_is_killed() -> None:
    async def story(simulation: Simulation) -> None:
        first = await simulation.start(Clerk)
        await simulation.over()
        await asyncio.sleep(15.0)
        known = simulation.kit.caller.instance_ids(Clerk)
        assert len(known) == 1
        assert known != [first.id]

    simulate(story, seeds=[1], plan=[KILL])


@pytest.mark.parametrize("manner", [0.1, 0.9])
@pytest.mark.parametrize("kind", Kind)
def test_each_kind_of_fault_is_carried_out_and_healed(kind: Kind, manner: float) -> None:
    async def story(simulation: Simulation) -> None:
        for _ in range(3):
            await simulation.start(Clerk)
        client = simulation.client(Clerk)
        await simulation.over()
        assert simulation.undisturbed(0.0) == 0.0
        await asyncio.sleep(20.0)
        assert simulation.undisturbed(0.0) == pytest.approx(20.0)
        for _ in range(6):
            assert await client.greet("Ada") == "hello Ada"

    fault = Fault(at=1.0, kind=kind, pick=manner, lasts=2.0, manner=manner)
    report = simulate(story, seeds=[1], plan=[fault])

    assert report.counts[f"fault: {kind}"] == 1


def test_what_a_killed_process_would_log_fails_no_story() -> None:
    class Loud(Actor, namespace="simulated"):
        """Logs an error when it is ended."""

        @handler
        async def wait(self) -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                logging.getLogger("dynbus.anything").error("I was ended")

    async def story(simulation: Simulation) -> None:
        await simulation.start(Loud)
        with pytest.raises(UnknownOutcome):
            await simulation.client(Loud, timeout=60.0).wait()

    simulate(story, seeds=[1], plan=[KILL])


async def fragile(simulation: Simulation) -> None:
    await simulation.start(Clerk)
    client = simulation.client(Clerk)
    assert [number async for number in client.count(50)] == list(range(50))


def failure(
    story: Callable[[Simulation], Awaitable[object]], **options: object
) -> SimulationFailed:
    with pytest.raises(SimulationFailed) as caught:
        simulate(story, **options)  # type: ignore[arg-type]
    return caught.value


def test_a_failure_has_its_seed_and_the_faults_that_matter() -> None:
    failed = failure(fragile, seeds=range(50), faults={Kind.KILL: 1.0, Kind.SLOW: 3.0})

    assert [fault.kind for fault in failed.plan] == [Kind.KILL]
    assert len(failed.drawn) > 1
    assert f"seed {failed.seed}: StreamLost: the instance is gone" in str(failed)


def test_a_failure_is_repeated_by_what_it_shows() -> None:
    failed = failure(fragile, seeds=range(50), faults={Kind.KILL: 1.0, Kind.SLOW: 3.0})
    shown = str(failed).rpartition("to replay it: ")[2]

    with pytest.raises(SimulationFailed) as caught:
        eval(shown, {"simulate": simulate, "story": fragile})  # noqa: S307

    assert str(caught.value.cause) == str(failed.cause)
    assert caught.value.log == failed.log


def test_an_invariant_is_looked_at_when_a_fault_begins_and_ends() -> None:
    looks: list[int] = []

    async def story(simulation: Simulation) -> None:
        await simulation.start(Clerk)
        await simulation.over()

    def invariant(simulation: Simulation) -> None:
        looks.append(len(simulation.troubles))

    later = Fault(at=5.0, kind=Kind.KILL, lasts=1.0)
    simulate(story, seeds=[1], plan=[FREEZE, later], invariants=[invariant])

    assert looks[0] == 1
    assert len(looks) >= 4


def test_an_invariant_that_does_not_hold_fails_the_story() -> None:
    async def story(simulation: Simulation) -> None:
        await simulation.start(Clerk)
        await simulation.over()

    def invariant(simulation: Simulation) -> None:
        assert not simulation.troubles, "there is trouble"

    failed = failure(story, seeds=[1], plan=[FREEZE], invariants=[invariant])

    assert "AssertionError: there is trouble" in str(failed)


def test_an_error_in_the_log_fails_a_story() -> None:
    async def story(simulation: Simulation) -> None:
        logging.getLogger("dynbus.anything").error("it broke")

    assert "the library logged an error: 1000.000 ERROR it broke" in str(failure(story, seeds=[1]))


def test_a_task_that_outlives_its_process_fails_a_story() -> None:
    class Leaky(Actor, namespace="simulated"):
        """Leaves a task behind."""

        async def on_start(self) -> None:
            self.left = asyncio.get_running_loop().create_task(asyncio.sleep(1e6), name="left")

        @handler
        async def greet(self, name: str) -> str:
            return name

    async def story(simulation: Simulation) -> None:
        await simulation.start(Leaky)

    assert "tasks are left of processes that were closed" in str(failure(story, seeds=[1]))


def test_a_process_may_be_killed_while_it_closes_a_generator_that_was_left() -> None:
    class Hasty(Actor, namespace="simulated"):
        """Leaves a generator as it stands, which the loop then closes."""

        @handler
        async def greet(self, name: str) -> str:
            async def names() -> AsyncGenerator[str, None]:
                try:
                    yield name
                finally:
                    await asyncio.sleep(60.0)

            async for one in names():
                return one
            return ""

    async def story(simulation: Simulation) -> None:
        instance = await simulation.start(Hasty)
        assert await simulation.client(Hasty).greet("Ada") == "Ada"
        await asyncio.sleep(1.0)
        await simulation.kit.kill(instance)

    simulate(story, seeds=[1], plan=())


class Dawdler(Middleware):
    """Keeps results and items for five seconds."""

    async def around(self, call: MiddlewareCall, proceed: Proceed) -> object:
        result = await proceed()
        await asyncio.sleep(5.0)
        return result

    async def items(
        self, call: MiddlewareCall, items: AsyncIterator[object]
    ) -> AsyncIterator[object]:
        async for item in items:
            await asyncio.sleep(5.0)
            yield item


def test_a_call_that_ends_late_fails_a_story() -> None:
    async def story(simulation: Simulation) -> None:
        await simulation.start(Clerk)
        await simulation.client(Clerk, timeout=1.0, middleware=[Dawdler()]).greet("Ada")

    text = str(failure(story, seeds=[1], plan=()))
    assert "calls ended late: simulated.Clerk.greet ended 4." in text


def test_a_stream_that_is_late_with_an_item_fails_a_story() -> None:
    async def story(simulation: Simulation) -> None:
        await simulation.start(Clerk)
        client = simulation.client(Clerk, middleware=[Dawdler()])
        with call_options(timeout=1.0):
            assert [number async for number in client.count(1)] == [0]

    text = str(failure(story, seeds=[1], plan=()))
    assert "calls ended late: simulated.Clerk.count ended 4." in text


def test_a_reader_that_takes_its_time_is_not_late() -> None:
    async def story(simulation: Simulation) -> None:
        await simulation.start(Clerk)
        client = simulation.client(Clerk, timeout=3.0)
        async for _ in client.count(3):
            await asyncio.sleep(0.5)
        await asyncio.sleep(60.0)

    simulate(story, seeds=[1], plan=())


def test_a_story_that_does_not_end_fails() -> None:
    async def story(simulation: Simulation) -> None:
        await asyncio.sleep(1e6)

    assert "the story has not ended after 600 s" in str(failure(story, seeds=[1], plan=()))


def test_faults_and_what_the_library_did_about_them_are_counted() -> None:
    counts = simulate(ordinary, seeds=range(20), faults={Kind.KILL: 1.0, Kind.LEAVE: 1.0}).counts

    assert counts["fault: kill"] > 0
    assert counts["fault: leave"] > 0
    assert counts["unknown outcome"] > 0
    assert sum(number for key, number in counts.items() if key.startswith("log: ")) > 0


def test_a_plan_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no plan"):
        simulate(ordinary, seeds=[1], plan="nonsense")


def test_where_no_story_is_told_nothing_is_proved() -> None:
    with pytest.raises(ConfigError, match="there is no seed, and so no story was told"):
        simulate(ordinary, seeds=[])


@pytest.mark.parametrize(
    "settings", [{"seconds": -1.0}, {"seconds": math.nan}, {"most_faults": -1}]
)
def test_faults_that_cannot_be_drawn_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give seconds and a number from 0 on"):
        simulate(ordinary, seeds=[1], **settings)
