"""A plot of the times to the first token, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

import numpy as np
from numpy.typing import NDArray

WIDTH: Final = 760
HEIGHT: Final = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 40, 50
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf")
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
        return _LEFT + float(part) * (WIDTH - _LEFT - _RIGHT)

    def y(part: float) -> float:
        return HEIGHT - _BOTTOM - part * (HEIGHT - _TOP - _BOTTOM)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">Requests that have their first token</text>',
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        lines.append(_line(_LEFT, y(part), WIDTH - _RIGHT, y(part)))
        lines.append(_text(_LEFT - 8, y(part) + 4, f"{part:.0%}", "end"))
    for exponent in range(int(low), int(high) + 1):
        at = x(10.0**exponent)
        lines.append(_line(at, _TOP, at, HEIGHT - _BOTTOM))
        lines.append(_text(at, HEIGHT - _BOTTOM + 18, _duration(exponent), "middle"))
    for number, (policy, seconds) in enumerate(ttft.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        parts = np.linspace(0.0, 1.0, min(_POINTS, len(seconds)) + 1)
        quantiles = np.quantile(seconds, parts)
        points = " ".join(
            f"{x(float(value)):.1f},{y(float(part)):.1f}"
            for value, part in zip(quantiles, parts, strict=True)
        )
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        row = _TOP + 14 + 20 * number
        lines.append(
            f'<rect x="{WIDTH - _RIGHT + 14}" y="{row - 9}" width="12" height="4" fill="{colour}"/>'
        )
        lines.append(_text(WIDTH - _RIGHT + 32, row - 2, policy, "start"))
    return "\n".join((*lines, "</svg>", ""))


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _duration(exponent: int) -> str:
    return f"{10.0 ** (exponent + 3):g} ms" if exponent < 0 else f"{10**exponent} s"
