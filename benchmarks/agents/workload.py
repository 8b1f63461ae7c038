"""Conversations of agents, drawn by a seed: a prompt that grows with each turn, and pauses while a
tool works. Tokens are numbers that no two conversations share, but for the beginning of all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

TURNS: Final = 43
SHORTEST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 300.0


class Turn(NamedTuple):
    """What happens before a request.

    Attributes:
        pause: seconds since the answer before.
        added: tokens of the prompt after that answer.
        output: tokens of the answer to it.
    """

    pause: float
    added: list[int]
    output: int


@dataclass(frozen=True)
class Workload:
    """What all agents have in common.

    Attributes:
        longest: tokens of the last prompt of each.
        shared: tokens that all prompts begin with, such as what tools there are.
        vocabulary: token ids are below it.
        seed: the same one draws the same agents.
    """

    longest: int
    shared: int
    vocabulary: int
    turns: int = TURNS
    seed: int = 7

    def beginning(self) -> list[int]:
        """The tokens that all conversations begin with."""
        return _tokens(random.Random(self.seed), self.shared, self.vocabulary)

    def turns_of(self, agent: int) -> Iterator[Turn]:
        """The turns of an agent, the first one without a pause."""
        draw = random.Random(f"{self.seed} {agent}")
        # Results of tools differ by orders of magnitude: many short ones, a file now and then.
        weights = [draw.lognormvariate(0.0, 1.0) for _ in range(self.turns)]
        room = self.longest - self.shared
        for number, weight in enumerate(weights):
            size = max(2, int(room * weight / sum(weights)))
            # An answer is a tenth of what is added, up to some lines.
            output = min(max(1, size // 10), 100)
            pause = 0.0
            if number:
                pause = math.exp(draw.uniform(math.log(SHORTEST_PAUSE), math.log(LONGEST_PAUSE)))
            yield Turn(pause, _tokens(draw, size - output, self.vocabulary), output)

    def lone_prompt(self, number: int, tokens: int) -> list[int]:
        """The prompt of a request that nothing follows."""
        return _tokens(random.Random(f"{self.seed} lone {number}"), tokens, self.vocabulary)


def _tokens(draw: random.Random, count: int, vocabulary: int) -> list[int]:
    # The first ones of a vocabulary have meanings.
    return draw.choices(range(16, vocabulary), k=max(1, count))
