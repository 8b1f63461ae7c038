"""`dynbus bench` prints the figures that were measured, for people and for programs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dynbus.actors.commands import benchmarking
from dynbus.actors.commands.bench import bench
from dynbus.actors.commands.benchmarking import FIGURES

MEASURED = {name: 1234.56 + number for number, (name, _, _) in enumerate(FIGURES)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, float]]:
    """What would have been measured."""
    seen: list[tuple[str | None, float]] = []

    def measure(url: str | None, duration: float) -> dict[str, float]:
        seen.append((url, duration))
        return MEASURED

    monkeypatch.setattr(benchmarking, "measure", measure)
    return seen


def test_figures_for_people_have_a_unit(asked: list[tuple[str | None, float]]) -> None:
    result = CliRunner().invoke(bench, [])

    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert lines[:2] == ["FIGURE VALUE UNIT", "round trip to the server, median 1,235 us"]
    assert len(lines) == 1 + len(FIGURES)
    assert asked == [(None, 2.0)]


def test_figures_for_programs_have_a_name(asked: list[tuple[str | None, float]]) -> None:
    result = CliRunner().invoke(bench, ["--json", "--duration", "5", "--nats", "nats://h:1"])

    assert json.loads(result.output) == {name: round(v, 1) for name, v in MEASURED.items()}
    assert asked == [("nats://h:1", 5.0)]


def test_a_duration_without_end_is_refused(asked: list[tuple[str | None, float]]) -> None:
    result = CliRunner().invoke(bench, ["--duration", "0"])

    assert (result.exit_code, asked) == (2, [])
    assert "--duration" in result.output
