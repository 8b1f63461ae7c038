"""A plot of what numbers of engines attain, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from dynbus.llm.replay.plot import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    grid_line,
    head_of,
    label,
    legend,
)

LEAST: Final = 0.1
MOST: Final = 10.0
"""The parts of a limit between which times are shown; what is beyond is shown at the border."""


def plot_engines(attained: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """An SVG image: by the number of engines, the worst target as a part of its limit.

    Args:
        attained: by the name of each configuration, the numbers of engines that were simulated, and
            the largest of the times by their limits; at least one in all.
    """
    numbers = sorted({number for points in attained.values() for number, _ in points})
    low, high = numbers[0], max(numbers[-1], numbers[0] + 1)

    def x(number: float) -> float:
        return LEFT + (number - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(part: float) -> float:
        shown = min(MOST, max(LEAST, part))
        place = float(np.log10(shown / LEAST) / np.log10(MOST / LEAST))
        return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)

    lines = head_of("Engines, and the worst target as a part of its limit")
    for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0):
        lines.append(grid_line(LEFT, y(part), WIDTH - RIGHT, y(part)))
        lines.append(label(LEFT - 8, y(part) + 4, f"{part:g}", "end"))
    step = max(1, (high - low) // 12)
    for number in range(low, high + 1, step):
        lines.append(label(x(number), HEIGHT - BOTTOM + 18, f"{number}", "middle"))
    lines.append(
        f'<line x1="{LEFT}" y1="{y(1.0):.1f}" x2="{WIDTH - RIGHT}" y2="{y(1.0):.1f}" '
        'stroke="#333333" stroke-dasharray="4 3"/>'
    )
    for at, (name, points) in enumerate(attained.items()):
        colour = COLOURS[at % len(COLOURS)]
        places = [(x(number), y(part)) for number, part in sorted(points)]
        drawn = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
        lines.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines += [
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="{colour}"/>'
            for left, top in places
        ]
        lines += legend(at, name, colour)
    return "\n".join((*lines, "</svg>", ""))
