"""Numbers as people read them in a narrow place."""

from __future__ import annotations


def brief(value: float | None) -> str:
    """A number in five letters or so: `12`, `1.2`, `34.5k`; `-` for none."""
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def brief_seconds(value: float | None) -> str:
    """A duration: `21 ms`, `1.3 s`; `-` for none."""
    if value is None:
        return "-"
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def percent(value: float | None) -> str:
    """A part of one as `74 %`; `-` for none."""
    return "-" if value is None else f"{value:.0%}".replace("%", " %")
