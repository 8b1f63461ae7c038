"""`dynbus lab bench` prints the figures that were measured, and says why it cannot measure.

The figures themselves come from real processes: `tests/scenarios/test_command_line.py`.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from tests.story import on_a_kit

from dynbus.actors.commands.lab import bench as benchmarking
from dynbus.actors.commands.lab.bench import FIGURES, Echo, Token, bench, measure
from dynbus.bus.errors import ConfigError
from dynbus.testing import TestKit

TOKEN = Token(token_ids=[7], text="tok", index=0)
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


def test_every_figure_has_a_name_and_a_text_of_its_own() -> None:
    names, texts, units = zip(*FIGURES, strict=True)

    assert len(set(names)) == len(set(texts)) == len(FIGURES)
    assert set(units) == {"us", "1/s"}


def test_a_server_that_is_none_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match="write NATS URLs"):
        measure("bla", 0.1)


def test_a_token_comes_back_as_it_was() -> None:
    async def story(kit: TestKit) -> Token:
        await kit.start(Echo)
        return await kit.client(Echo).echo(TOKEN)

    assert on_a_kit(story) == TOKEN


def test_a_stream_has_as_many_tokens_as_were_asked_for() -> None:
    async def story(kit: TestKit) -> list[Token]:
        await kit.start(Echo)
        return [token async for token in kit.client(Echo).count(3)]

    assert [token.index for token in on_a_kit(story)] == [0, 1, 2]
