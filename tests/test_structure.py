"""The house: no import circles, small folders, public names between folders, and subjects told.

Imports are read from the source, wherever they stand: at the top, in a function, or for types only.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
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
MAX_FACE = 65
MAX_SPI = 60
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


class Module(NamedTuple):
    """What a source file says of itself; its syntax tree would be a burden on each test."""

    is_package: bool
    text: str
    names: frozenset[str]
    public: frozenset[str] | None
    imports: Sequence[Import]


@cache
def modules() -> Mapping[str, Module]:
    """All modules by name. It takes seconds: no test file asks as it is imported."""
    names = {name for name, _ in source_files()}
    return {name: _read(name, path, names) for name, path in source_files()}


def _read(name: str, path: Path, modules: Collection[str]) -> Module:
    tree = ast.parse(path.read_text())
    is_package = path.name == "__init__.py"
    package = name if is_package else name.rpartition(".")[0]
    return Module(
        is_package,
        ast.get_docstring(tree) or "",
        frozenset(_names(tree)),
        _listed(tree),
        tuple(_imports(tree, name, package, modules)),
    )


def _imports(tree: ast.Module, by: str, package: str, modules: Collection[str]) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    yield Import(by, alias.name, "", node.lineno)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*above, module] if module else above)
            for alias in node.names:
                if f"{module}.{alias.name}" in modules:
                    yield Import(by, f"{module}.{alias.name}", "", node.lineno)
                elif module in modules:
                    yield Import(by, module, alias.name, node.lineno)


def _names(tree: ast.Module) -> Iterator[str]:
    """What a module defines or imports, at whatever depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _listed(tree: ast.Module) -> frozenset[str] | None:
    """What a module lists in `__all__`; None for one that lists nothing."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return frozenset(ast.literal_eval(node.value))
    return None


def imports_of(by: str) -> Sequence[Import]:
    return modules()[by].imports


def public_names(module: str) -> frozenset[str] | None:
    return modules()[module].public


def folder_of(module: str) -> str:
    """The folder at the top that a module lives in; `dynbus` for those above all folders."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FOLDERS else "dynbus"


def folder_or_module(module: str) -> str:
    """The folder within a part that a module lives in; the module itself where it is in none."""
    package = module if modules()[module].is_package else module.rpartition(".")[0]
    return package if package.count(".") > 1 else module


def is_public(module: str) -> bool:
    """Whether other folders may take from it: a package with a list, or a module on one."""
    if modules()[module].is_package:
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
        return not modules()[taken.module].is_package and not taken.name.startswith("_")
    return taken.name in listed


def test_no_import_circle_is_left() -> None:
    graph = {
        module: {taken.module for taken in imports_of(module)} - {module} for module in modules()
    }

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_circle_of_folders_is_left() -> None:
    """The modules of a part that are in none of its folders count one by one."""
    graph: dict[str, set[str]] = {}
    for module in modules():
        uses = {folder_or_module(taken.module) for taken in imports_of(module)}
        graph.setdefault(folder_or_module(module), set()).update(uses)

    try:
        TopologicalSorter({one: uses - {one} for one, uses in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_no_folder_has_more_files_than_a_reader_can_keep_in_mind() -> None:
    folders = {path.parent for _, path in source_files()}

    counts = {
        folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders
    }

    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_folders_take_only_public_names_from_each_other() -> None:
    taken = [
        str(one)
        for module in modules()
        for one in imports_of(module)
        if folder_of(one.by) != folder_of(one.module) != "dynbus" and not takes_public(one)
    ]

    assert taken == []


def test_packages_above_the_kernel_take_names_of_faces_alone() -> None:
    taken = [
        str(one)
        for module in modules()
        if folder_of(module) not in (*KERNEL, "dynbus")
        for one in imports_of(module)
        if folder_of(one.by) != folder_of(one.module)
        and not (one.module in FACES and one.name in (public_names(one.module) or ()))
    ]

    assert taken == []


def test_the_kernel_takes_nothing_of_what_is_above_it() -> None:
    taken = [
        str(one)
        for module in modules()
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


def test_whatever_is_listed_as_public_exists() -> None:
    missing = {
        f"{name}.{listed}"
        for name, module in modules().items()
        for listed in (module.public or frozenset()) - module.names
        if not (module.is_package and f"{name}.{listed}" in modules())
    }

    assert missing == set()


def test_each_example_is_checked_as_a_program_of_its_own() -> None:
    """Else pyright takes the `actors.py` of one for that of another."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    roots = [one["root"] for one in settings["executionEnvironments"]]

    found = sorted(path.parent for path in ROOT.glob("examples/*/actors.py"))

    assert [root for root in roots if root.startswith("examples/")] == [
        path.relative_to(ROOT).as_posix() for path in found
    ]
