"""KV routing by a router of one's own: what a worker says of its cache and load, and a router whose
cost function chooses by that."""

import random

from pydantic import BaseModel

from dynbus.compat.llm import (
    AggregatedMetrics,
    KvEventPublisher,
    KvIndexer,
    KvMetricsAggregator,
    KvMetricsPublisher,
    OverlapScores,
)
from dynbus.compat.sdk import async_on_start, depends, dynamo_context, dynamo_endpoint, service

BLOCK_SIZE = 4


class Tokens(BaseModel):
    tokens: list[int]


# fmt: off
# TODO:
# 1. Highlight minimal snippets on touch points for KVMetrics/Aggregator/Indexer/etc.
#    to enable kv cache aware routing metrics in a custom worker.
# 2. Enhance KV Cache Routing guide to go into more detail on customizing python cost function.
# fmt: on


@service(dynamo={"namespace": "dynamo"})
class CustomWorker:
    def __init__(self):
        self.blocks = set()

    @async_on_start
    async def publish(self):
        component = dynamo_context["component"]
        self.worker_id = dynamo_context["instance_id"]
        self.metrics = KvMetricsPublisher()
        self.metrics.publish(0, 8, 0, 100)
        await self.metrics.create_endpoint(component)
        self.events = KvEventPublisher(component, self.worker_id, BLOCK_SIZE)

    @dynamo_endpoint()
    async def generate(self, request: Tokens):
        reused = self.store(request.tokens)
        yield {"worker_id": self.worker_id, "reused": reused}

    def store(self, tokens):
        """Keep the blocks of a prompt, and say which are new and how full the cache is."""
        count = len(tokens) // BLOCK_SIZE
        hashes = [hash(tuple(tokens[: (i + 1) * BLOCK_SIZE])) % 2**63 for i in range(count)]
        known = sum(each in self.blocks for each in hashes)
        if known < count:
            self.events.publish_stored(
                event_id=0,
                token_ids=tokens[known * BLOCK_SIZE : count * BLOCK_SIZE],
                num_block_tokens=[BLOCK_SIZE] * (count - known),
                block_hashes=hashes[known:],
                lora_id=0,
                parent_hash=hashes[known - 1] if known else None,
            )
        self.blocks |= set(hashes)
        self.metrics.publish(
            request_active_slots=1,
            request_total_slots=8,
            kv_active_blocks=len(self.blocks),
            kv_total_blocks=100,
            num_requests_waiting=0,
            gpu_cache_usage_perc=len(self.blocks) / 100,
            gpu_prefix_cache_hit_rate=known / count if count else 0.0,
        )
        return known * BLOCK_SIZE


@service(dynamo={"namespace": "dynamo"})
class KvRouting:
    worker = depends(CustomWorker)

    @async_on_start
    async def connect(self):
        runtime = dynamo_context["runtime"]
        namespace, name = CustomWorker.dynamo_address()
        component = runtime.namespace(namespace).component(name)
        self.workers = await component.endpoint("generate").client()
        self.indexer = KvIndexer(component, BLOCK_SIZE)
        self.aggregator = KvMetricsAggregator(component)

    def cost_function(
        self, scores: OverlapScores, metrics: AggregatedMetrics, token_length: int
    ) -> str:
        """The worker with the largest part of the prompt in its cache, less how full that is."""
        usage = {each.worker_id: each.gpu_cache_usage_perc for each in metrics.endpoints}
        gains = {
            worker_id: 2 * scores.scores.get(worker_id, 0) * BLOCK_SIZE / token_length
            - usage.get(worker_id, 0.0)
            for worker_id in self.workers.instance_ids()
        }
        best = max(gains.values())
        return random.choice([worker_id for worker_id in gains if gains[worker_id] == best])

    @dynamo_endpoint()
    async def generate(self, request: Tokens):
        scores = await self.indexer.find_matches_for_request(request.tokens, 0)
        metrics = await self.aggregator.get_metrics()
        worker_id = self.cost_function(scores, metrics, len(request.tokens))
        async for item in await self.workers.direct(request, worker_id):
            yield item.data()
