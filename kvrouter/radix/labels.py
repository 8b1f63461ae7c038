"""Look-ups of prefixes by the labels of their holders; answers are remembered until a run
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from .prefix_tree import PrefixTree
from .runs import Run

Label = TypeVar("Label")
Value = TypeVar("Value")

MANY: Final = 8
"""From so many holders of a run on, what is said of it is worth remembering."""
REMEMBERED: Final = 1024
"""Runs for which that is remembered at most."""


class LabelledHolders(Generic[Label, Value]):
    """The form of a look-up's answers.

    Args:
        labels: by the number of a holder; those without one are left out.
        values: what to say of a number of blocks.
    """

    def __init__(self, labels: dict[int, Label], values: Callable[[int], Value]) -> None:
        self._labels = labels
        self._values = values
        self._remembered: dict[int, tuple[int, dict[Label, Value]]] = {}

    def find(self, tree: PrefixTree, blocks: bytes) -> dict[Label, Value]:
        """The number of these blocks that each holder has from the first on, for those that have
        any.

        Args:
            blocks: block hashes, little-endian, 8 bytes each.
        """
        path, end = tree.descend(blocks)
        answer: dict[Label, Value] = {}
        labels, values = self._labels, self._values
        for run in path:
            if len(run.ends) >= MANY and run.end <= end:
                answer.update(self._of_whole(run))
                continue
            for number, held in run.ends.items():
                if number in labels:
                    answer[labels[number]] = values(min(held, end))
        return answer

    def _of_whole(self, run: Run) -> dict[Label, Value]:
        """The values of a run by label, remembered as long as nothing changes there."""
        known = self._remembered.get(run.id)
        if known is not None and known[0] == run.stamp:
            return known[1]
        labels, values = self._labels, self._values
        answer = {labels[one]: values(held) for one, held in run.ends.items() if one in labels}
        if len(self._remembered) >= REMEMBERED:
            self._remembered.clear()
        self._remembered[run.id] = (run.stamp, answer)
        return answer

    def forget(self) -> None:
        """Remember nothing: an answer may name who is gone."""
        self._remembered.clear()
