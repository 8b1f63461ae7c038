"""The profile of an engine: how long its steps take, as it was measured, in a JSON file.

    step = sequences(requests + prompts) + prompt_tokens(prompt tokens)
           + attention * (tokens before each prompt token) + context_tokens * (context decoded)

The first two are tables, linear between their rows: products of matrices take the time of a few
rows or of many, with steps between that no polynomial has. The others are seconds for each. Beyond
what it was fitted to a profile says nothing: `OutsideProfile` is raised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dynbus import ConfigError

from .timing import StepWork

VERSION: Final = 1

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
RelativeError = Annotated[float, Meta(gt=-1)]
Row = tuple[Positive, Seconds]
"""A number, and the seconds that it takes."""


class OutsideProfile(ConfigError):
    """Raised for a step, or an engine, of a kind that a profile was not fitted to."""


class StepCosts(msgspec.Struct, frozen=True):
    """The coefficients of a profile.

    Attributes:
        sequences: seconds of a step by the requests in it, those that decode and those whose
            prompts are computed; linear between the rows, and the first one's below it.
        prompt_tokens: seconds on top by the prompt tokens in it; likewise, and 0 for none.
        attention: seconds for each token before a prompt token, for each of these.
        context_tokens: seconds for each token before one that is decoded.
    """

    sequences: Annotated[list[Row], Meta(min_length=1)]
    prompt_tokens: Annotated[list[Row], Meta(min_length=1)]
    attention: Seconds
    context_tokens: Seconds


class FittedRange(msgspec.Struct, frozen=True):
    """The largest values that a profile was fitted to.

    Attributes:
        sequences: requests in a step.
        prompt_tokens: in a step.
        context_tokens: before the tokens that a step decodes, of all its requests together.
        context: tokens of one request.
    """

    sequences: Positive
    prompt_tokens: Positive
    context_tokens: Positive
    context: Positive


class HeldOutError(msgspec.Struct, frozen=True):
    """The error of a simulation with the profile, on traffic that was not fitted.

    Errors are relative: 0.1 where the simulation says 10 % more than was measured.

    Attributes:
        requests: how many there were.
        load: their rate, as a share of what the engine can do at most.
        ttft_mean, ttft_p99: of the times to first token.
        tpot_mean, tpot_p99: of the mean times between the tokens of a request.
    """

    requests: int
    load: float
    ttft_mean: RelativeError
    ttft_p99: RelativeError
    tpot_mean: RelativeError
    tpot_p99: RelativeError


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a profile's file.

    Attributes:
        engine: what computes, such as `numpy`.
        model: the model's name.
        measured_at: the time, by UTC.
        machine: where it was measured.
        measured: how: `steps` in one process, or `streams` of a served engine.
        block_size, blocks, max_num_seqs, max_num_batched_tokens, context_length: of the engine.
        block_bytes: of a block of its cache, of all layers; 0 where that is not known.
        latency: seconds from a request's call to its first token beside those of steps: what
            serving adds. 0 where steps were measured.
        costs: of its steps.
        range: what these were fitted to.
        held_out: the errors on each run that was held out.
    """

    version: int = VERSION
    engine: str
    model: str
    measured_at: str
    machine: str
    measured: str
    block_size: Positive
    blocks: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    context_length: Positive
    block_bytes: Annotated[int, Meta(ge=0)] = 0
    latency: Seconds = 0.0
    costs: StepCosts
    range: FittedRange
    held_out: list[HeldOutError] = []

    @property
    def name(self) -> str:
        """Of the engine and its model, for people."""
        return f"{self.model} on {self.engine}"

    def size(self, **changes: Any) -> dict[str, Any]:
        """The size of a mock engine that plays this one: arguments of `MockConfig`.

        Args:
            changes: in place of the engine's own, and further arguments.

        Raises:
            OutsideProfile: the engine would take steps that the profile was not fitted to.
        """
        size: dict[str, Any] = {
            "block_size": self.block_size,
            "blocks": self.blocks,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "context_length": self.context_length,
            "latency": self.latency,
        } | changes
        for name, most in (
            ("max_num_seqs", self.range.sequences),
            ("max_num_batched_tokens", self.range.prompt_tokens),
            ("context_length", self.range.context),
        ):
            if size[name] > most:
                raise OutsideProfile(
                    f"{name} = {size[name]}: the profile of {self.name} was fitted to {most} at "
                    "most: give no more, or profile an engine that has more"
                )
        if size["block_size"] != self.block_size:
            raise OutsideProfile(
                f"block_size = {size['block_size']}: the profile of {self.name} is of blocks of "
                f"{self.block_size} tokens: leave block_size out"
            )
        return size

    def with_errors(self, held_out: list[HeldOutError]) -> EngineProfile:
        """The profile with the errors of runs that were held out."""
        return msgspec.structs.replace(self, held_out=held_out)

    def timing(self, speedup_ratio: float = 1.0) -> FittedTiming:
        """The time of its steps; see `FittedTiming`."""
        return FittedTiming(self.name, self.costs, self.range, speedup_ratio)


@dataclass(frozen=True, slots=True)
class FittedTiming:
    """A `StepTiming` by a profile.

    Args:
        name: of the profile, for messages.
        speedup_ratio: divides all times.

    Raises:
        ValueError: `speedup_ratio` is not above 0.
    """

    name: str
    costs: StepCosts
    range: FittedRange
    speedup_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not self.speedup_ratio > 0.0:
            raise ValueError(f"speedup_ratio = {self.speedup_ratio}: it must be above 0")

    def step(self, work: StepWork, capacity_tokens: int) -> float:
        """See `StepTiming`."""
        costs = self.costs
        sequences = work.prompts + work.requests
        if not sequences:
            return 0.0
        self._check(sequences, work.prompt_tokens, work.context_tokens)
        seconds = at_row(costs.sequences, sequences) + costs.context_tokens * work.context_tokens
        if work.prompt_tokens:
            seconds += costs.attention * work.attention
            seconds += at_row(costs.prompt_tokens, work.prompt_tokens, from_zero=True)
        return seconds / self.speedup_ratio

    def decode_steps(
        self, context_tokens: int, requests: int, steps: int, capacity_tokens: int
    ) -> NDArray[np.float64]:
        """See `StepTiming`."""
        costs = self.costs
        self._check(requests, 0, context_tokens + requests * (steps - 1))
        context = context_tokens + requests * np.arange(steps, dtype=np.float64)
        seconds: NDArray[np.float64] = costs.context_tokens * context
        seconds += at_row(costs.sequences, requests)
        seconds /= self.speedup_ratio
        return seconds

    def _check(self, sequences: int, prompt_tokens: int, context_tokens: int) -> None:
        most = self.range
        if (
            sequences > most.sequences
            or prompt_tokens > most.prompt_tokens
            or context_tokens > most.context_tokens
        ):
            raise OutsideProfile(
                f"a step of {sequences} requests, {prompt_tokens} prompt tokens and "
                f"{context_tokens} tokens of context: the profile of {self.name} was fitted to "
                f"{most.sequences}, {most.prompt_tokens} and {most.context_tokens} at most: lower "
                "the engine's limits or its cache, or profile an engine that has more"
            )


def at_row(rows: Sequence[Row], value: int, *, from_zero: bool = False) -> float:
    """The seconds of a table at a value, linear between its rows and the last one's beyond them.

    Args:
        from_zero: whether nothing takes no time, and the table is linear from there to its first
            row.
    """
    after = bisect_left(rows, value, key=_first)
    if after == len(rows):
        return rows[-1][1]
    x1, y1 = rows[after]
    if x1 == value or (not after and not from_zero):
        return y1
    x0, y0 = rows[after - 1] if after else (0, 0.0)
    return y0 + (y1 - y0) * (value - x0) / (x1 - x0)


def _first(row: Row) -> int:
    return row[0]


def read_profile(path: Path) -> EngineProfile:
    """Read the profile of a file.

    Raises:
        ConfigError: it is not there, no profile, or of a version that this one does not know.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error}") from None
    try:
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise ConfigError(
                f"the profile {path} is of version {version}, and this dynbus reads version "
                f"{VERSION}: make it again with `dynbus profile`"
            )
        profile = msgspec.json.decode(text, type=EngineProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no profile: {error}: make one with `dynbus profile`"
        ) from None
    for name, rows in (
        ("sequences", profile.costs.sequences),
        ("prompt_tokens", profile.costs.prompt_tokens),
    ):
        numbers = [number for number, _ in rows]
        if numbers != sorted(set(numbers)):
            raise ConfigError(f"{path}: the rows of costs.{name} are not in their order")
    return profile


class _Versioned(msgspec.Struct):
    version: int


def write_profile(path: Path, profile: EngineProfile) -> None:
    """Write a profile into a file.

    Raises:
        OSError: it cannot be written.
    """
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
