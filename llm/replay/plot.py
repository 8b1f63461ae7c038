"""Plots as SVG: the frame of all, and that of the times to the first token."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

import numpy as np
from numpy.typing import NDArray

WIDTH: Final = 760
HEIGHT: Final = 420
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 50
COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
_POINTS: Final = 200


def plot_ttft(ttft: Mapping[str, NDArray[np.float64]]) -> str:
    """An SVG image: for each policy, which part of the requests has its first token by when.

    Args:
        ttft: seconds to the first token, by policy; each of shape [requests], not empty.
    """
    every = np.concatenate(list(ttft.values()))
    low = np.floor(np.log10(max(float(every.min()), 1e-4)))
    high = max(np.ceil(np.log10(max(float(every.max()), 1e-4))), low + 1)

    def x(seconds: float) -> float:
        part = (np.log10(max(seconds, 1e-4)) - low) / (high - low)
        return LEFT + float(part) * (WIDTH - LEFT - RIGHT)

    def y(part: float) -> float:
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    lines = head_of("Requests that have their first token")
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        lines.append(grid_line(LEFT, y(part), WIDTH - RIGHT, y(part)))
        lines.append(label(LEFT - 8, y(part) + 4, f"{part:.0%}", "end"))
    for exponent in range(int(low), int(high) + 1):
        at = x(10.0**exponent)
        lines.append(grid_line(at, TOP, at, HEIGHT - BOTTOM))
        lines.append(label(at, HEIGHT - BOTTOM + 18, _duration(exponent), "middle"))
    for number, (policy, seconds) in enumerate(ttft.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts = np.linspace(0.0, 1.0, min(_POINTS, len(seconds)) + 1)
        quantiles = np.quantile(seconds, parts)
        points = " ".join(
            f"{x(float(value)):.1f},{y(float(part)):.1f}"
            for value, part in zip(quantiles, parts, strict=True)
        )
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        lines += legend(number, policy, colour)
    return "\n".join((*lines, "</svg>", ""))


def head_of(title: str) -> list[str]:
    """The beginning of an image of this size, with its title."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]


def legend(number: int, name: str, colour: str) -> list[str]:
    """A row of the legend, beside the plot."""
    row = TOP + 14 + 20 * number
    return [
        f'<rect x="{WIDTH - RIGHT + 14}" y="{row - 9}" width="12" height="4" fill="{colour}"/>',
        label(WIDTH - RIGHT + 32, row - 2, name, "start"),
    ]


def grid_line(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line of the grid."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def label(x: float, y: float, text: str, anchor: str) -> str:
    """A text at a place, which is its `start`, `middle` or `end`."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _duration(exponent: int) -> str:
    return f"{10.0 ** (exponent + 3):g} ms" if exponent < 0 else f"{10**exponent} s"
