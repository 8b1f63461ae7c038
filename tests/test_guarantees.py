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


Function = ast.FunctionDef | ast.AsyncFunctionDef
PROOF = re.compile(r"tests/[\w/]+\.py::test_\w+")


def _marks(test: Function) -> list[str]:
    """The marks of a whole test: one of a parameter leaves the others."""
    marks = [ast.unparse(each) for each in test.decorator_list]
    return [mark for mark in marks if not mark.startswith("pytest.mark.parametrize")]


@cache
def pushed_tests(name: str) -> frozenset[str]:
    """The tests of a file of which something runs at every push."""
    tree = ast.parse((ROOT / name).read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and not re.search(r"mark\.(nightly|soak)\b", " ".join(_marks(node)))
    )


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
        whole + _marks(node)
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.name.startswith("test_")
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


def nightly_marks() -> list[tuple[str, str]]:
    """Each mark of a story that runs nightly, with its file."""
    marks: list[tuple[str, str]] = []
    for path in sorted((ROOT / "tests" / "scenarios").glob("test_*.py")):
        tree = ast.parse(path.read_text())
        # Of a mark with arguments the call counts, not the attribute that it calls.
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        marks += [
            (path.name, ast.unparse(node))
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute | ast.Call) and id(node) not in called
            if re.match(r"pytest\.mark\.nightly\b", ast.unparse(node))
        ]
    return marks


def test_a_story_that_runs_nightly_names_what_proves_its_promise_at_every_push() -> None:
    marks = nightly_marks()

    unproved = {
        f"{file}: {mark}"
        for file, mark in marks
        if not (proofs := PROOF.findall(mark))
        or not all(
            test in pushed_tests(name) for name, test in (proof.split("::") for proof in proofs)
        )
    }
    assert len(marks) > 50
    assert unproved == set()
