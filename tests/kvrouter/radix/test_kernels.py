"""Both kernels of the index answer alike, whatever they are told."""

from __future__ import annotations

import logging
import struct
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.kernels import KERNELS
from tests.kvrouter.event_strategies import removed_events, stored_events
from xxhash import xxh3_64_intdigest

from dynbus.kvrouter import hashing
from dynbus.kvrouter.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheDigest,
    KvEvent,
    Tier,
    encode_events,
)
from dynbus.kvrouter.radix import index as radix_index
from dynbus.kvrouter.radix import kernel
from dynbus.kvrouter.radix.index import RadixIndex
from dynbus.kvrouter.radix.snapshot import dump_index, load_index
from dynbus.kvrouter.stream.digest import index_digest

pytest.importorskip("numba", reason="the compiled kernel needs it")
jit: Any = import_module("dynbus.kvrouter.radix.compiled.jit")
compiled_hashing: Any = import_module("dynbus.kvrouter.radix.compiled.hashing")

INSTANCES = "abc"
engine_hashes = st.one_of(st.integers(0, 9), st.integers(2**64 - 5, 2**64 - 1))
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK])
events = st.lists(
    st.one_of(
        stored_events(engine_hashes, st.integers(1, 3), tiers=tiers, min_size=0),
        stored_events(engine_hashes, st.integers(1, 3), tiers=tiers),
        removed_events(engine_hashes, tiers=tiers, min_size=0),
        st.just(AllBlocksCleared()),
        st.builds(CacheDigest, st.integers(0, 9), st.integers(0, 2**64 - 1)),
    ),
    min_size=0,
    max_size=6,
)
sources = st.tuples(st.sampled_from(INSTANCES), st.sampled_from([0, 0, 0, 1]))


class TwoKernels(RuleBasedStateMachine):
    """The same messages and questions to an index of each kernel."""

    max_blocks = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.python = RadixIndex(kernel="python", max_blocks=self.max_blocks)
        self.compiled = RadixIndex(kernel="compiled", max_blocks=self.max_blocks)
        self.next_id: dict[tuple[str, int], tuple[int, int]] = {}

    @rule(source=sources, batch=events, shift=st.sampled_from([0, 0, 0, 0, -2, -1, 1]))
    def apply(self, source: tuple[str, int], batch: list[KvEvent], shift: int) -> None:
        epoch, next_id = self.next_id.get(source, (1, 0))
        first_id = max(0, next_id + shift)
        self.next_id[source] = epoch, max(next_id, first_id + len(batch))
        message = encode_events(batch, event_epoch=epoch, first_id=first_id, dp_rank=source[1])

        applied = [index.apply(source[0], message) for index in (self.python, self.compiled)]

        assert applied[0] == applied[1]

    @rule(source=sources)
    def begin_an_epoch(self, source: tuple[str, int]) -> None:
        self.next_id[source] = (self.next_id.get(source, (1, 0))[0] + 1, 0)

    @rule(instance=st.sampled_from(INSTANCES))
    def leave(self, instance: str) -> None:
        for index in (self.python, self.compiled):
            index.remove_instance(instance)
            if self.max_blocks < 10_000:
                # Which blocks are swept first differs: until all are, other leaves may be there.
                index.sweep()

    @rule(limit=st.integers(1, 10))
    def sweep(self, limit: int) -> None:
        self.python.sweep(limit)
        self.compiled.sweep(limit)

    @rule(prefix=st.lists(st.integers(1, 3), max_size=8))
    def ask(self, prefix: list[int]) -> None:
        assert self.compiled.lookup(prefix) == self.python.lookup(prefix)
        assert self.compiled.overlaps(prefix) == self.python.overlaps(prefix)

    @rule(one=st.booleans())
    def exchange_snapshots(self, one: bool) -> None:
        if one:
            data = dump_index(self.python, 1)
            self.compiled, _ = load_index(data, max_blocks=self.max_blocks, kernel="compiled")
        else:
            data = dump_index(self.compiled, 1)
            self.python, _ = load_index(data, max_blocks=self.max_blocks, kernel="python")
        # Counters begin anew, and what was evicted last depends on what was asked before.
        same = dump_index(self.python, 1)
        self.python, _ = load_index(same, max_blocks=self.max_blocks, kernel="python")
        self.compiled, _ = load_index(same, max_blocks=self.max_blocks, kernel="compiled")

    @invariant()
    def both_hold_the_same(self) -> None:
        ours, theirs = self.compiled.statistics(), self.python.statistics()
        assert (ours.instances, ours.blocks, ours.detached) == (
            theirs.instances,
            theirs.blocks,
            theirs.detached,
        )
        assert (ours.unknown_removals, ours.evicted) == (theirs.unknown_removals, theirs.evicted)
        if self.python.kernel.is_swept and self.compiled.kernel.is_swept:
            assert ours.runs == theirs.runs
        for rank in self.python.ranks:
            assert index_digest(self.compiled, rank) == index_digest(self.python, rank)

    def teardown(self) -> None:
        for index in (self.python, self.compiled):
            for instance in INSTANCES:
                index.remove_instance(instance)
            assert index.sweep()
            assert index.statistics().runs == 0


class TwoKernelsAtTheLimit(TwoKernels):
    """The same, where caches forget with nearly every message, one at a time."""

    max_blocks = 12

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(radix_index, "EVICT_LOOK", 1)
        self.patch.setattr(radix_index, "OVERSHOOT", 2.0)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


TestTwoKernels = TwoKernels.TestCase
TestTwoKernels.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTwoKernelsAtTheLimit = TwoKernelsAtTheLimit.TestCase
TestTwoKernelsAtTheLimit.settings = TestTwoKernels.settings


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("evict_look", [1, radix_index.EVICT_LOOK])
def test_kernels_agree_while_tables_grow_shrink_and_move(
    seed: int, evict_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(radix_index, "EVICT_LOOK", evict_look)
    random = Random(seed)
    python = RadixIndex(kernel="python", max_blocks=30_000)
    compiled = RadixIndex(kernel="compiled", max_blocks=30_000)
    next_id = dict.fromkeys(INSTANCES, 0)
    for step in range(450):
        instance = random.choice(INSTANCES)
        batch = [_random_event(random, step) for _ in range(8)]
        sent = encode_events(batch, event_epoch=1, first_id=next_id[instance])
        next_id[instance] += len(batch)
        assert compiled.apply(instance, sent) == python.apply(instance, sent)
        if step % 130 == 129:
            for index in (python, compiled):
                index.remove_instance(instance)
                # How much is swept with each message is the same, which blocks is not: until
                # all are, other leaves may be there to evict.
                index.sweep()
            next_id[instance] = 0
        if step % 20 == 0:
            for _ in range(20):
                prefix = _path(random)
                assert compiled.lookup(prefix) == python.lookup(prefix)
                assert compiled.overlaps(prefix) == python.overlaps(prefix)

    ours, theirs = compiled.statistics(), python.statistics()

    assert (ours.blocks, ours.detached, ours.runs, ours.evicted) == (
        theirs.blocks,
        theirs.detached,
        theirs.runs,
        theirs.evicted,
    )
    assert 0 < ours.detached < ours.blocks
    assert ours.evicted
    for rank in python.ranks:
        assert index_digest(compiled, rank) == index_digest(python, rank)
    for instance in INSTANCES:
        compiled.remove_instance(instance)
    assert compiled.sweep()
    assert compiled.statistics().runs == 0


def _path(random: Random) -> list[int]:
    """A prefix in a tree that branches every 16 blocks."""
    blocks: list[int] = []
    for _ in range(random.randint(1, 8)):
        branch = random.randint(0, 5)
        blocks += (branch * 1000 + at for at in range(random.choice([16, 16, 16, 7])))
    return blocks


def _random_event(random: Random, step: int) -> KvEvent:
    """A whole prefix or a removal; the engine's hash of a block is that of its path."""
    path = _path(random)
    names: list[int] = hashing.sequence_hashes(path).tolist()
    if step % 100 < 60:
        return BlockStored(None, names, path)
    random.shuffle(names)
    return BlockRemoved(names[: random.randint(0, len(names))])


@given(data=st.data(), batch=events)
def test_what_one_kernel_refuses_as_a_message_the_other_refuses(
    data: st.DataObject, batch: list[KvEvent]
) -> None:
    sent = bytearray(encode_events(batch, event_epoch=1, first_id=0))
    for _ in range(data.draw(st.integers(0, 3))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.sampled_from([0, 1, 2, 255]))
    cut = data.draw(st.sampled_from([None, None, -1, -8, 39]))
    damaged = bytes(sent[:cut])

    applied = [RadixIndex(kernel=name).apply("a", damaged) for name in KERNELS]

    assert applied[0] == applied[1]


@pytest.mark.parametrize("block_size", [*range(1, 70), 96, 128, 255, 256, 257, 272, 1000])
def test_compiled_block_hashes_are_those_of_the_library(block_size: int) -> None:
    random = np.random.default_rng(block_size)
    tokens = random.integers(0, 1 << 32, 3 * block_size + block_size // 2, dtype=np.uint32)
    for seed in (0, 1, 1337, 2**64 - 1, int(random.integers(0, 1 << 63))):
        whole = tokens[: 3 * block_size].reshape(3, block_size)

        found = compiled_hashing.hash_blocks(tokens, block_size, seed)

        assert found.tolist() == [xxh3_64_intdigest(block.tobytes(), seed) for block in whole]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(0, 2**64 - 1))
def test_compiled_sequence_hashes_are_those_of_the_library(blocks: list[int], seed: int) -> None:
    expected = blocks[:1]
    for block in blocks[1:]:
        expected.append(xxh3_64_intdigest(struct.pack("<QQ", expected[-1], block), seed))

    found = compiled_hashing.chain_hashes(np.array(blocks, dtype=np.uint64), seed)

    assert found.tolist() == expected


def test_an_array_with_gaps_or_of_other_numbers_is_looked_up_like_a_list() -> None:
    index = RadixIndex(kernel="compiled")
    index.apply("a", encode_events([BlockStored(None, [1, 2], [1, 2])], event_epoch=1, first_id=0))
    wide = np.array([1, 9, 2, 9], dtype=np.uint64)
    frozen = np.array([1, 2], dtype=np.uint64)
    frozen.flags.writeable = False

    found = [index.lookup(asked) for asked in ([1, 2], wide[::2], frozen, np.array([1, 2]))]

    assert found == [{"a": 2}] * 4


def test_an_instance_that_left_is_in_no_answer_that_was_remembered() -> None:
    for name in KERNELS:
        index = RadixIndex(kernel=name)
        sent = encode_events([BlockStored(None, [1, 2], [1, 2])], event_epoch=1, first_id=0)
        for number in range(20):
            index.apply(f"i{number}", sent)
        index.lookup([1, 2])
        index.remove_instance("i3")

        assert index.lookup([1, 2]) == {f"i{n}": 2 for n in range(20) if n != 3}
        assert len(index.overlaps([1, 2, 3])) == 19


def test_an_answer_is_the_askers_own() -> None:
    for name in KERNELS:
        index = RadixIndex(kernel=name)
        sent = encode_events([BlockStored(None, [1], [1])], event_epoch=1, first_id=0)
        for number in range(20):
            index.apply(f"i{number}", sent)

        index.lookup([1]).clear()

        assert len(index.lookup([1])) == 20


def test_the_log_tells_how_long_the_compiled_kernel_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hashing, "compiled", None)

    with caplog.at_level(logging.INFO, kernel.__name__):
        assert kernel.load_compiled()

    assert "the compiled kernel was ready after" in caplog.text


def test_without_a_folder_to_write_to_code_is_compiled_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(jit, "CACHE_FOLDER", jit.cache_folder())

    def double(number: int) -> int:
        return 2 * number

    doubled = jit.entry(jit.types.int64(jit.types.int64))(double)

    assert jit.CACHE_FOLDER is None
    assert doubled(21) == 42
