"""An instance on the bus that is measured by its streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

import anyio
import numpy as np

from dynbus import ConfigError, Runtime, with_options
from dynbus.kvrouter import profiles
from dynbus.llm.engine import EngineLimits
from dynbus.llm.engine.worker import EngineWorker
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.replay import ReplayedRequest, Simulation
from dynbus.llm.replay.trace import Trace
from dynbus.spi import ComponentName, monotonic, task_group

from .batches import Batch, plain_request
from .bench import Measured, Times
from .streams import ServedRequest, steps_of

VOCABULARY: Final = 256
"""Token ids are below it: every model has as many."""
TRIES: Final = 3
"""The number of times that a batch is carried out whose tokens came as no steps give them."""

Ask = Callable[[GenerateRequest], AsyncIterator[Generated]]


class ServedBench:
    """The `EngineBench` of an engine that answers requests by streams, in real time.

    Args:
        ask: sends it a request.
        seed: of the prompts, which no cache has.
    """

    def __init__(self, ask: Ask, limits: EngineLimits, *, seed: int = 0) -> None:
        self._ask = ask
        self._limits = limits
        self._random = np.random.default_rng(seed)
        # The step that tokens come of, by their number, and the requests that have had theirs.
        self._step = 0
        self._in_step: set[int] = set()
        self._news = anyio.Event()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    async def carry_out(self, batch: Batch) -> list[Measured]:
        """See `EngineBench`: no steps where what came is explained by none, as when another program
        took the processor."""
        for _ in range(TRIES):
            measured = steps_of(await self._answers(batch), self._limits)
            if measured:
                return measured
        return []

    async def _answers(self, batch: Batch) -> list[ServedRequest]:
        """Send each request when the step has begun before which it comes, or all before ended."""
        served: list[ServedRequest] = []
        self._step, self._in_step = 0, set()
        async with task_group() as tasks:
            for step, prompt, output in sorted(batch.arrivals):
                while self._step < step and not all(one.is_over for one in served):
                    self._news = anyio.Event()
                    await self._news.wait()
                tokens = self._random.integers(0, VOCABULARY, prompt).tolist()
                served.append(ServedRequest(plain_request(tokens, output)))
                tasks.start_soon(self._answer, len(served) - 1, served[-1])
        _check_tokens(served)
        return served

    async def _answer(self, number: int, served: ServedRequest) -> None:
        served.sent = monotonic()
        async for item in self._ask(served.request):
            now = monotonic()
            served.tokens += [now] * len(item.token_ids)
            if number in self._in_step:
                self._step += 1
                self._in_step.clear()
            self._in_step.add(number)
            self._news.set()
        served.is_over = True
        self._news.set()

    async def serve(
        self,
        simulation: Simulation,
        trace: Trace,
        prompts: Mapping[str, list[int]],
        progress: Callable[[int], None],
    ) -> Times:
        """See `EngineBench`; it takes as long as the trace."""
        served: list[ServedRequest] = []
        began = monotonic()
        async with task_group() as tasks:
            for number, one in enumerate(trace.requests):
                await anyio.sleep(max(0.0, began + one.arrival / simulation.speed - monotonic()))
                progress(number)
                request = plain_request(prompts[one.id], one.output_tokens)
                served.append(ServedRequest(request))
                tasks.start_soon(self._answer, number, served[-1])
        _check_tokens(served)
        return Times.of(
            [
                ReplayedRequest(
                    one.sent,
                    len(one.request.token_ids),
                    len(one.tokens),
                    first_token=one.tokens[0],
                    last_token=one.tokens[-1],
                )
                for one in served
            ]
        )


def _check_tokens(served: Sequence[ServedRequest]) -> None:
    """Pass if each request had as many tokens as were asked for.

    Raises:
        ValueError: one had not.
    """
    for one in served:
        wanted, made = one.request.max_tokens, len(one.tokens)
        if made != wanted:
            raise ValueError(
                f"the engine made {made} tokens of {wanted} for a request: it has to make as many "
                "as are asked for, whatever they are (min_tokens, ignore_eos)"
            )


async def open_served_bench(
    runtime: Runtime, component: ComponentName, instance_id: str = "", *, wait: float = 0.0
) -> ServedBench:
    """The bench of an instance of a component, the first of them unless one is named.

    Args:
        wait: seconds for an instance, where there is none.

    Raises:
        ConfigError: it does not say how large it is, or has several data-parallel ranks.
        NoInstances: it is not there.
    """
    instances = await runtime.discovery.wait(
        component.endpoint("generate"),
        1,
        wait,
        suits=lambda one: not instance_id or one.id == instance_id,
    )
    chosen = min(instances, key=lambda one: one.id)
    client = with_options(
        runtime.client(EngineWorker, node=component.component, namespace=component.namespace),
        instance=chosen.id,
    )
    said = profiles.read_profile(chosen.id, chosen.metadata)
    if not said.block_size or not said.total_blocks or not said.max_batched_tokens:
        raise ConfigError(
            f"instance {chosen.id} of {component} does not say the size of its cache and steps: "
            "only engines of this process and those of dynbus's workers can be measured"
        )
    if len(said.ranks) > 1:
        raise ConfigError(
            f"instance {chosen.id} of {component} has {len(said.ranks)} data-parallel ranks: "
            "measure an instance of one"
        )
    metrics = await client.load_metrics()
    context = chosen.metadata.get(profiles.CONTEXT_KEY)
    limits = EngineLimits(
        said.block_size,
        said.total_blocks,
        metrics.request_total_slots,
        said.max_batched_tokens,
        int(context) if context else said.block_size * said.total_blocks + 1,
        said.has_events,
        VOCABULARY,
    )
    return ServedBench(client.generate, limits)
