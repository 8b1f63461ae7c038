"""The page of guarantees, and what it says of the tests that it names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
ROWS: dict[str, list[tuple[str, str, str]]] = {
    found[1]: re.findall(
        r"(?:(soak|nightly) )?`(tests/[^`]+\.py)`(?: \((nightly too)\))?", found[2]
    )
    for found in re.finditer(r"^\| (\d+\w*) \| .* \| (.*) \| .*? ?\|$", PAGE, re.MULTILINE)
}


@cache
def has_tests_of_every_push(path: Path) -> bool:
    """Whether a file has a test that is marked neither `nightly` nor `soak`."""
    tree = ast.parse(path.read_text())
    whole = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    marks = [
        # A mark of one parameter leaves the others.
        whole
        + [ast.unparse(mark) for mark in node.decorator_list if isinstance(mark, ast.Attribute)]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]
    return any(not re.search(r"mark\.(nightly|soak)\b", " ".join(one)) for one in marks) or (
        not marks  # a state machine of Hypothesis
    )


def test_the_rows_are_read() -> None:
    named = {path for row in ROWS.values() for _, path, _ in row}

    assert len(ROWS) > 50
    assert "tests/bus/test_liveness.py" in named


@pytest.mark.parametrize("number", ROWS)
def test_a_guarantee_says_which_of_its_tests_do_not_run_at_every_push(number: str) -> None:
    for word, name, more in ROWS[number]:
        text = (ROOT / name).read_text()
        assert word or has_tests_of_every_push(ROOT / name), f"say when {name} runs"
        assert not word or f"pytest.mark.{word}" in text, f"{name} has no test marked {word}"
        is_told = more == "nightly too" or word == "nightly"
        assert is_told or word or "pytest.mark.nightly" not in text, f"{name} (nightly too)"


@pytest.mark.parametrize("number", [number for number, row in ROWS.items() if row])
def test_a_guarantee_is_proved_at_every_push(number: str) -> None:
    assert "" in {word for word, _, _ in ROWS[number]}
