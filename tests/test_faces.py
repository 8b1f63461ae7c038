"""The faces: what examples and guides import is what programs may import, and is there."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.test_docs import BLOCKS

import dynbus
from dynbus.bus.errors import ERRORS

ROOT = Path(__file__).parents[1]
FACES = (
    "dynbus",
    "dynbus.kvrouter",
    "dynbus.llm",
    "dynbus.spi",
    "dynbus.testing",
    "dynbus.transfer",
)
LAB = ("dynbus.llm.replay",)
"""What experiments are made with, which no service needs."""
PROGRAMS = sorted(
    path
    for folder in ("examples", "tests/examples")
    for path in (ROOT / folder).rglob("*.py")
    if ".dynbus" not in path.parts
)


def modules_of(program: str) -> Iterator[str]:
    """The modules of dynbus that a program imports."""
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] == "dynbus")


def names_of(program: str, face: str) -> Iterator[str]:
    """The names that a program, or a part of one, takes from a face."""
    try:
        parsed = ast.parse(program)
    except SyntaxError:
        return
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and node.module == face:
            yield from (alias.name for alias in node.names)


def value_of(face: ModuleType, name: str) -> object:
    """What a face lists, imported where it is a module that nobody has asked for yet."""
    if hasattr(face, name):
        return getattr(face, name)
    return importlib.import_module(f"{face.__name__}.{name}")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_example_imports_faces_only(path: Path) -> None:
    assert set(modules_of(path.read_text())) <= set(FACES)


def test_the_guides_import_faces_only() -> None:
    taken = {
        f"{block.document}:{block.line} imports {module}"
        for block in BLOCKS
        if block.language == "python" and block.document.startswith("docs/guides/")
        for module in modules_of(block.text)
        if module not in (*FACES, *LAB)
    }

    assert taken == set()


def test_what_dynbus_exports_is_what_programs_are_written_with() -> None:
    programs = [block.text for block in BLOCKS if block.language == "python"]
    programs += [path.read_text() for path in PROGRAMS]
    programs += [path.read_text() for path in (ROOT / "tests" / "typing").glob("*.py")]
    taken = {name for program in programs for name in names_of(program, "dynbus")}

    # What packages alone need is in `dynbus.spi`. Errors are for whoever may meet them.
    assert set(dynbus.__all__) - taken - set(ERRORS) == set()


@pytest.mark.parametrize("name", FACES)
def test_what_a_face_lists_is_there_and_documented(name: str) -> None:
    face = importlib.import_module(name)
    values = {each: value_of(face, each) for each in face.__all__}

    assert [
        each
        for each, value in values.items()
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
        if not (value.__doc__ or "").strip()
    ] == []


@pytest.mark.timeout(300)
def test_the_reference_is_made_of_the_faces_without_a_warning(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts" / "reference", tmp_path],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src")},
        check=True,
    )

    for name in FACES:
        page = (tmp_path / name.replace(".", "/")).with_suffix(".html").read_text()
        face = importlib.import_module(name)
        # Modules have pages of their own.
        listed = [each for each in face.__all__ if not inspect.ismodule(value_of(face, each))]
        assert [each for each in listed if f'id="{each}"' not in page] == []


@pytest.mark.parametrize(
    ("name", "unwanted"),
    [
        ("GenerateRequest", ["numpy", "starlette", "tokenizers", "uvicorn", "dynbus.actors"]),
        ("MockWorker", ["starlette", "tokenizers", "uvicorn", "httptools", "torch"]),
        ("Frontend", ["torch", "dynbus.llm.engine.worker", "dynbus.llm.vllm.worker"]),
    ],
)
def test_a_name_brings_no_more_than_it_needs(name: str, unwanted: list[str]) -> None:
    program = (
        f"import sys; from dynbus.llm import {name}; "
        f"print([each for each in {unwanted!r} if each in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == "[]\n"
