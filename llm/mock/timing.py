"""The time that a step of an engine takes, and Dynamo's formula for it.

    prefill(tokens)  = 16.50142 + 0.01518344 * tokens + 4.209989e-7 * tokens^2      ms
    decode(context)  = max(1, 5.74 + 54.01 * use - 25.74 * use^2)                   ms
    use              = min(1, context / capacity)

`tokens` are the prompt tokens that the step computes, of all requests together; `context` the
tokens before each token that it decodes, summed over the requests; `capacity` the tokens that
the cache holds. A part without tokens takes no time, and a step with both takes their sum. The
polynomials and constants are those of Dynamo's mock engine, so that both can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Polynomial = tuple[float, float, float]
"""The factors of x^0, x^1 and x^2."""


class StepWork(NamedTuple):
    """The work of one step, on which its time depends.

    Attributes:
        prompts: requests of which it computes a part of the prompt, or of what a preempted one had.
        prompt_tokens: tokens of these, of all together.
        attention: for each of these tokens the tokens before it, all added up.
        requests: that decode a token.
        context_tokens: the tokens before those that are decoded, of all requests together.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    attention: int = 0
    requests: int = 0
    context_tokens: int = 0


@runtime_checkable
class StepTiming(Protocol):
    """The time that the steps of an engine take."""

    def step(self, work: StepWork, capacity_tokens: int) -> float:
        """Seconds of one step.

        Args:
            capacity_tokens: that the cache holds.

        Raises:
            OutsideProfile: it is not known for a step like this one.
        """
        ...

    def decode_steps(
        self, context_tokens: int, requests: int, steps: int, capacity_tokens: int
    ) -> NDArray[np.float64]:
        """Seconds of each of several decode steps in which all requests stay.

        Args:
            context_tokens: of the first step; each step adds one for each request.

        Returns:
            An array of shape [steps].

        Raises:
            OutsideProfile: as by `step`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of prefill and decode, in seconds.

    Attributes:
        prefill_ms: of the prompt tokens in a step, in milliseconds.
        decode_ms: of the part of the cache that is read, in milliseconds.
        decode_floor_ms: the least time of a decode step.
        speedup_ratio: divides all times.

    Raises:
        ValueError: `speedup_ratio` is not above 0.
    """

    prefill_ms: Polynomial = (16.50142, 1.518344e-2, 4.209989e-7)
    decode_ms: Polynomial = (5.74, 54.01, -25.74)
    decode_floor_ms: float = 1.0
    speedup_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not self.speedup_ratio > 0.0:
            raise ValueError(f"speedup_ratio = {self.speedup_ratio}: it must be above 0")

    def step(self, work: StepWork, capacity_tokens: int) -> float:
        """See `StepTiming`: the sum of both parts."""
        seconds = self.prefill(work.prompt_tokens)
        if work.context_tokens:
            seconds += self.decode(work.context_tokens, capacity_tokens)
        return seconds

    def prefill(self, tokens: int) -> float:
        """Seconds to compute prompt tokens; 0 for none."""
        if not tokens:
            return 0.0
        constant, linear, square = self.prefill_ms
        milliseconds = constant + linear * tokens + square * tokens * tokens
        return milliseconds / (1000.0 * self.speedup_ratio)

    def decode(self, context_tokens: int, capacity_tokens: int) -> float:
        """Seconds to decode one token for each request."""
        constant, linear, square = self.decode_ms
        use = min(1.0, context_tokens / capacity_tokens)
        milliseconds = max(self.decode_floor_ms, constant + linear * use + square * use * use)
        return milliseconds / (1000.0 * self.speedup_ratio)

    def decode_steps(
        self, context_tokens: int, requests: int, steps: int, capacity_tokens: int
    ) -> NDArray[np.float64]:
        """See `StepTiming`."""
        constant, linear, square = self.decode_ms
        context = context_tokens + requests * np.arange(steps)
        use = np.minimum(1.0, context / capacity_tokens)
        milliseconds = np.maximum(self.decode_floor_ms, constant + use * (linear + square * use))
        return milliseconds / (1000.0 * self.speedup_ratio)
