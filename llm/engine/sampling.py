"""Sampling: the draw of tokens from logits.

In the order of `Sampling`: bias, penalties, temperature, top-k, top-p, min-p. Tokens that would
break the form of the output are excluded before temperature. Of equal logits the lower id comes
first, but all that are as likely as the last of top-k stay. A logit that is no number counts as
minus infinity.

The random number of a token is a function of the seed, its position in the sequence and its
continuation, and penalties count what was generated before as well: so a stream that is continued
elsewhere, by a request that says how much of its prompt that is, draws the same rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus.llm.generation import Sampling, TokenLogprob

from .constraint import Constraint

LEAST_LOGPROB: Final = -9999.0
"""In place of minus infinity, which JSON has not."""

_GROUPS: Final = 8
"""Groups for each of the largest values that are looked for."""
_GROUP: Final = 64
"""Weights that are summed up first."""
_PROMISING: Final = (64, 1024)
"""So many of the likeliest tokens are looked at before all are sorted for top-p."""

_COLDEST: Final = float(np.finfo(np.float32).tiny)
_HOTTEST: Final = float(np.finfo(np.float32).max)


class Drawn(NamedTuple):
    """A token, with its log-probability where that was asked for."""

    token_id: int
    logprob: TokenLogprob | None


class Sampler:
    """Draws the tokens of one continuation.

    Args:
        sampling: checked before.
        seed: from 0 to 2^64 - 1.
        index: of the continuation; each draws for itself.
        prompt: its tokens.
        generated: how many of the last of them were output before.
        stop_token_ids: are not drawn before there are `min_tokens`.
        constraint: the form of the output, or None for any; each token drawn is told to it. Its
            `fill` is called before each draw, by others.
    """

    __slots__ = (
        "_bias",
        "_changes",
        "_counts",
        "_index",
        "_min_tokens",
        "_sampling",
        "_seed",
        "_seen",
        "_stops",
        "constraint",
        "generated",
        "is_greedy",
    )

    def __init__(
        self,
        sampling: Sampling,
        *,
        seed: int,
        index: int = 0,
        prompt: Sequence[int] = (),
        generated: int = 0,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.constraint = constraint
        self.is_greedy = sampling.temperature == 0.0
        self.generated = 0
        self._sampling = sampling
        self._seed = seed
        self._index = index
        self._stops = np.array(stop_token_ids, dtype=np.int64)
        self._min_tokens = min_tokens if stop_token_ids else 0
        self._counts: dict[int, int] | None = None
        self._seen: set[int] | None = None
        self._bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._counts = Counter(prompt[len(prompt) - generated :])
        if sampling.repetition_penalty != 1.0:
            self._seen = set(prompt)
        if sampling.logit_bias:
            with np.errstate(over="ignore"):
                self._bias = (
                    np.array(list(sampling.logit_bias), dtype=np.int64),
                    np.array(list(sampling.logit_bias.values()), dtype=np.float32),
                )
        changes = (self._bias, self._counts, self._seen, constraint)
        self._changes = any(each is not None for each in changes)

    @property
    def changes_logits(self) -> bool:
        """True if the next token is drawn from other logits than the model's."""
        return self._changes or self.generated < self._min_tokens

    def note(self, token_id: int) -> None:
        """Count a token of the output."""
        self.generated += 1
        if self.constraint is not None:
            self.constraint.accept(token_id)
        if self._counts is not None:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._seen is not None:
            self._seen.add(token_id)

    def draw(self, logits: NDArray[np.float32], position: int) -> int | None:
        """Draw the token of a position; None when there is none that is possible.

        Args:
            logits: of all tokens; of shape [vocabulary].
        """
        if self.changes_logits:
            # Enormous numbers become infinite, and infinite ones together no number.
            with np.errstate(all="ignore"):
                logits = self._changed(logits)
        token_id = self._drawn(logits, position)
        if self.constraint is not None:
            while token_id is not None and self.constraint.refuses(token_id):
                # The logits are a copy of the model's by now.
                logits[token_id] = -np.inf
                token_id = self._drawn(logits, position)
        return token_id

    def _drawn(self, logits: NDArray[np.float32], position: int) -> int | None:
        if self.is_greedy:
            return likeliest(logits)
        choices = candidates(logits, self._sampling)
        if choices is None:
            return None
        token_ids, weights = choices
        return pick(token_ids, weights, uniform(self._seed, position, self._index))

    def _changed(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        sampling, changed = self._sampling, logits.copy()
        if self._bias is not None:
            ids, added = self._bias
            changed[ids] += added
        if self._seen:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            seen, penalty = changed[ids], np.float32(sampling.repetition_penalty)
            changed[ids] = np.where(seen > 0.0, seen / penalty, seen * penalty)
        if self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            changed[ids] -= np.float32(sampling.frequency_penalty) * counts + np.float32(
                sampling.presence_penalty
            )
        may_stop = self.generated >= self._min_tokens
        if self.constraint is not None:
            self.constraint.apply(changed, may_stop=may_stop)
        elif not may_stop:
            changed[self._stops] = -np.inf
        return changed

    def logprob(self, logits: NDArray[np.float32], token_id: int) -> TokenLogprob | None:
        """The log-probability of a token by the model's own logits, where it was asked for."""
        count = self._sampling.logprobs
        return None if count is None else token_logprob(logits, token_id, count)


def draw_tokens(
    logits: NDArray[np.float32], samplers: Sequence[Sampler], positions: Sequence[int]
) -> list[Drawn | None]:
    """Draw a token from each row, and count it.

    Args:
        logits: of shape [rows, vocabulary]; they are not changed.
        samplers: one for each row.
        positions: of the tokens in their sequences.

    Returns:
        One for each row; None where none is possible, since the model's logits are not numbers for
        example.
    """
    # One call for all rows that just take the likeliest: as a rule these are all or none.
    plain = [sampler.is_greedy and not sampler.changes_logits for sampler in samplers]
    first = logits.argmax(axis=1).tolist() if all(plain) and len(plain) > 1 else None
    drawn: list[Drawn | None] = []
    for row, sampler in enumerate(samplers):
        if first is not None and math.isfinite(logits[row, first[row]]):
            token_id: int | None = first[row]
        else:
            token_id = sampler.draw(logits[row], positions[row])
        if token_id is None:
            drawn.append(None)
            continue
        sampler.note(token_id)
        drawn.append(Drawn(token_id, sampler.logprob(logits[row], token_id)))
    return drawn


# One row ------------------------------------------------------------------------------------


def likeliest(logits: NDArray[np.float32]) -> int | None:
    """The token with the highest logit, the lowest id of several; None for none."""
    token_id = int(logits.argmax())
    if math.isnan(logits[token_id]):
        logits = _numbers(logits)
        token_id = int(logits.argmax())
    return None if logits[token_id] == -np.inf else token_id


def candidates(
    logits: NDArray[np.float32], sampling: Sampling
) -> tuple[NDArray[np.int64] | None, NDArray[np.float32]] | None:
    """The tokens that may be drawn, by temperature, top-k, top-p and min-p.

    Returns:
        Their ids, rising, and their weights, of which the largest is 1; both of shape
        [candidates]. None in place of the ids for all of the vocabulary. None for no candidate.
    """
    highest = logits.max()
    if math.isnan(highest):
        logits = _numbers(logits)
        highest = logits.max()
    if highest == -np.inf:
        return None
    if highest == np.inf:
        certain = np.flatnonzero(logits == np.inf)
        return certain, np.ones(len(certain), dtype=np.float32)
    ids: NDArray[np.int64] | None = None
    if 0 < sampling.top_k < len(logits):
        ids = _likeliest_ids(logits, sampling.top_k)
        logits = logits[ids]
        least = np.partition(logits, len(ids) - sampling.top_k)[len(ids) - sampling.top_k]
        keep = logits >= least
        ids, logits = ids[keep], logits[keep]
    # As a float32 it might be 0 or infinite, and what it divides no number then.
    temperature = np.float32(min(max(sampling.temperature, _COLDEST), _HOTTEST))
    with np.errstate(over="ignore"):
        weights = np.exp((logits - highest) / temperature)
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(sampling.min_p))
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _numbers(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.isnan(logits), np.float32(-np.inf), logits)


def _likeliest_ids(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Rising ids of at least `count` of the largest values, and of all that equal one of them.

    Each of the largest ones of `count` groups is at least the smallest of these, so no more than
    a few others are as large. To look for it among all values would take ten times as long.
    """
    width = len(values) // (_GROUPS * count)
    if width < 2:
        return np.arange(len(values))
    groups = len(values) // width
    largest = values[: groups * width].reshape(width, groups).max(axis=0)
    return np.flatnonzero(values >= np.partition(largest, groups - count)[groups - count])


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Rising positions of the largest weights that together reach a part of their sum."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for count in _PROMISING:
        # With the smallest are all that equal it, so the order among these is that of all.
        ids = _likeliest_ids(weights, count)
        largest = weights[ids]
        if float(largest.sum(dtype=np.float64)) >= wanted:
            break
    else:
        ids, largest = np.arange(len(weights)), weights
    falling = np.sort(largest)[::-1]
    # The one that reaches the sum belongs to it.
    count = min(int(falling.cumsum(dtype=np.float64).searchsorted(wanted)) + 1, len(falling))
    above, equal = largest > falling[count - 1], largest == falling[count - 1]
    above[np.flatnonzero(equal)[: count - int(above.sum())]] = True
    kept: NDArray[np.int64] = ids[above]
    return kept


def pick(token_ids: NDArray[np.int64] | None, weights: NDArray[np.float32], number: float) -> int:
    """The token at a number from 0 to 1 in the sum of all weights."""
    at = 0
    if len(weights) > _GROUP * _GROUP:
        # First among the sums of groups, then in the group: ten times as fast as to sum up all.
        starts = np.arange(0, len(weights), _GROUP)
        sums = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
        number *= float(sums[-1])
        group = min(int(sums.searchsorted(number, side="right")), len(sums) - 1)
        at = group * _GROUP
        weights = weights[at : at + _GROUP]
        number -= float(sums[group - 1]) if group else 0.0
        sums = weights.cumsum(dtype=np.float64)
    else:
        sums = weights.cumsum(dtype=np.float64)
        number *= float(sums[-1])
    inside = int(sums.searchsorted(number, side="right"))
    if inside == len(sums):
        # Rounding: the last one that has any weight.
        inside = int(np.flatnonzero(weights)[-1])
    at += inside
    return at if token_ids is None else int(token_ids[at])


def token_logprob(logits: NDArray[np.float32], token_id: int, count: int) -> TokenLogprob:
    """The log-probability of a token, and of the `count` likeliest."""
    highest = logits.max()
    if math.isnan(highest):
        logits = _numbers(logits)
        highest = logits.max()
    if highest == np.inf:
        logits = np.where(logits == np.inf, np.float32(0.0), np.float32(-np.inf))
        highest = logits.max()
    with np.errstate(over="ignore"):
        total = float(highest) + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    if count:
        ids = _likeliest_ids(logits, count)
        ids = ids[np.argsort(-logits[ids], kind="stable")[:count]]
        top = [
            (each, _bounded(logit - total))
            for each, logit in zip(ids.tolist(), logits[ids].tolist(), strict=True)
        ]
    return TokenLogprob(token_id, _bounded(float(logits[token_id]) - total), top)


def _bounded(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


# Random numbers -----------------------------------------------------------------------------

_MASK: Final = (1 << 64) - 1


def uniform(seed: int, position: int, index: int = 0) -> float:
    """A random number from 0 to below 1: a function of its arguments, each below 2^64.

    It is the first of Philox4x64-10 with the key (seed, 0) and the counter (position + 1, index,
    0, 0): what numpy's generator gives, which takes longer to make than to ask.
    """
    c0, c1, c2, c3 = (position + 1) & _MASK, index, 0, 0
    k0, k1 = seed, 0
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & _MASK, (p0 >> 64) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _MASK, (k1 + 0xBB67AE8584CAA73B) & _MASK
    return (c0 >> 11) * 2.0**-53
