"""The steps of an engine elsewhere, told from when the tokens of its streams came.

A step's tokens come together, and a mock engine of the same limits says which these are: it has the
same scheduler. Where a machine is busy those of several steps come together: then only the time of
all of these is known. What the mock cannot know is before which step a request came there: a
request is taken in as soon as it was sent, and one step later where its first token came later than
that gives. The time of steps is that between their first token and the first one of those before:
what serving adds is the same in both.

Where two ways explain what came, as a prompt of just the tokens of a step that is computed in one
step or in two, the earlier one is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dynbus.llm.engine import EngineLimits
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.mock.timing import StepWork

from .bench import Measured, shadow_of

TRIES: Final = 8
"""The number of times that each request is taken in later, on average, at most."""
APART: Final = 0.0005
"""Seconds between two tokens that did not come together: those of one message are read in less."""


@dataclass(slots=True)
class ServedRequest:
    """A request that was answered, in seconds of one clock.

    Attributes:
        sent: when it was.
        tokens: when each token of its output came.
        is_over: whether its stream has ended.
    """

    request: GenerateRequest
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list[float])
    is_over: bool = False


@dataclass(slots=True)
class _Arrival:
    """Tokens that came together.

    Attributes:
        first, last: when the first and the last came.
        counts: how many of each request.
    """

    first: float
    last: float
    counts: Counter[int] = field(default_factory=Counter[int])


def steps_of(served: Sequence[ServedRequest], limits: EngineLimits) -> list[Measured]:
    """The steps that gave streams their tokens; none where the scheduler of `dynbus.llm.engine`
    takes no such steps.

    Args:
        served: in the order in which they were sent.
        limits: of the engine, which had nothing else to do, and no prefix of these prompts.
    """
    walk = _Walk(served, limits)
    for _ in range(TRIES * len(served)):
        measured, late = walk.steps()
        if not late:
            return measured
        walk.take_later(late)
    return []


def _arrivals(served: Sequence[ServedRequest]) -> list[_Arrival]:
    came = sorted((time, number) for number, one in enumerate(served) for time in one.tokens)
    arrivals: list[_Arrival] = []
    for time, number in came:
        if not arrivals or time - arrivals[-1].last > APART:
            arrivals.append(_Arrival(time, time))
        arrivals[-1].last = time
        arrivals[-1].counts[number] += 1
    return arrivals


class _Walk:
    """Steps mock engines beside tokens that came."""

    def __init__(self, served: Sequence[ServedRequest], limits: EngineLimits) -> None:
        self._served = served
        self._arrivals = _arrivals(served)
        # No prompt has the beginning of another.
        self._limits = replace(limits, has_events=False)
        # The step before which each request comes: the earliest possible, and as it was.
        self._earliest = [0] * len(served)
        self._taken = [0] * len(served)

    def take_later(self, requests: Collection[int]) -> None:
        """Take in requests one step later than in the last walk."""
        for number in requests:
            self._earliest[number] = self._taken[number] + 1

    def steps(self) -> tuple[list[Measured], Collection[int]]:
        """The steps, and the requests that cannot have been there as early as they were taken in;
        neither where the tokens came in another order than they can."""
        shadow, all_works = shadow_of(self._limits)
        measured: list[Measured] = []
        works: list[StepWork] = []
        taken, number = 0, 0
        since, is_answer = 0.0, True
        ended: float | None = None
        arrivals = iter(self._arrivals)
        for arrival in arrivals:
            left, last = arrival.counts.copy(), arrival.last
            while left:
                if not shadow.has_work:
                    if works or taken == len(self._served):
                        return [], ()
                    since, is_answer, ended = self._served[taken].sent, True, None
                    number = max(number, self._earliest[taken])
                # A step without tokens ended at some time before the next token.
                until = arrival.first if ended is None else ended
                while taken < len(self._served) and self._is_there(taken, number, until):
                    shadow.add(str(taken), self._served[taken].request)
                    self._taken[taken] = number
                    taken += 1
                outputs = {int(one.request_id): one.is_first for one in shadow.advance().outputs}
                number += 1
                works.append(all_works[-1])
                ended = None
                if works[-1] == StepWork():
                    return [], ()
                missing = [one for one in outputs if not left[one]]
                if late := [one for one in missing if outputs[one]]:
                    return [], late
                if missing:
                    # The reader was held up amid the tokens of a step.
                    more = next(arrivals, None)
                    if more is None or not all(more.counts[one] for one in missing):
                        return [], ()
                    left += more.counts
                    last = more.last
                left -= Counter(outputs.keys())
            measured.append(Measured(tuple(works), arrival.first - since, is_answer))
            works.clear()
            since, is_answer, ended = arrival.first, False, last
        return measured, ()

    def _is_there(self, request: int, step: int, until: float) -> bool:
        return self._earliest[request] <= step and self._served[request].sent <= until
