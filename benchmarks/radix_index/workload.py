"""The same prefixes for both sides: groups that share a beginning, spread over instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

INSTANCES: Final = 64
PREFIX_BLOCKS: Final = 64
EVENT_BLOCKS: Final = 4
GROUPS: Final = 50

_MASK: Final = (1 << 63) - 1


@dataclass(frozen=True)
class Chain:
    """One event: blocks below a parent, at an instance."""

    instance: int
    parent: int | None
    engine_hashes: list[int]
    block_hashes: list[int]


def make_prefixes(count: int, *, shared: bool) -> list[NDArray[np.uint64]]:
    """Block hashes of `count` prefixes; with `shared`, the first half is that of a group."""
    random = np.random.default_rng(1)

    def draw(size: int) -> NDArray[np.uint64]:
        return random.integers(1, _MASK, size, dtype=np.uint64)

    half = PREFIX_BLOCKS // 2 if shared else 0
    groups = [draw(half) for _ in range(GROUPS)]
    return [
        np.concatenate([groups[number % GROUPS], draw(PREFIX_BLOCKS - half)])
        for number in range(count)
    ]


def make_chains(prefixes: list[NDArray[np.uint64]]) -> Iterator[Chain]:
    """The events by which each prefix is stored at one instance, what it has already left out."""
    held: set[tuple[int, int]] = set()
    for number, prefix in enumerate(prefixes):
        instance = number % INSTANCES
        blocks: list[int] = prefix.tolist()
        engine: list[int] = []
        before = 7
        for block in blocks:
            # Any hash that depends on all before it serves as an engine's.
            before = hash((before, block)) & _MASK
            engine.append(before)
        for at in range(0, len(blocks), EVENT_BLOCKS):
            end = at + EVENT_BLOCKS
            if (instance, engine[end - 1]) in held:
                continue
            held.update((instance, engine_hash) for engine_hash in engine[at:end])
            parent = engine[at - 1] if at else None
            yield Chain(instance, parent, engine[at:end], blocks[at:end])
