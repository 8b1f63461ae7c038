"""The story of calls that go together in batches, of which some are left, late or fail alone."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

import anyio
import msgspec

from dynbus import Actor, DeadlineExceeded, HandlerError, Overloaded, call_options, context, handler
from dynbus.testing import Simulation

from .rest import BREATH, rest

CALLERS = 9
MOST = 3
PLACES = 2
WAIT = 0.6
WAYS = 0.1
"""Seconds that a message and what it sets off take at most."""
MS = 0.001
"""Seconds by which deadlines are rounded on their way."""
KILLED = 1.0
"""Seconds after which what was left and goes on is killed."""
TIMEOUT = 20.0


class Asked(msgspec.Struct, frozen=True):
    """A request that is due `wait` seconds after it was sent, and goes with others of its kind."""

    name: str
    kind: int
    sent: float
    timeout: float
    seconds: float
    fails: bool = False

    @property
    def due(self) -> float:
        return self.sent + min(WAIT, self.timeout / 2)


class Together(Actor, namespace="simulated"):
    """Answers those of a kind together, and heeds a request to stop."""

    simulation: ClassVar[Simulation]
    left: ClassVar[dict[str, float]]

    async def on_start(self) -> None:
        self.running = 0
        # Since when a place has been free.
        self.free_since = 0.0

    @handler(batch=MOST, batch_wait=WAIT, batch_key="kind", concurrency=PLACES)
    async def answer(self, asked: list[Asked]) -> list[str | HandlerError]:
        self._check(asked)
        self.running += 1
        try:
            end = self.simulation.now + max(one.seconds for one in asked)
            while self.simulation.now < end:
                await asyncio.sleep(0.1)
                over = [self._over(one) for one in asked]
                assert min(over) < KILLED + WAYS, f"{asked} runs on, and nobody waits for it"
                assert min(over) > -MS or not context().is_stopped(), f"of {asked} some wait"
        except asyncio.CancelledError:
            over = [self._over(one) for one in asked]
            assert min(over) > -MS, f"{asked} was cancelled, and some wait for it"
            raise
        finally:
            if self.running == PLACES:
                self.free_since = self.simulation.now
            self.running -= 1
        return [HandlerError(one.name) if one.fails else one.name for one in asked]

    def _check(self, asked: Sequence[Asked]) -> None:
        now = self.simulation.now
        assert self.running < PLACES, f"{self.running} batches run"
        assert len(asked) <= MOST, f"{len(asked)} go together"
        assert len({one.kind for one in asked}) == 1, f"{asked} are of several kinds"
        assert max(map(self._over, asked)) < WAYS, f"of {asked} some were left long ago"
        due = max(one.sent for one in asked) if len(asked) == MOST else asked[0].due
        due = min([due, *(one.due for one in asked)])
        late = now - max(due, self.free_since)
        assert late < WAYS, f"{asked} waited for {late:.2f} s beside a free place"
        assert len(asked) == MOST or now > due - MS, f"{asked} did not wait for others at {now:.3f}"
        left = context().time_left() or 0.0
        longest = max(one.sent + one.timeout for one in asked) - now
        assert left > longest - WAYS, f"{asked} has {left:.2f} s in place of {longest:.2f}"

    def _over(self, one: Asked) -> float:
        """Seconds for which nobody has waited for a request; less than 0 while somebody does."""
        deadline = one.sent + one.timeout
        return self.simulation.now - min(self.left.get(one.name, deadline), deadline)


async def batches(simulation: Simulation) -> None:
    """Calls that go together are calls of their own, and none waits beside a free place: to be told
    with an empty plan."""
    Together.simulation, left = simulation, dict[str, float]()
    Together.left = left
    await simulation.start(Together)
    client = simulation.client(Together, timeout=TIMEOUT)
    chance = simulation.random

    async def ask(caller: int) -> None:
        for number in range(8):
            kind, way = int(2 * chance.random()), chance.random()
            timeout = 0.2 + 1.2 * chance.random() if way < 0.3 else TIMEOUT
            patience = WAYS + 1.5 * chance.random() if way > 0.7 else 2 * TIMEOUT
            name, seconds = f"{caller}-{number}", 0.1 + 2.0 * chance.random() ** 6
            one = Asked(name, kind, simulation.now, timeout, seconds, fails=chance.random() < 0.1)
            answer: tuple[object, bool] = name, one.fails
            with anyio.move_on_after(patience) as scope, call_options(timeout=timeout):
                try:
                    answer = await client.answer(one), False
                except HandlerError as error:
                    answer = error.message, True
                except DeadlineExceeded:
                    assert simulation.now - one.sent > timeout - WAYS, f"{one} was not late"
                except Overloaded:
                    assert timeout < TIMEOUT, f"{one} had time"
            assert answer == (name, one.fails), f"{one} has the answer {answer}"
            if scope.cancelled_caught:
                left[name] = simulation.now
                # No call waits to be taken in while its place is still that of one that was left.
                await asyncio.sleep(KILLED + WAYS)
            await asyncio.sleep(0.5 * chance.random())

    async with anyio.create_task_group() as callers:
        for caller in range(CALLERS):
            callers.start_soon(ask, caller)
    await rest(simulation, BREATH)
