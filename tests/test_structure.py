"""The house: no import circles, small folders, public names between folders, and subjects told.

Imports are read from the source, wherever they stand: at the top, in a function, or for types only.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    **{name: ROOT / name for name in ("actors", "bus", "kvrouter", "llm", "transfer")},
    "compat": ROOT / "src" / "dynbus" / "compat",
}
MAX_FILES = 20
MAX_FACE = 63
MAX_SPI = 60
QUESTIONS = tuple(
    f"{word} " for word in ("What", "How", "Which", "Whether", "Who", "Where", "When")
)
KERNEL = ("actors", "bus")
FACES = ("dynbus", "dynbus.spi", "dynbus.kvrouter", "dynbus.transfer", "dynbus.llm")
"""What packages above the kernel may take, beside what is their own."""


class Import(NamedTuple):
    """One name that a module takes from another: `from module import name`."""

    by: str
    module: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.by}:{self.line} takes {self.name or 'all'} from {self.module}"


def source_files() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "src" / "dynbus").glob("*.py")):
        yield _module_name(("dynbus", path.stem)), path
    for name, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield _module_name(("dynbus", name, *parts)), path


def _module_name(parts: tuple[str, ...]) -> str:
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> Mapping[str, tuple[ast.Module, bool]]:
    """The syntax tree of each module, and whether it is a package."""
    return {
        name: (ast.parse(path.read_text()), path.name == "__init__.py")
        for name, path in source_files()
    }


def imports_of(by: str) -> Iterator[Import]:
    tree, is_package = trees()[by]
    package = by if is_package else by.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in trees():
                    yield Import(by, alias.name, "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*above, module] if module else above)
            for alias in node.names:
                if f"{module}.{alias.name}" in trees():
                    yield Import(by, f"{module}.{alias.name}", "", node.lineno)
                elif module in trees():
                    yield Import(by, module, alias.name, node.lineno)


def public_names(module: str) -> set[str] | None:
    """What a module lists in `__all__`; None for one that lists nothing."""
    for node in trees()[module][0].body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return set(ast.literal_eval(node.value))
    return None


def folder_of(module: str) -> str:
    """The folder at the top that a module lives in; `dynbus` for those above all folders."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "dynbus"


def is_public(module: str) -> bool:
    """Whether other folders may take from it: a package with a list, or a module on one."""
    if trees()[module][1]:
        return public_names(module) is not None
    package, _, name = module.rpartition(".")
    return package in ("", "dynbus") or name in (public_names(package) or ())


def takes_public(taken: Import) -> bool:
    """Whether what is taken from another folder is listed there as public."""
    if not is_public(taken.module):
        return False
    if not taken.name:
        return True
    listed = public_names(taken.module)
    if listed is None:
        return not trees()[taken.module][1] and not taken.name.startswith("_")
    return taken.name in listed


def test_no_import_circle_is_left() -> None:
    graph = {
        module: {taken.module for taken in imports_of(module)} - {module} for module in trees()
    }

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_folder_has_more_files_than_a_reader_can_keep_in_mind() -> None:
    folders = {path.parent for _, path in source_files()}

    counts = {
        folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders
    }

    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_each_module_says_its_subject_in_a_noun_phrase() -> None:
    """A question is nothing that a reader could search for."""
    texts = {module: ast.get_docstring(tree) or "" for module, (tree, _) in trees().items()}

    assert {module for module, text in texts.items() if text.startswith(QUESTIONS)} == set()


def test_folders_take_only_public_names_from_each_other() -> None:
    taken = [
        str(one)
        for module in trees()
        for one in imports_of(module)
        if folder_of(one.by) != folder_of(one.module) != "dynbus" and not takes_public(one)
    ]

    assert taken == []


def test_packages_above_the_kernel_take_names_of_faces_alone() -> None:
    taken = [
        str(one)
        for module in trees()
        if folder_of(module) not in (*KERNEL, "dynbus")
        for one in imports_of(module)
        if folder_of(one.by) != folder_of(one.module)
        and not (one.module in FACES and one.name in (public_names(one.module) or ()))
    ]

    assert taken == []


def test_the_kernel_takes_nothing_of_what_is_above_it() -> None:
    taken = [
        str(one)
        for module in trees()
        if folder_of(module) in KERNEL
        for one in imports_of(module)
        if folder_of(one.module) not in KERNEL
    ]

    assert taken == []


def test_a_face_can_be_kept_in_mind() -> None:
    counts = {face: len(public_names(face) or ()) for face in FACES}

    assert {face: count for face, count in counts.items() if count > MAX_FACE} == {}


def test_the_contract_of_the_kernel_can_be_kept_in_mind() -> None:
    assert len(public_names("dynbus.spi") or ()) <= MAX_SPI


@pytest.mark.parametrize("module", sorted(m for m in trees() if public_names(m)))
def test_whatever_is_listed_as_public_exists(module: str) -> None:
    tree, is_package = trees()[module]
    has = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else [node.name]
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            else [target.id for target in node.targets if isinstance(target, ast.Name)]
            if isinstance(node, ast.Assign)
            else [node.target.id]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else []
        )
    }
    modules = {name for name in public_names(module) or () if f"{module}.{name}" in trees()}

    assert (public_names(module) or set()) - has - (modules if is_package else set()) == set()


def test_each_example_is_checked_as_a_program_of_its_own() -> None:
    """Else pyright takes the `actors.py` of one for that of another."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    roots = [one["root"] for one in settings["executionEnvironments"]]

    found = sorted(path.parent for path in ROOT.glob("examples/*/actors.py"))

    assert [root for root in roots if root.startswith("examples/")] == [
        path.relative_to(ROOT).as_posix() for path in found
    ]
