"""The speed of an engine, as it was measured, and the number of engines that a demand takes.

An engine of continuous batching shares its time between prompts and steps of decoding. With
requests that arrive at the rate r at each of n instances, whose prompts take s seconds each, and
which get o tokens each:

    rho     = r s                               share of its time that prompts take
    running = r o itl                           Little's law (Little 1961)
    itl     = step(running context) / (1 - rho)
    waiting = s (1 + cv2) / 2 rho^(sqrt(2(n+1)) - 1) / (n (1 - rho))

The last one is the mean wait of a queue that n servers share, with a general distribution of
service (Sakasegawa 1977, "An approximation formula Lq = a rho^beta / (1 - rho)"); its power of rho
is about the chance of having to wait, and waits that there are have about an exponential
distribution (Kingman 1962), of which the time to first token takes a percentile.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final, NamedTuple

from .observation import PoolKind

LATE: Final = 0.05
"""The share of requests that may wait for longer than the objective allows."""
FULL: Final = 0.9
"""The share of a cache, and of the slots, that running requests may take: beyond it they are
preempted, or wait."""
BUSIEST: Final = 0.85
"""The most of its time that an engine is taken to give to prompts, where its steps are measured."""
RELAXED: Final = 3.0
"""Times what an idle engine takes, to which an objective is relaxed that not even that one keeps.
A single engine may give 0.23 of its time to prompts then, two of them half, and eight 0.85."""
VARIATION: Final = 1.0
"""The squared coefficient of variation of the time of prompts, that of an exponential one."""
FORGET: Final = 1800.0
"""Seconds after which a measurement counts for 1/e."""
BELOW: Final = 8.0
"""The weight of a measurement of prompts that is below the line, of which one above it has 1."""
PRIOR_REQUESTS: Final = 20.0
"""The number of measured requests that the profile at the beginning is worth."""


class Line(NamedTuple):
    """Seconds as a line: `base + each * x`."""

    base: float
    each: float

    def at(self, x: float) -> float:
        """Seconds at `x`."""
        return self.base + self.each * x


class EngineSpeed(NamedTuple):
    """The speed of an engine that has nothing else to do.

    Attributes:
        prefill: seconds of a prompt, by its tokens that are not cached.
        decode: seconds of a step, by the tokens of context of all requests in it.
    """

    prefill: Line = Line(0.02, 2e-5)
    decode: Line = Line(0.008, 5e-8)


class Demand(NamedTuple):
    """The requests that a pool is to serve.

    Attributes:
        rate: of arrivals, per second.
        prompt_tokens, output_tokens: mean of a request; of prompts those that are not cached.
        context_tokens: mean that a running request has in the cache.
    """

    rate: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    context_tokens: float = 0.0


class Limits(NamedTuple):
    """The bounds of what an instance may be given.

    Attributes:
        ttft, itl: seconds.
        capacity_tokens: that the cache of one instance holds; 0 where that is not known.
        slots: requests that run at a time in one instance; 0 likewise.
    """

    ttft: float
    itl: float
    capacity_tokens: int = 0
    slots: int = 0

    @property
    def context_tokens(self) -> float:
        """The most tokens that running requests of an instance may have."""
        return FULL * self.capacity_tokens if self.capacity_tokens else math.inf


class Prediction(NamedTuple):
    """The state that one instance of several settles in.

    Attributes:
        busy: share of its time that prompts take; 1 and more for too many.
        ttft: seconds that all but `LATE` of the requests keep.
        itl: mean seconds between two tokens; infinite for too many.
        running: requests that run there.
    """

    busy: float
    ttft: float
    itl: float
    running: float


def predict(kind: PoolKind, profile: EngineSpeed, demand: Demand, instances: int) -> Prediction:
    """The state that each of so many instances settles in under a demand."""
    rate = demand.rate / instances
    prompt = 0.0 if kind == "decode" else profile.prefill.at(demand.prompt_tokens)
    busy = rate * prompt
    if busy >= 1.0:
        return Prediction(busy, math.inf, math.inf, math.inf)
    step, running = 0.0, busy
    if kind != "prefill":
        # running = x step and step = base + each running context, of which this is the solution.
        x = rate * demand.output_tokens / (1.0 - busy)
        growth = x * profile.decode.each * demand.context_tokens
        if growth >= 1.0:
            return Prediction(busy, math.inf, math.inf, math.inf)
        step = profile.decode.base / (1.0 - growth)
        running = x * step
    itl = step / (1.0 - busy)
    ttft = prompt + step
    if busy > 0.0:
        mean = prompt * (1.0 + VARIATION) / 2.0 / (instances * (1.0 - busy))
        chance = busy ** (math.sqrt(2.0 * (instances + 1)) - 1.0)
        if chance > LATE:
            ttft += mean * math.log(chance / LATE)
    return Prediction(busy, ttft, itl, running)


class Need(NamedTuple):
    """The instances that a demand takes.

    Attributes:
        out_of_reach: objectives that not even an idle instance keeps; more of them do not help.
    """

    instances: int
    out_of_reach: tuple[str, ...] = ()


def need(kind: PoolKind, profile: EngineSpeed, demand: Demand, limits: Limits, most: int) -> Need:
    """The least number of instances that keep the objectives under a demand, at most `most`.

    An objective that an idle instance misses is relaxed: it would be missed by any number, but
    not by as much.
    """
    if demand.rate <= 0.0:
        return Need(0)
    ttft, itl = limits.ttft, limits.itl
    idle_ttft = profile.prefill.at(demand.prompt_tokens) + profile.decode.base * (kind != "prefill")
    idle_itl = profile.decode.at(demand.context_tokens)
    out_of_reach: list[str] = []
    if kind != "decode" and idle_ttft >= ttft:
        out_of_reach.append("ttft")
        ttft = RELAXED * idle_ttft
    if kind != "prefill" and idle_itl >= itl:
        out_of_reach.append("itl")
        itl = RELAXED * idle_itl

    def is_enough(instances: int) -> bool:
        state = predict(kind, profile, demand, instances)
        return (
            (kind == "decode" or state.ttft <= ttft)
            and (kind == "prefill" or state.itl <= itl)
            and state.running * demand.context_tokens <= limits.context_tokens
            and (not limits.slots or state.running <= FULL * limits.slots)
        )

    # More instances are never worse.
    instances = 1 + bisect_left(range(1, most + 1), True, key=is_enough)
    return Need(min(instances, most), tuple(out_of_reach))


def streams_need(
    kind: PoolKind,
    profile: EngineSpeed,
    running: int,
    context_tokens: float,
    limits: Limits,
) -> int:
    """The instances that the streams need which run now, whatever else comes."""
    if not running:
        return 0
    if kind == "prefill":
        return 1
    room = limits.context_tokens
    of_itl = (limits.itl - profile.decode.base) / profile.decode.each
    if of_itl > context_tokens / running:
        room = min(room, of_itl)
    of_slots = math.ceil(running / limits.slots) if limits.slots else 1
    return max(1, of_slots, math.ceil(context_tokens / room))


class _Fit:
    """A line through measurements, of which old ones are forgotten: least squares that are drawn
    to a line known before (ridge regression, Hoerl and Kennard 1970)."""

    def __init__(self, prior: Line) -> None:
        self._prior = prior
        # The first x: what is far or near of it, whatever the unit.
        self._scale = 0.0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, x: float, seconds: float, weight: float, passed: float) -> None:
        """A measurement, `passed` seconds after the one before."""
        kept = math.exp(-passed / FORGET)
        n, sx, sxx, sy, sxy = (kept * each for each in self._sums)
        y = seconds - self._prior.at(x)
        self._scale = self._scale or x or 1.0
        x /= self._scale
        self._sums = (
            n + weight,
            sx + weight * x,
            sxx + weight * x * x,
            sy + weight * y,
            sxy + weight * x * y,
        )

    @property
    def line(self) -> Line:
        """The line; it never falls."""
        n, sx, sxx, sy, sxy = self._sums
        if n <= 0.0:
            return self._prior
        # The mean is trusted soon; the slope when there is more than one x.
        a, d = n + PRIOR_REQUESTS / 10, sxx + PRIOR_REQUESTS
        determinant = a * d - sx * sx
        if not determinant > 0.0:
            # Of so many measurements at one x that no float tells them from a line.
            return self._prior
        base = (sy * d - sxy * sx) / determinant
        each = (sxy * a - sy * sx) / determinant / self._scale
        prior = self._prior
        return Line(
            max(prior.base / 100, prior.base + base), max(prior.each / 100, prior.each + each)
        )


class ProfileLearner:
    """Learns the profile of an engine from what requests see of it.

    Args:
        prior: what it begins with.
    """

    def __init__(self, prior: EngineSpeed) -> None:
        self._prefill = _Fit(prior.prefill)
        self._decode = _Fit(prior.decode)

    def __repr__(self) -> str:
        return f"<ProfileLearner {self.profile}>"

    @property
    def profile(self) -> EngineSpeed:
        """The profile as it is known now."""
        return EngineSpeed(self._prefill.line, self._decode.line)

    def note_first_tokens(
        self, prompt_tokens: float, seconds: float, requests: int, passed: float
    ) -> None:
        """Prompts of so many tokens took so long, with what is left in it of their waits.

        Waits only add: what is below the line counts for more (an expectile, Newey and Powell
        1987).
        """
        weight = BELOW if seconds < self._prefill.line.at(prompt_tokens) else 1.0
        self._prefill.note(prompt_tokens, seconds, weight * requests, passed)

    def note_steps(
        self, context_tokens: float, seconds: float, requests: int, passed: float
    ) -> None:
        """Steps of an instance with so many tokens of context took so long."""
        self._decode.note(context_tokens, seconds, requests, passed)
