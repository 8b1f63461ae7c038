"""The fewest engines that keep targets on a trace, and how sure that is.

More engines are taken to be no worse, and as that is not so of every policy (round_robin divides
prefixes between more caches), some of the fewer ones that were left out are tried at the end. The
range has what follows from two things that are known: by
how much simulations with the profile missed the means of runs that were held out, as engines that
are faster or slower by that; and what the router leaves to chance, as other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from dynbus.llm.mock.profile import EngineProfile, OutsideProfile
from dynbus.llm.replay import Trace

from .configuration import Configuration, Engines
from .targets import Target, attained

LEFT_OUT: Final = 8
"""Numbers that the search left out are tried if they are so many at most, from half of the answer
on."""
LAST_LEFT_OUT: Final = 3
"""So many of them, the largest, if they are more."""


class Attempt(NamedTuple):
    """A number of engines that was simulated.

    Attributes:
        seconds: that each target attained; None where the profile says nothing of its steps.
    """

    engines: Engines
    seconds: tuple[float, ...] | None


class Plan(NamedTuple):
    """The engines that a configuration takes.

    Attributes:
        engines: the fewest that keep the targets; None where no number does that was allowed.
        least, most: the fewest if the profile errs as it did, for all seeds; `most` is None where
            no number that was allowed is enough then.
        seconds: that each target attains with these engines, or with the most that were tried.
        attempts: all numbers of those allowed that were simulated with the profile as it is, in
            order.
        why_none: the reason for None where it is the profile.
    """

    configuration: Configuration
    engines: Engines | None
    least: int | None
    most: int | None
    seconds: tuple[float, ...] | None
    attempts: list[Attempt]
    why_none: str = ""

    @property
    def total(self) -> int | None:
        """All engines together."""
        return None if self.engines is None else sum(self.engines)

    @property
    def cost(self) -> float | None:
        """Of all engines together."""
        return None if self.total is None else self.total * self.configuration.price


def fewest(is_enough: Callable[[int], bool], most: int, start: int = 1) -> int | None:
    """The least number from 1 to `most` that is enough; None where none is.

    Args:
        is_enough: true for all numbers from some number on; is asked about few.
        start: where to begin: the nearer, the fewer are asked about.
    """
    at = max(1, min(start, most))
    step = 1
    if is_enough(at):
        # What is enough, and what is not.
        enough, short = at, 0
        while short < enough - step and enough - step >= 1:
            if not is_enough(enough - step):
                short = enough - step
                break
            enough -= step
            step *= 2
    else:
        short, enough = at, 0
        while not enough:
            if short == most:
                return None
            tried = min(most, short + step)
            if is_enough(tried):
                enough = tried
            else:
                short = tried
                step *= 2
    while enough - short > 1:
        middle = (enough + short) // 2
        if is_enough(middle):
            enough = middle
        else:
            short = middle
    return enough


def speed_errors(profile: EngineProfile) -> tuple[float, float]:
    """The factors by which an engine may be faster and slower than its profile says: the largest
    errors of the means of the runs that were held out, both ways; 1 for none."""
    errors = [error for one in profile.held_out for error in (one.ttft_mean, one.tpot_mean)]
    # A simulation that says 10 % more than was measured is of an engine that is too slow.
    factors = [1.0, *(1.0 / (1.0 + error) for error in errors)]
    return min(factors), max(factors)


@dataclass(slots=True, eq=False)
class _Search:
    """Simulates numbers of engines, each once.

    Attributes:
        outside: the last reason for which the profile said nothing.
    """

    configuration: Configuration
    trace: Trace
    targets: Sequence[Target]
    speed: float
    allowed: int
    known: dict[tuple[Engines, int, float], tuple[float, ...] | None]
    progress: Callable[[], object]
    outside: str = ""

    def seconds(self, engines: Engines, seed: int, slower: float) -> tuple[float, ...] | None:
        key = (engines, seed, slower)
        if key not in self.known:
            try:
                result = self.configuration.run(
                    self.trace, engines, speed=self.speed, seed=seed, slower=slower
                )
                self.known[key] = attained(result, self.targets)
            except OutsideProfile as error:
                # Too few engines run fuller than any that was measured.
                self.outside = str(error)
                self.known[key] = None
            self.progress()
        return self.known[key]

    def keeps(self, engines: Engines, seed: int, slower: float) -> bool:
        """True if so many engines keep the targets."""
        seconds = self.seconds(engines, seed, slower)
        return seconds is not None and all(
            time <= target.seconds for time, target in zip(seconds, self.targets, strict=True)
        )

    def fewest(self, seed: int, slower: float, start: Engines) -> Engines | None:
        if self.configuration.bandwidth is None:
            number = fewest(
                lambda n: self.keeps(Engines(n), seed, slower), self.allowed, start.serving
            )
            return None if number is None else Engines(number)

        def is_enough(serving: int, decoding: int) -> bool:
            return self.keeps(Engines(serving, decoding), seed, slower)

        # Those that decode hold prompts back where they are too few: with plenty of them it is seen
        # how many have to compute prompts.
        plenty = self.allowed - 1
        first = fewest(lambda n: is_enough(n, plenty), plenty, start.serving)
        best: Engines | None = None
        least_decoding = 1
        for serving in range(first or self.allowed, self.allowed):
            room = (self.allowed if best is None else sum(best) - 1) - serving
            if room < least_decoding:
                break
            near = max(1, start.decoding) if serving == first else room
            decoding = fewest(partial(is_enough, serving), room, near)
            if decoding is None:
                continue
            if best is None and decoding > 1:
                # However early prompts are there, so many have to decode.
                many = serving + decoding - 1
                fewer = fewest(partial(is_enough, many), decoding, decoding)
                least_decoding = decoding if fewer is None else fewer
            best = Engines(serving, decoding)
        return best

    def fewer_left_out(self, engines: Engines) -> Engines:
        """The fewest of some numbers below these that keep the targets, though a search that takes
        more to be no worse left them out; `engines` where none does."""
        if self.configuration.bandwidth is not None:
            serving, decoding = engines
            for fewer in (Engines(serving - 1, decoding), Engines(serving, decoding - 1)):
                if min(fewer) and self.keeps(fewer, 0, 1.0):
                    return self.fewer_left_out(fewer)
            return engines
        numbers = [
            number
            for number in range(-(-engines.serving // 2), engines.serving)
            if (Engines(number), 0, 1.0) not in self.known
        ]
        if len(numbers) > LEFT_OUT:
            numbers = numbers[-LAST_LEFT_OUT:]
        return next((each for each in map(Engines, numbers) if self.keeps(each, 0, 1.0)), engines)


def make_plan(
    configuration: Configuration,
    trace: Trace,
    targets: Sequence[Target],
    *,
    speed: float = 1.0,
    allowed: int = 64,
    seeds: int = 2,
    progress: Callable[[], object] = lambda: None,
) -> Plan:
    """Search the fewest engines that keep the targets.

    Args:
        targets: one at least.
        speed: the trace passes so many times faster.
        allowed: engines at most; 2 or more where some compute prompts and others decode.
        seeds: how many seeds of the router are tried.
        progress: called after each simulation.

    Raises:
        ConfigError: there is no such policy.
        RequestTooLong: a request does not fit into an engine.
        ValueError: the blocks of the trace are not those of the engine, or it takes too long; or
            fewer engines are allowed than there have to be.
    """
    least = 1 if configuration.bandwidth is None else 2
    if allowed < least:
        raise ValueError(f"allowed = {allowed}: there are {least} engines at least: allow more")
    search = _Search(configuration, trace, targets, speed, allowed, {}, progress)
    engines = search.fewest(0, 1.0, Engines(1))
    if engines is None:
        last = max(search.known)
        seconds = search.known[last]
        why = search.outside if seconds is None else ""
        return Plan(configuration, None, None, None, seconds, _attempts(search), why)
    engines = search.fewer_left_out(engines)
    faster, slower = speed_errors(configuration.profile)
    least = most = sum(engines)
    is_bounded = True
    for seed in range(seeds):
        for factor in dict.fromkeys((faster, 1.0, slower)):
            other = search.fewest(seed, factor, engines)
            if other is None:
                is_bounded = False
                continue
            least, most = min(least, sum(other)), max(most, sum(other))
    return Plan(
        configuration,
        engines,
        least,
        most if is_bounded else None,
        search.seconds(engines, 0, 1.0),
        _attempts(search),
    )


def _attempts(search: _Search) -> list[Attempt]:
    return sorted(
        Attempt(engines, seconds)
        for (engines, seed, slower), seconds in search.known.items()
        if not seed and slower == 1.0 and sum(engines) <= search.allowed
    )
