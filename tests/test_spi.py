"""The contract of the kernel: `dynbus.spi`."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from pathlib import Path

import pytest

import dynbus
import dynbus.spi

CONTRACT = Path(__file__).parents[1] / "docs" / "spi.md"


def places() -> dict[str, str]:
    """Where each name lives, as type checkers are told."""
    return {
        alias.name: node.module or ""
        for node in ast.walk(ast.parse(inspect.getsource(dynbus.spi)))
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
    }


def test_what_type_checkers_see_is_what_is_listed() -> None:
    assert sorted(places()) == sorted(dynbus.spi.__all__)


@pytest.mark.parametrize("name", dynbus.spi.__all__)
def test_a_name_is_what_type_checkers_take_it_for(name: str) -> None:
    assert getattr(dynbus.spi, name) is getattr(importlib.import_module(places()[name]), name)


CELLS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in CONTRACT.read_text().splitlines()
    if line.startswith("| ")
]
ROWS = [
    (cells[0].strip("`"), *cells[1:]) for cells in CELLS if len(cells) == 4 and cells[0] != "name"
]
WORDS = {cells[0] for cells in CELLS if len(cells) == 2} - {"word"}


def promise_of(name: str) -> str:
    """The first sentence of what a name says of itself."""
    told = inspect.getdoc(getattr(dynbus.spi, name)) or ""
    return re.split(r"\.(?:\s|$)", " ".join(told.split()), maxsplit=1)[0]


def test_the_contract_has_every_name_once() -> None:
    assert sorted(name for name, *_ in ROWS) == sorted(dynbus.spi.__all__)


@pytest.mark.parametrize(("name", "promise"), [row[:2] for row in ROWS])
def test_a_promise_is_what_the_docstring_says(name: str, promise: str) -> None:
    named = getattr(dynbus.spi, name)
    if not (inspect.isclass(named) or inspect.isfunction(named)):
        pytest.skip("a value has no docstring of its own")

    assert promise == promise_of(name)


@pytest.mark.parametrize(("name", "errors"), [(row[0], row[2]) for row in ROWS])
def test_the_errors_of_a_promise_are_in_the_faces(name: str, errors: str) -> None:
    raised = re.findall(r"`([A-Z]\w+)`", errors)

    faces = {**vars(builtins), **{each: 1 for each in (*dynbus.__all__, *dynbus.spi.__all__)}}
    assert [each for each in raised if each not in faces] == []


@pytest.mark.parametrize(("name", "places"), [(row[0], row[3]) for row in ROWS])
def test_where_a_name_may_be_used_is_said_in_words_that_are_explained(
    name: str, places: str
) -> None:
    said = [re.sub(r"`\w+` ", "", each) for each in places.split("; ")]

    assert [each for each in said if each not in WORDS] == []
