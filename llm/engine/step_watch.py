"""The decision that an engine hangs: its process is alive, it has work, and no step is made.

`StepWatch` is shown how far an engine is, several times a second, and says why it counts as hung
once it does. It has no clock and asks nobody: the acting part is `HangWatch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, runtime_checkable

FORGETTING: Final = 0.999
"""The part of the longest step of a size that is left of it with each later one, so that the first
step, which compiles, does not count for ever."""


class Turn(Enum):
    """The side that an engine's next step waits for."""

    IDLE = "idle"
    """Nobody's: it has no work."""
    HELD = "held"
    """Not the engine's: who hears of its steps has not heard of the last ones yet, or a step that
    was modelled is to take a while."""
    BUSY = "busy"
    """The engine's: a step runs, or is to begin."""


class StepProgress(NamedTuple):
    """The progress of an engine.

    Attributes:
        steps: that have ended.
        made: how many of them made something for a request.
        tokens: that its next step may compute, at most.
        fruitless: steps in a row that may make nothing for anybody: those of its longest prompt.
    """

    turn: Turn
    steps: int
    made: int
    tokens: int = 1
    fruitless: int = 1


@runtime_checkable
class WatchedStepper(Protocol):
    """A stepper that says how far its engine is."""

    def count_steps(self) -> tuple[Turn, int]:
        """The turn, and the number of steps that have ended; called from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class HangLimits:
    """The bounds of the longest legal step.

    Attributes:
        longest: seconds that it has at most, and before anything is learned; 0 for an engine that
            is not watched.
        least: seconds that it has at least.
        factor: how many times longer than the longest that were seen of its size it may be.
    """

    longest: float = 300.0
    least: float = 30.0
    factor: float = 10.0


class LearnedSteps:
    """The longest steps of an engine that were seen, by how many tokens they may have computed.

    A step with more tokens than any that was seen is taken for as much longer as it has more: one
    with few tokens has read all weights as well, so that this is plenty.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        # By the bits of their number of tokens.
        self._seconds: dict[int, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        """A step has taken so long."""
        size = tokens.bit_length()
        self._seconds[size] = max(seconds, self._seconds.get(size, 0.0) * FORGETTING)

    def limit(self, tokens: int) -> float:
        """Seconds of the longest legal step; no less with more tokens."""
        limits, size = self._limits, tokens.bit_length()
        smaller = [known for known in self._seconds if known <= size]
        larger = [known for known in self._seconds if known > size]
        bounds: list[float] = []
        if smaller:
            longest = max(self._seconds[known] for known in smaller)
            bounds.append(longest * 2.0 ** (size - max(smaller)))
        if larger:
            bounds.append(max(self._seconds[known] for known in (*smaller, min(larger))))
        seconds = min(bounds, default=limits.longest)
        return min(max(limits.factor * seconds, limits.least), limits.longest)


class StepWatch:
    """Decides whether an engine hangs.

    Time counts only as far as the watcher itself ran: of two looks that are further apart than
    they should be, `interval` counts. So neither a process that was stopped and goes on, nor a
    machine without a processor to spare makes a hang.

    Args:
        interval: seconds between two looks.

    Attributes:
        silence: seconds that count since a step ended for which the engine should have stepped.
        limit: seconds of its longest legal step now.
    """

    def __init__(self, limits: HangLimits, interval: float) -> None:
        self._interval = interval
        self._learned = LearnedSteps(limits)
        self._looked_at: float | None = None
        self._steps = self._made = self._tokens = 0
        self._without_result = 0.0
        self.silence = 0.0
        self.limit = limits.longest

    def look(self, now: float, progress: StepProgress) -> str:
        """Take in how far the engine is; why it counts as hung, empty while it does not.

        Args:
            now: seconds on a monotonic clock.
        """
        since = 0.0 if self._looked_at is None else now - self._looked_at
        seconds = min(max(since, 0.0), self._interval)
        self._looked_at = now
        ended, has_made = progress.steps - self._steps, progress.made != self._made
        self._steps, self._made = progress.steps, progress.made
        has_moved = ended > 0
        if has_moved:
            self._learned.note(self._tokens, (self.silence + seconds) / ended)
        if progress.turn is Turn.IDLE or has_moved:
            self.silence = 0.0
            self._tokens = progress.tokens
        elif progress.turn is Turn.BUSY:
            self.silence += seconds
            self._tokens = max(self._tokens, progress.tokens)
        if progress.turn is Turn.IDLE or has_made:
            self._without_result = 0.0
        elif progress.turn is Turn.BUSY or has_moved:
            self._without_result += seconds
        self.limit = self._learned.limit(self._tokens)
        if self.silence > self.limit:
            return (
                f"it has work and has ended no step for {self.silence:.1f} s; the longest legal "
                f"one takes {self.limit:.1f} s"
            )
        if self._without_result > self.limit * (1 + progress.fruitless):
            return (
                f"it has work and its steps have made nothing for {self._without_result:.1f} s: "
                "it schedules none of its requests"
            )
        return ""

    def acquit(self) -> None:
        """The engine does not hang after all: a step may take so long."""
        self._learned.note(self._tokens, self.silence)
        self.silence = self._without_result = 0.0


Progress = Callable[[], StepProgress]
"""The reading of how far an engine is; any thread may take it."""
