"""Blocks that an engine's cache has no room for are kept in the memory of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynbus.bus.errors import ConfigError
from dynbus.kvrouter.events import BlockStored, KvEvent, Tier, encode_events
from dynbus.kvrouter.hashing import block_hashes
from dynbus.kvrouter.radix.index import MessageOutcome, Overlap, RadixIndex, Rank
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.llm.engine import EngineLimits, ModelEngine
from dynbus.llm.engine.interface import Held, Step
from dynbus.llm.generation import GenerateRequest, Sampling, Session
from dynbus.llm.tiers.cost import Rates
from dynbus.llm.tiers.host_store import HostStore
from dynbus.transfer.layout import BlockLayout, KvMemory, Region

from .remembering import Remembering, expected

SIZE = 4
GREEDY = Sampling(temperature=0.0)


class Engine:
    """An engine of few blocks with a host store, and an index that follows its events."""

    def __init__(
        self,
        blocks: int = 8,
        places: int = 32,
        *,
        checksums: bool = True,
        folder: Path | None = None,
    ) -> None:
        self.model = Remembering(blocks, SIZE)
        limits = EngineLimits(SIZE, blocks, 4, 64, 4 * blocks, vocabulary=self.model.vocabulary)
        self.engine = ModelEngine(self.model, limits)
        self.rates = Rates(SIZE, self.model.memory.layout.block_bytes)
        # Copies of blocks as small as these are mostly Python's own time.
        self.rates.note_prefill(100, 1000.0)
        size = places * self.model.memory.layout.block_bytes
        self.store = HostStore(
            self.model.memory, size, self.rates, checksums=checksums, folder=folder
        )
        self.engine.keep_evicted(self.store, key=self.store.key)
        self.index = RadixIndex()
        self.mirror = CacheMirror()
        self.told = 0
        self.requests = 0

    def follow(self, events: Sequence[KvEvent]) -> None:
        """Publish events as `KvEventPublisher` does."""
        # A copy that the cache evicts while a request has another one leaves blocks behind a hole.
        accepted = self.mirror.apply(events)
        left_out = [each for each in events if each not in accepted]
        assert all(isinstance(each, BlockStored) and each.tier is Tier.DEVICE for each in left_out)
        if accepted:
            message = encode_events(accepted, event_epoch=1, first_id=self.told)
            self.told += len(accepted)
            assert self.index.apply("a", message).verdict is MessageOutcome.APPLIED

    def step(self) -> Step:
        step = self.engine.step()
        self.follow(step.events)
        return step

    def generate(
        self, prompt: Sequence[int], tokens: int = 2, session: Session | None = None
    ) -> tuple[list[int], int]:
        """The tokens that follow a prompt, and how many of it were not computed."""
        self.requests += 1
        name = f"r{self.requests}"
        self.engine.add(
            name,
            GenerateRequest(
                list(prompt), tokens, sampling=GREEDY, ignore_eos=True, session=session
            ),
        )
        made: list[int] = []
        cached = 0
        while self.engine.has_work:
            for _, item in self.step().outputs:
                made += item.token_ids
                cached += item.cached_tokens or 0
        return made, cached

    def hold(self, prompt: Sequence[int]) -> Held:
        self.engine.hold("held", GenerateRequest(list(prompt)))
        return self.step().held[0]

    def overlap(self, prompt: Sequence[int]) -> Overlap:
        """What a router knows of a prompt."""
        hashes = block_hashes(prompt, SIZE)
        return self.index.overlaps(hashes).get(Rank("a", 0), Overlap(0, 0, 0, 0))


def prompt(name: int, blocks: int) -> list[int]:
    """A prompt of whole blocks and a token; two of different names share none."""
    return [(name * 13 + at) % 97 for at in range(blocks * SIZE + 1)]


def test_a_prefix_that_was_evicted_comes_back_and_is_not_computed_again() -> None:
    engine = Engine()
    first = engine.generate(prompt(1, 6))
    engine.generate(prompt(2, 7))
    computed = engine.model.computed

    again = engine.generate(prompt(1, 6))

    assert first == (expected(prompt(1, 6), 2), 0)
    assert again == (expected(prompt(1, 6), 2), 6 * SIZE)
    assert engine.model.computed - computed == 2
    assert engine.store.statistics.brought >= 5


def test_a_router_knows_what_is_kept_in_which_tier() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6))
    held = engine.overlap(prompt(1, 6))
    engine.generate(prompt(2, 7))
    kept = engine.overlap(prompt(1, 6))
    engine.generate(prompt(1, 6))

    assert held == Overlap(6, 0, 0, 0)
    assert kept.total == 6
    assert kept.host >= 5
    assert engine.overlap(prompt(1, 6)) == Overlap(6, 0, 0, 0)


def test_a_store_that_is_full_keeps_what_was_used_last() -> None:
    engine = Engine(places=6)
    for name in range(1, 4):
        engine.generate(prompt(name, 6))

    made, cached = engine.generate(prompt(2, 6))

    assert made == expected(prompt(2, 6), 2)
    assert cached == 6 * SIZE
    assert engine.generate(prompt(1, 6)) == (expected(prompt(1, 6), 2), 0)
    assert engine.store.statistics.blocks <= 6


def test_blocks_are_computed_where_that_is_faster_than_copying() -> None:
    engine = Engine()
    for _ in range(100):
        engine.rates.note_prefill(100, 1e-9)
    engine.generate(prompt(1, 6))
    engine.generate(prompt(2, 7))

    made, cached = engine.generate(prompt(1, 6))

    assert made == expected(prompt(1, 6), 2)
    assert cached <= SIZE
    assert engine.store.statistics.computed >= 5


def test_a_peer_is_given_what_only_the_host_has() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6))
    engine.generate(prompt(2, 7))

    held = engine.hold(prompt(1, 6))

    assert held.computed == held.cached == 6 * SIZE
    assert len(held.blocks) == 6
    engine.engine.release("held")
    assert engine.engine.load.active_blocks == 0


def test_a_hold_takes_no_more_blocks_than_are_free() -> None:
    engine = Engine()
    engine.generate(prompt(1, 7))
    engine.generate(prompt(2, 7))
    engine.engine.hold("other", GenerateRequest(prompt(2, 7)))
    blocks = len(engine.step().held[0].blocks)

    held = engine.hold(prompt(1, 7))

    assert len(held.blocks) == 8 - blocks


def test_a_prefix_longer_than_what_is_looked_up_at_once_comes_back_whole() -> None:
    engine = Engine(blocks=620, places=1300)
    engine.generate(prompt(1, 600), 1)
    engine.generate(prompt(2, 619), 1)

    made, cached = engine.generate(prompt(1, 600), 1)

    assert cached == 600 * SIZE
    assert made == expected(prompt(1, 600), 1)


# Stories: prompts of shared beginnings, more than the cache holds, in any order.
stories = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 5)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=50, deadline=None)
@given(stories, st.integers(1, 20))
def test_whatever_is_evicted_and_comes_back_no_token_is_wrong_and_the_index_agrees(
    story: list[tuple[list[int], int]], places: int
) -> None:
    engine = Engine(places=places)
    for path, tokens in story:
        wanted = [token for choice in path for token in range(choice, choice + SIZE)]
        made, _ = engine.generate(wanted, tokens)
        assert made == expected(wanted, tokens)
        assert engine.engine.load.active_blocks == 0
        # What the router expects to be reused is what a hold finds.
        known = engine.overlap(wanted).total
        held = engine.hold(wanted)
        engine.engine.release("held")
        assert len(held.blocks) == known
    statistics = engine.store.statistics
    assert statistics.blocks <= places
    on_host = sum(
        len(event.engine_hashes)
        for event in engine.mirror.state()
        if isinstance(event, BlockStored) and event.tier is Tier.HOST
    )
    assert on_host == statistics.blocks


# Limits -------------------------------------------------------------------------------------


def test_a_store_that_holds_no_block_is_refused_with_what_one_takes() -> None:
    model = Remembering(4, SIZE)

    with pytest.raises(ConfigError, match="hold no block, which takes 512: set more, or 0"):
        HostStore(model.memory, 511, Rates(SIZE, 512))


def test_the_blocks_of_a_gpu_are_refused_with_the_remedy() -> None:
    layout = Remembering(4, SIZE).memory.layout
    size = layout.region_bytes()[0]
    memory = KvMemory(layout, [Region(1 << 20, size, 0, "VRAM")], owner=None)

    with pytest.raises(ConfigError, match="leave it 0, or set device to cpu"):
        HostStore(memory, 1 << 20, Rates(SIZE, 512))


def test_a_block_of_the_store_is_one_stretch() -> None:
    layout = Engine().store.memory.layout

    assert layout.strides[0] == layout.block_bytes
    assert isinstance(layout, BlockLayout)
    assert np.prod([layout.layers, 2, layout.kv_heads, SIZE, layout.head_dim, 4]) == (
        layout.block_bytes
    )


def host_bytes(engine: Engine) -> NDArray[np.uint8]:
    """The blocks of a store: [places, bytes of a block]."""
    [region] = engine.store.memory.regions
    data = (ctypes.c_uint8 * region.size).from_address(region.address)
    return np.ctypeslib.as_array(data).reshape(engine.store.memory.layout.blocks, -1)


def test_a_block_of_which_a_bit_has_changed_on_the_host_is_computed_again() -> None:
    engine = Engine()
    told: list[Sequence[int]] = []
    engine.store.damaged = told.append
    engine.generate(prompt(1, 6))
    engine.generate(prompt(2, 7))
    kept = engine.store.statistics.blocks
    # The third block that was kept of the first prompt.
    host_bytes(engine)[2, 17] ^= 4

    tokens, cached = engine.generate(prompt(1, 6))

    assert tokens == expected(prompt(1, 6), 2)
    assert cached == 2 * SIZE
    statistics = engine.store.statistics
    assert statistics.damaged == 1
    [gone] = told
    assert statistics.blocks >= kept - len(gone)
    assert engine.generate(prompt(1, 6))[0] == expected(prompt(1, 6), 2)
    assert engine.store.statistics.damaged == 1


def test_a_whole_block_of_another_prompt_in_its_place_is_a_damage() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6))
    engine.generate(prompt(2, 7))
    blocks = host_bytes(engine)
    blocks[0] = blocks[6]

    tokens, cached = engine.generate(prompt(1, 6))

    assert (tokens, cached) == (expected(prompt(1, 6), 2), 0)
    assert engine.store.statistics.damaged == 1


def test_without_checksums_what_was_damaged_on_the_host_is_used() -> None:
    engine = Engine(checksums=False)
    engine.generate(prompt(1, 6))
    engine.generate(prompt(2, 7))
    host_bytes(engine)[:6] = 0

    tokens, _ = engine.generate(prompt(1, 6))

    assert tokens != expected(prompt(1, 6), 2)
    assert engine.store.statistics.damaged == 0


def test_a_store_that_is_closed_forgets_all_and_keeps_nothing() -> None:
    engine = Engine()
    engine.generate(prompt(1, 6))
    engine.generate(prompt(2, 7))

    engine.store.close()
    tokens, cached = engine.generate(prompt(1, 6))

    assert (tokens, cached) == (expected(prompt(1, 6), 2), 0)
    assert engine.overlap(prompt(2, 7)).host == 0
    assert engine.store.statistics.blocks == 0
    assert engine.store.statistics.is_closed
