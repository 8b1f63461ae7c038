"""The figures of several rounds of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles


class Rounds:
    """The figures of rounds, by name."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Take in the figures of a round."""
        for name, value in figures.items():
            self._rows.setdefault(name, []).append(value)

    def print(self) -> None:
        """Print a line for each figure, with its median."""
        for name, values in self._rows.items():
            each = " ".join(f"{value:9.2f}" for value in values)
            print(f"{name:28} {each}   median {median(values):.2f}")


def p99(values: Sequence[float]) -> float:
    """The value that one in a hundred exceeds."""
    return quantiles(values, n=100)[98]
