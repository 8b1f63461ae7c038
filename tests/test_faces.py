"""The faces: what examples and guides import is what programs may import, and is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

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
LAB = ("dynbus.llm.replay", "dynbus.kvrouter.stream.history")
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


def test_the_words_of_the_guides_name_no_module_but_faces() -> None:
    named = {
        f"{path.name} names {module}"
        for folder in ("guides", "tutorial")
        for path in (ROOT / "docs" / folder).glob("*.md")
        for module in re.findall(r"`(dynbus(?:\.\w+)+)`", path.read_text())
        if module not in (*FACES, *LAB) and is_module(module)
    }

    assert named == set()


def is_module(name: str) -> bool:
    """Whether a dotted name is a module, rather than a metric or a name of one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


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


PACKAGES = ("dynbus.kvrouter", "dynbus.llm", "dynbus.transfer")
MADE_BY_DYNBUS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "kvrouter.engine_events.bridge": "RankStream",
        "kvrouter.engine_events.messages": "EngineCleared EngineRemoved EngineStored Quarantined",
        "kvrouter.engine_events.status": "BridgeStatus",
        "kvrouter.events": "CacheDigest EventBatch",
        "kvrouter.radix.index": "Applied IndexStatistics RankState",
        "kvrouter.routing.queue": "Ticket",
        "kvrouter.routing.scheduler": "SchedulerStatistics",
        "kvrouter.routing.candidates": "Candidates",
        "kvrouter.stream.cache_mirror": "HeldBlock Stretch",
        "kvrouter.stream.loop_sink": "LoopSink",
        "kvrouter.stream.snapshot_writer": "Due",
        "kvrouter.stream.snapshots": "Coverage SnapshotInfo",
        "llm.calling.client": "ChatWishes CompletionWishes",
        "llm.calling.fake": "Kit",
        "llm.engine.interface": "CachedBlock",
        "llm.engine.runner": "EventSink",
        "llm.generation": "Announced Announcement",
        "llm.hand_over.messages": "LendRequest Lent Offer OfferAnswer PrefillRequest Prefilled",
        "llm.mock.engine": "MockEngine",
        "llm.models.catalog": "ServedModel",
        "llm.models.origins": "Progress",
        "llm.openai.typed": "EmbeddedTexts ToolCall",
        "llm.text.detokenizer": "Detokenizer",
        "llm.vllm.engine": "VllmEngine",
        "llm.vllm.handing_over": "HandOver HandedOver KvIdentity",
        "llm.vllm.worker": "Sleep WakeUp",
        "llm.weights.config": "ModelConfig",
        "llm.worker": "ModelEngineOptions",
        "transfer.links": "Link",
        "transfer.states": "State",
    }.items()
    for name in names.split()
)
"""Classes of signatures that nobody constructs and whose names nobody needs: what they have is used
where it comes from. Some are messages between instances."""


def classes_of(annotation: Any) -> Iterator[type]:
    """The classes of dynbus in an annotation."""
    if isinstance(annotation, type) and annotation.__module__.partition(".")[0] == "dynbus":
        yield annotation
    # The parameters of a `Callable` are a list.
    parts: Iterable[Any] = typing.get_args(annotation)
    if isinstance(annotation, list):
        parts = typing.cast("Iterable[Any]", annotation)
    for part in parts:
        yield from classes_of(part)


def functions_of(value: object) -> Iterator[Any]:
    """A function, or the public methods and properties of a class, inherited ones included."""
    if inspect.isfunction(value):
        yield value
    elif inspect.isclass(value):
        for base in value.__mro__:
            if base.__module__.partition(".")[0] == "dynbus":
                for name, member in vars(base).items():
                    found = getattr(member, "fget", None) or getattr(member, "__func__", member)
                    if not name.startswith("_") and inspect.isfunction(found):
                        yield found


def test_a_class_in_a_signature_of_a_face_is_on_a_face() -> None:
    faces = [importlib.import_module(name) for name in FACES]
    exported = {id(value_of(face, name)) for face in faces for name in face.__all__}

    missing = {
        f"{kind.__module__.removeprefix('dynbus.')}.{kind.__qualname__}"
        for package in PACKAGES
        for name in importlib.import_module(package).__all__
        for function in functions_of(value_of(importlib.import_module(package), name))
        for annotation in typing.get_type_hints(function).values()
        for kind in classes_of(annotation)
        if id(kind) not in exported and not kind.__name__.startswith("_")
    }

    assert missing - MADE_BY_DYNBUS == set()
    assert MADE_BY_DYNBUS - missing == set(), "these are exported, or in no signature any more"
