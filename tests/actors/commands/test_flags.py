"""Options of commands that are made of a specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner, Result

from dynbus.actors.commands.flags import flags
from dynbus.actors.declaring.specification import Option, Options


@dataclass(frozen=True, kw_only=True)
class SorterOptions(Options):
    model: Annotated[str, Option("the model that it has, such as `a`")]
    kind: Annotated[Literal["fast", "slow"], Option("how it goes about it")] = "fast"
    size: Annotated[int, Option("how large it is", least=1, unit="tokens", flag="tokens")] = 16
    pause: Annotated[float, Option("how long it waits", above=0, unit="seconds")] = 1.5
    level: Annotated[int | None, Option("how far it goes", least=0)] = None
    is_open: Annotated[bool, Option("whether all may come in")] = False
    file: Annotated[Path | None, Option("where its keys are")] = None
    names: Annotated[Sequence[str], Option("what it is called", flag="name")] = ()


def call(*words: str, only: Sequence[str] = ()) -> tuple[Result, dict[str, Any]]:
    """A command with these options, and what it got."""
    got: dict[str, Any] = {}

    @click.command
    @flags(SorterOptions, only)
    def command(**given: Any) -> None:
        got.update(given)

    return CliRunner().invoke(command, words), got


def test_a_command_gets_each_field_by_its_name() -> None:
    words = "--model a --kind slow --tokens 4 --pause 2 --level 0 --is-open --name x --name y"

    _, got = call(*words.split(), "--file", __file__)

    assert SorterOptions(**got) == SorterOptions(
        model="a",
        kind="slow",
        size=4,
        pause=2.0,
        level=0,
        is_open=True,
        file=Path(__file__),
        names=("x", "y"),
    )


def test_what_is_not_given_has_its_default() -> None:
    _, got = call("--model", "a")

    assert SorterOptions(**got) == SorterOptions(model="a")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "Missing option '--model'"),
        ("--tokens 0", "0 is not in the range x>=1"),
        ("--pause 0", "0.0 is not in the range x>0"),
        ("--pause nan", "'nan' is no number"),
        ("--kind fats", "'fats' is not one of 'fast', 'slow'"),
        ("--file nosuch", "File 'nosuch' does not exist"),
    ],
)
def test_a_value_that_makes_no_sense_is_wrong_usage(words: str, told: str) -> None:
    result, _ = call(*words.split())

    assert (result.exit_code, told in result.output) == (2, True), result.output


def test_the_help_says_what_each_is_and_its_default() -> None:
    result, _ = call("--help")

    text = " ".join(result.output.split())
    assert "--model TEXT The model that it has, such as a." in text
    assert "--tokens TOKENS How large it is. [default: 16; x>=1]" in text
    assert "--name TEXT What it is called. Repeatable." in text
    assert "--level INTEGER RANGE How far it goes. [x>=0]" in text


def test_a_command_may_have_some_of_the_options() -> None:
    _, got = call("--tokens", "4", only=("size", "pause"))

    assert got == {"size": 4, "pause": 1.5}
