"""The batches of requests that engines are measured with: steps of all kinds up to their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from dynbus.llm.engine import EngineLimits
from dynbus.llm.generation import GenerateRequest, Sampling

OUTPUT: Final = 12
"""Tokens that are decoded in each measured batch."""
ONE_BY_ONE: Final = 16


class Batch(NamedTuple):
    """Requests that are given to an engine at certain steps.

    Attributes:
        arrivals: of each request the step before which it comes, the tokens of its prompt and of
            its output.
    """

    arrivals: Sequence[tuple[int, int, int]]


def plain_request(token_ids: list[int], max_tokens: int) -> GenerateRequest:
    """A request of which only the lengths matter: the end of a text does not end it."""
    return GenerateRequest(
        token_ids,
        max_tokens=max_tokens,
        min_tokens=max_tokens,
        ignore_eos=True,
        sampling=Sampling(temperature=0.0),
    )


def batch_sizes(most: int) -> list[int]:
    """The numbers of requests in a step that are measured, and have a row in the fitted table.

    Each of the small ones: products of matrices of three rows may take longer than those of four.
    """
    sizes = [*range(1, ONE_BY_ONE + 1)]
    while sizes[-1] < most:
        sizes += [sizes[-1] * 3 // 2, sizes[-1] * 2]
    return [*(size for size in sizes if size < most), most]


def longest_request(limits: EngineLimits, context: int) -> int:
    """The tokens of the longest request that an engine takes, prompt and output; `context` at
    most."""
    return min(context, limits.context_length, limits.blocks * limits.block_size)


def batches_for(limits: EngineLimits, context: int) -> Iterator[Batch]:
    """Batches that have steps of all kinds up to an engine's limits.

    Some begin together, of each size and length; in others requests come one by one, so that
    prompts are computed beside those that decode.

    Args:
        context: tokens of the longest request.
    """
    room = limits.blocks * limits.block_size
    context = longest_request(limits, context)
    longest = context - OUTPUT
    if longest < 1:
        raise ValueError(
            f"context = {context}: a batch takes {OUTPUT + 1} tokens at least: give the "
            "engine, and its measurement, longer requests"
        )
    lengths = [length for length in (8, 32, 128, 512, 2048, 8192, 32_768) if length < longest]
    for count in batch_sizes(limits.max_num_seqs):
        # Of sizes between the powers of 2 the lengths in the middle tell enough.
        is_power = not count & (count - 1)
        for length in (*lengths, longest) if is_power else lengths[1:3] or [longest]:
            if count * (length + OUTPUT + limits.block_size) <= room or count == 1:
                # All decode together when the last prompt is computed.
                later = -(-count * length // limits.max_num_batched_tokens)
                yield Batch([(0, length, min(OUTPUT + later, context - length))] * count)
    # As many as there are places, all of the cache, prompts beside those that decode.
    each = min(longest, room // limits.max_num_seqs - OUTPUT - limits.block_size)
    if each > 0:
        count = limits.max_num_seqs
        later = -(-count * each // limits.max_num_batched_tokens)
        yield Batch([(0, each, min(OUTPUT + later, context - each))] * count)
    drawn = np.random.default_rng(0)
    least, largest = math.log(4.0), math.log(max(longest / 2.0, 5.0))
    for gap in (1, 3, 6):
        arrivals: list[tuple[int, int, int]] = []
        for number in range(2 * limits.max_num_seqs):
            length = int(math.exp(drawn.uniform(least, largest)))
            output = int(drawn.integers(2, 4 * OUTPUT))
            arrivals.append((gap * number, length, min(output, longest - length + OUTPUT)))
        yield Batch(arrivals)
