"""The words of the source: subjects that a search finds, and names that say what they hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("actors", "bus", "kvrouter", "llm", "transfer", "src")
QUESTION = re.compile(
    r"\W*(?:what|how|which|why|when|where|who|whom|whose|whether)(?:ever|soever)?\b", re.IGNORECASE
)
"""The beginning of a docstring that says nothing to search for."""

VAGUE: Mapping[str, str] = {
    "told": "the report, the message, or the state that it is",
    "found": "the thing that was looked for",
}
"""Names that hold anything, each with what to name in its place."""


def sources(pattern: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """The paths and texts of the source files in which a pattern occurs."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            if pattern.search(text):
                yield str(path.relative_to(ROOT)), text


def _stores(name: str) -> re.Pattern[str]:
    """A quick search for files that may give a name, of which the syntax tree tells for certain."""
    return re.compile(
        rf"\b_*{name}_*\s*(?:[-+|&]?=|[:,)\]]|in\b)|\b(?:def|class|as)\s+_*{name}_*\b"
    )


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, its classes, functions, constants and attributes, with lines."""
    holders: list[ast.AST] = [tree]
    while holders:
        holder = holders.pop()
        for node in getattr(holder, "body", ()):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield node.lineno, text
                case ast.stmt():
                    holders.append(node)
                    holders.extend(getattr(node, "handlers", ()))
                case _:
                    pass
        for branch in ("orelse", "finalbody"):
            holders.extend(getattr(holder, branch, ()))


def stored_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The names that a module gives to variables, parameters, attributes, functions and classes.

    Not those of a class's fields, which stand on the wire or in an interface.
    """
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case (
                ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                yield node.lineno, name
            case _:
                pass
        waiting.extend(
            child
            for child in ast.iter_child_nodes(node)
            if not (isinstance(node, ast.ClassDef) and isinstance(child, ast.AnnAssign))
        )


def test_a_docstring_begins_with_its_subject_and_not_with_a_question_word() -> None:
    asking = [
        f"{path}:{line}: {docstring.splitlines()[0]}"
        for path, text in sources(re.compile(rf'"""{QUESTION.pattern}', re.IGNORECASE))
        for line, docstring in docstrings(ast.parse(text))
        if QUESTION.match(docstring)
    ]

    assert not asking, (
        'begin with a noun phrase ("The load of ..."), an imperative ("Return ...") or, where it '
        'is a bool, "True if ...":\n' + "\n".join(asking)
    )


@pytest.mark.parametrize("vague", VAGUE)
def test_a_name_says_what_it_holds(vague: str) -> None:
    places = [
        f"{path}:{line}"
        for path, text in sources(_stores(vague))
        for line, name in stored_names(ast.parse(text))
        if name.strip("_") == vague
    ]

    assert not places, f"in place of {vague!r} name {VAGUE[vague]}:\n" + "\n".join(places)


def test_nobody_is_called_whoever() -> None:
    whoever = re.compile(r"\bwho(?:m|so)?ever\b", re.IGNORECASE)
    places = [
        f"{path}:{number}"
        for path, text in sources(whoever)
        for number, line in enumerate(text.splitlines(), 1)
        if whoever.search(line)
    ]

    assert not places, 'say who it is ("the caller", "a reader"):\n' + "\n".join(places)
