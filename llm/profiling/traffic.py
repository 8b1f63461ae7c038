"""Traffic that is drawn: requests that come by chance, of lengths by chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynbus import ConfigError
from dynbus.kvrouter import block_hashes
from dynbus.llm.replay.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """The lengths of requests, which have logarithmic normal distributions.

    Attributes:
        prompt_tokens, output_tokens: their means.
        spread: of the logarithms, their standard deviation.
        longest: tokens that a request and its output have at most.
        shared: the share of the requests that begin with one of `prefixes` beginnings, which take
            half of the mean prompt.
    """

    prompt_tokens: float
    output_tokens: float
    longest: int
    spread: float = 0.7
    shared: float = 0.3
    prefixes: int = 4

    def __post_init__(self) -> None:
        if not self.prompt_tokens >= 1.0 or not self.output_tokens >= 1.0:
            raise ConfigError(
                f"prompts of {self.prompt_tokens:g} and outputs of {self.output_tokens:g} tokens: "
                "give 1 or more for both"
            )
        if self.longest < 2:
            raise ConfigError(f"longest = {self.longest}: a request and its output have 2 tokens")


def draw_traffic(shape: TrafficShape, requests: int, block_size: int, *, seed: int) -> Trace:
    """A trace of one request a second on average, of a Poisson process.

    Args:
        requests: how many; 1 at least.
        block_size: of the engine.
    """
    random = np.random.default_rng(seed)
    arrivals = random.exponential(1.0, requests).cumsum()
    arrivals -= arrivals[0]
    prompts = _lengths(random, shape.prompt_tokens, shape.spread, requests)
    outputs = _lengths(random, shape.output_tokens, shape.spread, requests)
    begins = int(shape.prompt_tokens / 2) // block_size
    fresh = shape.prefixes * begins
    drawn: list[TraceRequest] = []
    for at in range(requests):
        prompt = min(int(prompts[at]), shape.longest - 1)
        output = min(int(outputs[at]), shape.longest - prompt)
        blocks = -(-prompt // block_size)
        shares = begins if begins < blocks and random.random() < shape.shared else 0
        first = begins * int(random.integers(shape.prefixes))
        ids = np.concatenate(
            (np.arange(first, first + shares), np.arange(fresh, fresh + blocks - shares))
        ).astype(np.int64)
        fresh += blocks - shares
        request = TraceRequest(
            f"r{at}",
            at + 1,
            float(arrivals[at]),
            prompt,
            output,
            ids,
            np.empty(0, np.uint64),
            block_size,
        )
        hashes = block_hashes(request.tokens, block_size)
        drawn.append(
            TraceRequest(
                *(request.id, request.line, request.arrival, prompt, output, ids, hashes),
                trace_block=block_size,
            )
        )
    return Trace(drawn, block_size)


def _lengths(
    random: np.random.Generator, mean: float, spread: float, count: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Lengths of a mean, 1 at least; of shape [count]."""
    drawn = random.lognormal(np.log(mean) - spread * spread / 2.0, spread, count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)
