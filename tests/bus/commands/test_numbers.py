"""Numbers that commands take are numbers."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from dynbus.bus.commands.terminal import terminal


@pytest.mark.parametrize("given", ["nan", "NaN", "-nan"])
def test_nan_is_no_number_in_a_range(given: str) -> None:
    @click.command()
    @click.option("--seconds", type=terminal.number(0.1, 60))
    def wait(seconds: float) -> None:
        raise AssertionError(seconds)

    result = CliRunner().invoke(wait, [f"--seconds={given}"])

    assert result.exit_code == 2
    assert f"Invalid value for '--seconds': '{given}' is no number" in result.output
