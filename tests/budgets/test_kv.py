"""The cost of a KV event and of a decision of the router, in calls of functions."""

from __future__ import annotations

from random import Random
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.events import BlockStored, encode_events
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import RadixIndex, Rank
from dynbus.kvrouter.routing.cost import RequestShape
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.profiles import read_profile
from dynbus.kvrouter.routing.queue import SchedulingRequest
from dynbus.kvrouter.routing.scheduler import KvScheduler
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.follower import Position

from .counting import CallCount, counting, hold

EVENTS = 64
"""In a message."""
MESSAGES = 40
BLOCKS = 4
TOKENS = 8192
BLOCK_SIZE = 16
INSTANCES = 64
DECISIONS = 200


def test_a_kv_event_from_its_engine_to_the_index() -> None:
    random = np.random.default_rng(1)
    index = RadixIndex()

    def message(first: int) -> list[BlockStored]:
        hashes = random.integers(1, 1 << 62, (EVENTS, BLOCKS), dtype=np.uint64)
        return [BlockStored(None, row.tolist(), row) for row in hashes]

    prepared = [message(number * EVENTS) for number in range(MESSAGES)]
    with counting() as count:
        for number, events in enumerate(prepared):
            count.mark()
            data = encode_events(events, event_epoch=1, first_id=number * EVENTS)
            index.apply("engine", data)

    hold("a KV event", count.between_marks() / EVENTS, count.shown(EVENTS * MESSAGES))


class FilledIndex:
    """An index in which every instance holds some part of the prompt."""

    position = Position(1)

    def __init__(self, prompt: NDArray[np.uint32]) -> None:
        self.index = RadixIndex()
        self.overlaps = self.index.overlaps
        blocks = block_hashes(prompt, BLOCK_SIZE).tolist()
        for number in range(INSTANCES):
            held = blocks[: len(blocks) * (number + 1) // INSTANCES]
            event = BlockStored(None, held, np.array(held, dtype=np.uint64))
            data = encode_events([event], event_epoch=1, first_id=0)
            self.index.apply(f"instance-{number}", data)

    def awareness(self) -> CacheAwareness:
        return CacheAwareness(AwarenessLevel.EXACT)

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """What engines reuse is not said here."""


def test_a_decision_for_8192_tokens() -> None:
    prompt = np.random.default_rng(1).integers(0, 50_000, TOKENS, dtype=np.uint32)
    metadata = {"kv_block_size": str(BLOCK_SIZE), "kv_events": "true", "kv_total_blocks": "100000"}
    profiles = [read_profile(f"instance-{number}", metadata) for number in range(INSTANCES)]
    # Which of equal ones is chosen changes what is guessed of it, and so the count.
    scheduler = KvScheduler(follower=FilledIndex(prompt), random=Random(1))
    found: list[CallCount] = []
    for number in range(DECISIONS):
        with counting() as count:
            shape = RequestShape.of(prompt, BLOCK_SIZE)
            request = SchedulingRequest(str(number), shape, profiles, float(number))
            decision = scheduler.submit(request, float(number))
        assert isinstance(decision, Decision)
        found.append(count)
        scheduler.first_item(decision.number, number + 0.25)
        scheduler.ended(decision.number, number + 0.5)

    calls = median(count.calls for count in found)
    hold("a decision for 8,192 tokens", calls, found[-1].shown(1))
