"""Local blocks that abandoned transfers may still write, and links that have to be destroyed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Abandoned(NamedTuple):
    link: str
    blocks: tuple[int, ...]
    since: float


class Quarantine:
    """Local blocks that are not used again before no transfer can write them any more.

    A transfer is known by a number that no other transfer of the process has. Links are known by
    names of the caller's, one for each agent object.
    """

    def __init__(self) -> None:
        self._abandoned: dict[int, _Abandoned] = {}
        self._uses: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<Quarantine [{len(self._abandoned)} transfers, {self.blocks_held} blocks]>"

    def __len__(self) -> int:
        return len(self._abandoned)

    @property
    def blocks_held(self) -> int:
        """The number of blocks that at least one abandoned transfer may still write."""
        return len(self._uses)

    def holds(self, block: int) -> bool:
        """True if an abandoned transfer may still write this block."""
        return block in self._uses

    def hold(self, transfer: int, link: str, blocks: Iterable[int], now: float) -> None:
        """Keep the blocks of a transfer that was abandoned now; doing so twice changes nothing."""
        if transfer in self._abandoned:
            return
        abandoned = _Abandoned(link, tuple(set(blocks)), now)
        self._abandoned[transfer] = abandoned
        self._uses.update(abandoned.blocks)

    def quiet(self, transfer: int) -> Sequence[int]:
        """Let a transfer go that writes nothing any more; returns the blocks that are free now.

        Blocks of another abandoned transfer stay. A transfer that is not in here has none.
        """
        abandoned = self._abandoned.pop(transfer, None)
        if abandoned is None:
            return ()
        free: list[int] = []
        for block in abandoned.blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                free.append(block)
        return free

    def destroyed(self, link: str) -> Sequence[int]:
        """Let all transfers of a link go whose agent was destroyed; returns what is free now."""
        of_link = [number for number, one in self._abandoned.items() if one.link == link]
        return [block for number in of_link for block in self.quiet(number)]

    def links_to_destroy(self, now: float, patience: float) -> Sequence[str]:
        """Links with a transfer that has not become quiet within `patience` seconds.

        Destroying a link is the only way to end it, and ends its other transfers too.
        """
        late = {one.link: None for one in self._abandoned.values() if now - one.since >= patience}
        return list(late)
