"""A fleet in one process, on a clock that jumps over pauses, and agents that it serves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from dynbus import call_options
from dynbus.kvrouter import open_router
from dynbus.llm import EngineWorker, MockWorker, ModelWorker
from dynbus.llm.generation import GenerateRequest, Sampling, Session
from dynbus.testing import TestKit

from .workload import Workload


class Mock(MockWorker, namespace="agents"):
    """Computes nothing, in the time of an engine."""


class Small(ModelWorker, namespace="agents"):
    """Computes a model with random weights."""


class Figures(NamedTuple):
    """What became of all conversations.

    Attributes:
        prefix: tokens of prompts that were computed, or made, in a turn before.
        again: those of them that were computed again.
        turns: requests of agents.
        lone: other requests.
    """

    prefix: int
    again: int
    turns: int
    lone: int

    @property
    def part(self) -> float:
        """The part of the prefixes that was computed again."""
        return self.again / self.prefix if self.prefix else 0.0


@dataclass
class Fleet:
    """The instances, and what they are asked.

    Attributes:
        worker: their class.
        options: of each.
        lone_every: mean seconds between two requests that nothing follows; 0 for none.
        session: seconds for which conversations are kept; 0 for none.
        kills: whether each instance is killed once, and another one started.
    """

    workload: Workload
    worker: type[EngineWorker]
    options: dict[str, Any]
    instances: int = 4
    agents: int = 12
    lone_every: float = 0.0
    lone_tokens: int = 4000
    session: float = 0.0
    kills: bool = False
    _prefix: int = 0
    _again: int = 0
    _turns: int = 0
    _lone: int = 0
    _left: int = field(default=0)

    async def run(self) -> Figures:
        """Serve all agents to the end of their conversations."""
        async with TestKit() as kit:
            for number in range(self.instances):
                await kit.start(self.worker, instance_id=f"first-{number}", **self.options)
            component = f"agents.{self.worker.__name__}"
            async with open_router(kit.caller, component) as router:
                client: Any = kit.client(self.worker, routing=router)
                self._left = self.agents
                async with anyio.create_task_group() as tasks:
                    for agent in range(self.agents):
                        tasks.start_soon(self._converse, client, agent)
                    if self.lone_every:
                        tasks.start_soon(self._ask_alone, client)
                    if self.kills:
                        tasks.start_soon(self._kill_each, kit)
        return Figures(self._prefix, self._again, self._turns, self._lone)

    async def _converse(self, client: Any, agent: int) -> None:
        size = int(self.options["block_size"])
        prompt = self.workload.beginning()
        computed = 0
        session = Session(f"agent-{agent}", self.session) if self.session else None
        for turn in self.workload.turns_of(agent):
            await anyio.sleep(turn.pause)
            prompt += turn.added
            request = GenerateRequest(
                prompt, turn.output, sampling=_GREEDY, ignore_eos=True, session=session
            )
            cached, made = 0, list[int]()
            metadata = {"session": session.name} if session is not None else {}
            with call_options(timeout=3600.0, metadata=metadata):
                async for item in client.generate(request):
                    cached = max(cached, item.cached_tokens or 0)
                    made += item.token_ids
            # A block is found again where all of it was computed, which the last token never is.
            known = max(computed - 1, 0) // size * size
            self._prefix += known
            self._again += max(0, known - cached)
            self._turns += 1
            prompt += made
            computed = len(prompt)
        self._left -= 1

    async def _ask_alone(self, client: Any) -> None:
        draw = random.Random(self.workload.seed)
        async with anyio.create_task_group() as tasks:
            while self._left:
                await anyio.sleep(draw.expovariate(1 / self.lone_every))
                prompt = self.workload.lone_prompt(self._lone, self.lone_tokens)
                self._lone += 1
                tasks.start_soon(_drain, client, GenerateRequest(prompt, 16, ignore_eos=True))

    async def _kill_each(self, kit: TestKit) -> None:
        for number in range(self.instances):
            # Each in the middle of the conversations, one after the other.
            await anyio.sleep(_KILL_INTERVAL)
            killed = kit.started[f"first-{number}"]
            await kit.kill(killed)
            # Which the end of a process would do.
            if isinstance(killed.actor, Small) and killed.actor.tiers.store is not None:
                killed.actor.tiers.store.leave()
            elif isinstance(killed.actor, Mock) and killed.actor.tier is not None:
                killed.actor.tier.leave()
            await kit.start(self.worker, instance_id=f"second-{number}", **self.options)


_GREEDY: Final = Sampling(temperature=0.0)
_KILL_INTERVAL: Final = 500.0


async def _drain(client: Any, request: GenerateRequest) -> None:
    with call_options(timeout=3600.0):
        async for _ in client.generate(request):
            pass


def mock_fleet(workload: Workload, folder: Path, **fields: Any) -> Fleet:
    """A fleet of mocks: each has a cache of 131,072 tokens, and four times that on its host, in a
    file that the mock after it goes on with."""
    options = {"block_size": 64, "blocks": 2048, "host_blocks": 8192, "host_folder": str(folder)}
    return Fleet(workload, Mock, options, **fields)


def small_fleet(workload: Workload, model: Path, folder: Path, **fields: Any) -> Fleet:
    """A fleet of small engines: each has a cache of 8,192 tokens, and on its host room for
    16,384, in a file that the engine after it goes on with."""
    options = {
        "model": str(model),
        "block_size": 16,
        "blocks": 512,
        "host_memory_mib": 8,
        "host_folder": str(folder),
        "pooling": "none",
        "hang_limit": 0,
        "context_length": 8192,
    }
    return Fleet(workload, Small, options, **fields)
