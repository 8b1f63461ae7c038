"""The judgement of a difference: which blocks are damaged, whose they are, and what is done."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Literal, NamedTuple

from .ledger import Source
from .noise import Bounds, Difference

Evidence = Literal["blocks", "logits", "checksum"]


class Compared(NamedTuple):
    """A request that was computed again.

    Attributes:
        blocks: of each block of its prompt the difference of what is cached; None for one that is
            not cached any more.
        logits: the difference of those from which its answer was drawn; 0 where they were not
            computed again.
    """

    blocks: Sequence[Difference | None]
    logits: float


class Judgement(NamedTuple):
    """A damage.

    Attributes:
        evidence: what differs.
        damaged: the places of the blocks in the prompt that are wrong, or are taken to be.
        blamed: their sources, the one of the first wrong block where that is known.
    """

    evidence: Evidence
    damaged: Sequence[int]
    blamed: Sequence[Source]


def judge(
    compared: Compared,
    bounds: Bounds,
    then: Sequence[Source | None],
    now: Sequence[Source],
) -> Judgement | None:
    """The damage that a comparison shows; None for noise.

    What follows a wrong block was computed from it and is wrong as well: its source is not to
    blame. Where no block differs and the answer does, what it was drawn from has gone meanwhile:
    every source that it had beside its own computation is taken to be one that lies.

    Args:
        then: the sources of the request's blocks when it was answered; None for those that it
            computed itself.
        now: the sources of the blocks that are compared.
    """
    damaged = [
        at for at, each in enumerate(compared.blocks) if each is not None and not bounds.allow(each)
    ]
    if damaged:
        return Judgement("blocks", damaged, (now[damaged[0]],))
    if compared.logits <= bounds.logits:
        return None
    used = [at for at, source in enumerate(then) if source is not None]
    sources = dict.fromkeys(source for source in then if source is not None)
    elsewhere = [source for source in sources if source.kind != "own"]
    return Judgement("logits", used, elsewhere or (Source("own"),))


Measure = Literal["none", "close_host", "leave_instance", "withdraw"]


class Suspects:
    """The sources that have lied, and are not used any more.

    Args:
        most_own: damages of blocks that this instance computed itself with which it goes on.

    Attributes:
        instances: ids of those from which nothing is taken; may be read in any thread.
        own: damages of blocks that this instance computed itself.
    """

    def __init__(self, most_own: int) -> None:
        self.instances: frozenset[str] = frozenset()
        self.own = 0
        self._most_own = most_own
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<Suspects [{len(self.instances)} instances, {self.own} of its own]>"

    def blame(self, source: Source) -> Measure:
        """The measure that follows from a damage of this source. Any thread may say so."""
        with self._lock:
            return self._blame(source)

    def _blame(self, source: Source) -> Measure:
        if source.kind == "host":
            return "close_host"
        if source.kind == "instance" and source.name:
            self.instances |= {source.name}
            return "leave_instance"
        self.own += 1
        return "withdraw" if self.own > self._most_own else "none"
