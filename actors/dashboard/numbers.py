"""Numbers as people read them in a narrow place."""

from __future__ import annotations


def brief(value: float | None) -> str:
    """A number in five letters or so: `12`, `1.2`, `34.5k`; `-` for none."""
    if value is None:
        return "-"
    # What three digits round up to the next unit is of that.
    for least, size, unit in ((999.5e6, 1e9, "G"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.2g}"


def brief_seconds(value: float | None) -> str:
    """A duration: `21 ms`, `1.3 s`, `20 min`; `-` for none."""
    if value is None:
        return "-"
    if value < 0.9995:
        return f"{1000 * value:.3g} ms"
    if value < 999.5:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def percent(value: float | None) -> str:
    """A part of one as `74 %`; `-` for none."""
    return "-" if value is None else f"{value:.0%}".replace("%", " %")
