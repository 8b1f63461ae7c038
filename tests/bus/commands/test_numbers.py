"""Numbers that commands take are numbers."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from dynbus.bus.commands.terminal import terminal
from dynbus.cli import dynbus


@pytest.mark.parametrize("given", ["nan", "NaN", "-nan"])
def test_nan_is_no_number_in_a_range(given: str) -> None:
    @click.command()
    @click.option("--seconds", type=terminal.number(0.1, 60))
    def wait(seconds: float) -> None:
        raise AssertionError(seconds)

    result = CliRunner().invoke(wait, [f"--seconds={given}"])

    assert result.exit_code == 2
    assert f"Invalid value for '--seconds': '{given}' is no number" in result.output


@pytest.mark.parametrize(
    "command",
    [
        ("lab", "chaos", "--minutes=nan"),
        ("cancel", "some-id", "--wait=nan"),
        ("call", "demo.A.f", "--timeout=nan"),
        ("http", "--grace=nan"),
    ],
)
def test_a_command_refuses_a_number_that_is_none(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(dynbus, command)

    assert result.exit_code == 2
    assert "is no number" in result.output
