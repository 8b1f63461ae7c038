"""A prompt that is computed again, in blocks that no request has."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from dynbus.llm.engine import Chunk
from dynbus.llm.engine.model import ComparableModel

from .noise import Difference, Floats, differences, larger

COMPARED: Final = 16
"""Blocks that are compared at a time."""


class Shape(NamedTuple):
    """The way in which the tokens of a prompt are put into steps.

    Attributes:
        chunk: tokens of a step.
        single: how many of the last ones have a step of their own, as if they were drawn.
    """

    chunk: int
    single: int = 0

    def cuts(self, tokens: int) -> list[int]:
        """The tokens that are computed when each step has ended."""
        together = max(0, tokens - self.single)
        return [*range(self.chunk, together, self.chunk), *range(max(1, together), tokens + 1)]


def recompute(
    model: ComparableModel,
    token_ids: Sequence[int],
    blocks: Sequence[int],
    shape: Shape,
) -> Generator[None, None, Floats]:
    """Compute tokens of a prompt in these blocks, a step for each time that this goes on.

    Returns:
        The logits behind the last of them.
    """
    done = 0
    logits: Floats | None = None
    cuts = shape.cuts(len(token_ids))
    for end in cuts:
        chunk = Chunk(token_ids[done:end], done, blocks, end == len(token_ids))
        computed = model.compute([chunk])
        if chunk.is_sampled:
            logits = np.array(computed[0], np.float32)
        done = end
        yield
    assert logits is not None, "the last chunk is sampled"
    return logits


def compare(
    model: ComparableModel, kept: Sequence[int], computed: Sequence[int], *, exactly: bool = False
) -> list[Difference]:
    """The differences of so many pairs of blocks.

    Args:
        exactly: see `differences`.
    """
    if not kept:
        return []
    largest: list[Difference] | None = None
    for layer in range(model.layers):
        each = differences(
            model.layer_of(kept, layer), model.layer_of(computed, layer), exactly=exactly
        )
        largest = each if largest is None else larger(largest, each)
    assert largest is not None, "a model has a layer"
    return largest


def pieces(count: int) -> list[range]:
    """The blocks that are compared at a time, of so many."""
    return [range(at, min(count, at + COMPARED)) for at in range(0, count, COMPARED)]


def spare(blocks: range, first: int, count: int) -> list[int]:
    """Some of the spare blocks."""
    taken = list(islice(blocks, first, first + count))
    assert len(taken) == count, "there are not so many spare blocks"
    return taken
