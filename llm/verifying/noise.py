"""The noise of an engine: how far two ways of computing the same are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MEASURES: Final = 3
"""Prompts by which the noise is measured before anything is judged."""
FLOORS: Final = (16.0, 256.0, 16.0)
"""The least bounds of norms, peaks and logits, in epsilons of the engine's numbers."""
LEAST: Final = (1e-5, 1e-4, 1e-5)
"""The same for numbers as exact as can be: other machines round otherwise."""


class Difference(NamedTuple):
    """The difference of a block's keys and values from those computed again: the largest of all
    layers, of keys or values.

    Attributes:
        norm: the norm of the difference in terms of the norm of what was computed.
        peak: the largest difference of a number, in terms of the root of the mean of the squares.
    """

    norm: float
    peak: float


SAME: Final = Difference(0.0, 0.0)
OTHER: Final = Difference(math.inf, math.inf)


class Bounds(NamedTuple):
    """The largest differences that are noise."""

    norm: float
    peak: float
    logits: float

    def allow(self, block: Difference) -> bool:
        """True if the difference of a block is noise."""
        return block.norm <= self.norm and block.peak <= self.peak


class Noise:
    """The measured noise of one engine, and the bounds that follow from it.

    Args:
        epsilon: of the engine's numbers; 0 for one that has no noise.
        factor: how many times the largest measured noise is still noise.

    Attributes:
        is_exact: whether a single bit is a difference.
    """

    def __init__(self, epsilon: float, factor: float) -> None:
        self.is_exact = not epsilon
        self._epsilon = epsilon
        self._factor = factor
        self._largest = [0.0, 0.0, 0.0]
        self._measures = 0

    def __repr__(self) -> str:
        return f"<Noise {self.bounds}>"

    @property
    def is_known(self) -> bool:
        """True if enough was measured to judge by it."""
        return not self._epsilon or self._measures >= MEASURES

    def admit_others(self) -> None:
        """Blocks of other instances are in the cache: other machines have other bits."""
        self.is_exact = False

    def note(self, blocks: Sequence[Difference], logits: float) -> bool:
        """Take in how far two ways of computing one prompt were apart; False where that is no
        measure, as the two gave what is not finite."""
        norms = [each.norm for each in blocks]
        peaks = [each.peak for each in blocks]
        values = (max(norms, default=0.0), max(peaks, default=0.0), logits)
        if not all(map(math.isfinite, values)):
            # By bounds that are not finite everything is noise.
            return False
        self._measures += 1
        self._largest = [max(pair) for pair in zip(self._largest, values, strict=True)]
        return True

    @property
    def bounds(self) -> Bounds:
        """The bounds, by what was measured so far."""
        if self.is_exact:
            return Bounds(0.0, 0.0, 0.0)
        each = zip(self._largest, FLOORS, LEAST, strict=True)
        return Bounds(
            *(max(self._factor * one, floor * self._epsilon, least) for one, floor, least in each)
        )


def differences(kept: Floats, computed: Floats, *, exactly: bool) -> list[Difference]:
    """The differences of blocks in one layer, [blocks, block_size, 2, heads, head_dim].

    Args:
        exactly: whether one bit is a difference like any other.
    """
    if exactly:
        same = (kept.view(np.uint32) == computed.view(np.uint32)).reshape(len(kept), -1).all(1)
        return [SAME if each else OTHER for each in same.tolist()]
    blocks = len(kept)
    shape = (blocks, kept.shape[1], 2, -1)
    # Far apart they overflow, or are no numbers: the comparison below sees to it.
    with np.errstate(all="ignore"):
        apart = np.abs(kept.reshape(shape) - computed.reshape(shape))
        size = np.square(computed.reshape(shape)).sum((1, 3), dtype=np.float64)
        mean = np.sqrt(size / (kept[0].size / 2)) + _TINY
        norm = np.sqrt(np.square(apart, dtype=np.float64).sum((1, 3)) / (size + _TINY)).max(1)
        peak = (apart.max((1, 3)) / mean).max(1)
    return [
        Difference(one, other) if math.isfinite(one) and math.isfinite(other) else OTHER
        for one, other in zip(norm.tolist(), peak.tolist(), strict=True)
    ]


def larger(these: Sequence[Difference], those: Sequence[Difference]) -> list[Difference]:
    """The larger differences of the same blocks in two layers."""
    return [
        Difference(max(one.norm, other.norm), max(one.peak, other.peak))
        for one, other in zip(these, those, strict=True)
    ]


def logits_difference(drawn: Floats, computed: Floats, *, exactly: bool) -> float:
    """The largest difference of logits, in terms of their range."""
    if exactly:
        return 0.0 if np.array_equal(drawn.view(np.uint32), computed.view(np.uint32)) else math.inf
    with np.errstate(all="ignore"):
        span = float(computed.max() - computed.min()) + _TINY
        apart = float(np.abs(drawn - computed).max()) / span
    return apart if math.isfinite(apart) else math.inf


_TINY: Final = 1e-30
