"""Numbers that commands take."""

from __future__ import annotations

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """click's range without `nan`, which click takes for a number in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number
