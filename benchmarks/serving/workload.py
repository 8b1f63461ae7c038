"""Requests that share prefixes, as those of assistants with a few long instructions do."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec

from .model import words


class Request(NamedTuple):
    """One request.

    Attributes:
        at: seconds after the first one could have come.
        shared: what its conversation begins with, as others do.
    """

    at: float
    shared: str
    own: str
    max_tokens: int


class Workload(msgspec.Struct, frozen=True):
    """Conversations that begin with one of some prefixes, all as likely, and come by chance.

    Attributes:
        prefixes: how many.
        prefix_tokens, own_tokens: of a prompt: shared, and its own.
        rate: requests per second.
        seconds: for which they arrive.
    """

    prefixes: int = 32
    prefix_tokens: int = 8192
    own_tokens: int = 64
    max_tokens: int = 16
    rate: float = 12.0
    seconds: float = 40.0
    seed: int = 20

    def requests(self) -> list[Request]:
        """All of them, in the order of their arrival; the same for a seed."""
        chance = random.Random(self.seed)
        prefixes = [words(self.prefix_tokens, self.seed * 1000 + n) for n in range(self.prefixes)]
        made: list[Request] = []
        at = 0.0
        while (at := at + chance.expovariate(self.rate)) < self.seconds or not made:
            own = words(self.own_tokens, self.seed * 1_000_000 + len(made))
            made.append(Request(at, chance.choice(prefixes), own, self.max_tokens))
        return made
