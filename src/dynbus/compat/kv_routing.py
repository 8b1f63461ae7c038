"""KV routing as programs of Dynamo have it: what workers say of their caches and load, and what a
router of their own asks before its cost function chooses.

dynbus's own routers do all of that by themselves: see docs/guides/kv-routing.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from dynbus import DynbusError, call_options
from dynbus.kvrouter import (
    BlockRemoved,
    BlockStored,
    IndexFollower,
    KvEvent,
    block_hashes,
    warm_follower,
)
from dynbus.kvrouter import KvEventPublisher as EventPublisher
from dynbus.llm import LoadMetrics

from .runtime import Component
from .service_context import current_context

METRICS_ENDPOINT: Final = "load_metrics"
METRICS_TIMEOUT: Final = 1.0
"""Seconds after which the figures of a worker that does not answer are left out."""


@dataclass(frozen=True)
class OverlapScores:
    """The part of a prompt that each worker holds.

    Attributes:
        scores: blocks of the prompt, from its beginning, by the id of the instance; those that hold
            none are left out.
    """

    scores: Mapping[str, int] = field(default_factory=dict[str, int])


class EndpointKvMetrics(LoadMetrics, frozen=True, kw_only=True):
    """The last figures of one worker; a figure that it left out is 0.

    Attributes:
        worker_id: the id of its instance.
    """

    worker_id: str


@dataclass(frozen=True)
class AggregatedMetrics:
    """The last figures of the workers of a component."""

    endpoints: Sequence[EndpointKvMetrics] = ()


class KvMetricsPublisher:
    """The publisher of a worker's load, in an endpoint `load_metrics` of its component."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] = {}

    async def create_endpoint(self, component: Component) -> None:
        """Serve the endpoint: by the service whose code calls this, else by an instance beside.

        Raises:
            RuntimeError: the service is going away.
        """
        context = current_context()
        if context is not None and context.service is not None:
            await context.service.__dynbus_instance__.add_endpoints(
                {METRICS_ENDPOINT: self._answer}
            )
            return
        endpoint = component.endpoint(METRICS_ENDPOINT)
        component.runtime.runtime.background.start(
            endpoint.serve_endpoint, self._answer, name=f"the metrics of {component.name}"
        )

    def publish(
        self,
        request_active_slots: int,
        request_total_slots: int,
        kv_active_blocks: int,
        kv_total_blocks: int,
        num_requests_waiting: int = 0,
        gpu_cache_usage_perc: float = 0.0,
        gpu_prefix_cache_hit_rate: float = 0.0,
    ) -> None:
        """Set the metrics that are answered from now on; see `LoadMetrics`."""
        self._latest = {
            "request_active_slots": request_active_slots,
            "request_total_slots": request_total_slots,
            "kv_active_blocks": kv_active_blocks,
            "kv_total_blocks": kv_total_blocks,
            "num_requests_waiting": num_requests_waiting,
            "gpu_cache_usage_perc": gpu_cache_usage_perc,
            "gpu_prefix_cache_hit_rate": gpu_prefix_cache_hit_rate,
        }

    async def _answer(self, request: Any = None) -> dict[str, Any]:
        return self._latest


class KvMetricsAggregator:
    """Asks all workers of a component for what they say of their load."""

    def __init__(self, component: Component) -> None:
        self._endpoint = component.endpoint(METRICS_ENDPOINT)

    async def get_metrics(self) -> AggregatedMetrics:
        """The present metrics of the workers; a worker that does not answer in time is left out.

        Raises:
            Unavailable: the instances cannot be read.
        """
        client = await self._endpoint.client()
        metrics: dict[str, EndpointKvMetrics] = {}

        async def ask(worker_id: str) -> None:
            try:
                with call_options(timeout=METRICS_TIMEOUT):
                    async for item in await client.direct(None, worker_id, annotated=False):
                        said = LoadMetrics.__struct_fields__
                        known = {name: item[name] for name in said if name in item}
                        metrics[worker_id] = EndpointKvMetrics(**known, worker_id=worker_id)
            except DynbusError:
                return

        workers = client.instance_ids()
        async with anyio.create_task_group() as tasks:
            for worker_id in workers:
                tasks.start_soon(ask, worker_id)
        return AggregatedMetrics([metrics[each] for each in workers if each in metrics])


class KvEventPublisher:
    """Publishes what the cache of a worker's engine holds.

    Args:
        component: of the worker.
        worker_id: the id of its instance; inside a service its own unless given.
        kv_block_size: tokens of a block.
    """

    def __init__(
        self, component: Component, worker_id: str | None = None, kv_block_size: int = 16
    ) -> None:
        context = current_context()
        if worker_id is None:
            if context is None:
                raise ValueError("give worker_id: only a service knows its own")
            worker_id = context.name.instance_id
        self._block_size = kv_block_size
        runtime = component.runtime.runtime
        self._publisher = EventPublisher(
            runtime.bus.data,
            *component.address,
            worker_id,
            bus=runtime.bus,
            background=runtime.bus.background,
        )
        self._is_open = False
        self._early: list[KvEvent] = []
        runtime.background.start(self._run, name=f"{self._publisher!r}")

    def publish_stored(
        self,
        event_id: int,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        lora_id: int,
        parent_hash: int | None = None,
    ) -> None:
        """Blocks that follow each other were stored.

        Args:
            event_id: is not used: dynbus numbers the events.
            token_ids: of all blocks.
            num_block_tokens: how many of them each block has; those that are not full are left out.
            block_hashes: the engine's own hashes of the blocks.
            lora_id: 0 for none.
            parent_hash: the engine's hash of the block before the first.
        """
        full = 0
        while full < len(num_block_tokens) and num_block_tokens[full] == self._block_size:
            full += 1
        if full:
            tokens = token_ids[: full * self._block_size]
            own = _hashes(tokens, self._block_size, lora_id)
            self._publish(BlockStored(parent_hash, list(block_hashes[:full]), own))

    def publish_removed(self, event_id: int, block_hashes: Sequence[int]) -> None:
        """Blocks were removed, in any order."""
        self._publish(BlockRemoved(list(block_hashes)))

    def _publish(self, event: KvEvent) -> None:
        if self._is_open:
            self._publisher.publish([event])
        else:
            self._early.append(event)

    async def _run(self) -> None:
        async with self._publisher:
            self._is_open = True
            self._publisher.publish(self._early)
            self._early = []
            await anyio.sleep_forever()


class KvIndexer:
    """Follows the events of a component's workers.

    Args:
        kv_block_size: tokens of a block.
    """

    def __init__(self, component: Component, kv_block_size: int) -> None:
        self._component = component
        self._block_size = kv_block_size
        self._follower: asyncio.Future[IndexFollower] | None = None

    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    async def find_matches_for_request(
        self, token_ids: Sequence[int], lora_id: int = 0
    ) -> OverlapScores:
        """The workers that hold blocks of a prompt, and how many each.

        Raises:
            ConfigError: the stream of events has other settings.
            Unavailable: JetStream does not answer.
        """
        if self._follower is None:
            self._follower = asyncio.get_running_loop().create_future()
            background = self._component.runtime.runtime.background
            name = f"the indexer of {self._component.name}"
            background.start(self._follow, self._follower, name=name)
        follower = await asyncio.shield(self._follower)
        return OverlapScores(follower.lookup(_hashes(token_ids, self._block_size, lora_id)))

    async def _follow(self, opened: asyncio.Future[IndexFollower]) -> None:
        component = self._component
        try:
            async with warm_follower(component.runtime.runtime, *component.address) as follower:
                opened.set_result(follower)
                await anyio.sleep_forever()
        except DynbusError as error:
            if opened.done():
                raise
            self._follower = None
            opened.set_exception(error)


def _hashes(tokens: Sequence[int], block_size: int, lora_id: int) -> Any:
    return block_hashes(tokens, block_size, lora_name=str(lora_id) if lora_id else None)
