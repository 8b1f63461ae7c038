"""The folders at the top of the repository are the package, in a checkout and in a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import dynbus
import dynbus.actors
import dynbus.bus
import dynbus.kvrouter
import dynbus.llm
import dynbus.transfer

ROOT = Path(__file__).parents[1]
FOLDERS = ("actors", "bus", "kvrouter", "llm", "transfer")
SOURCE = ROOT / "src" / "dynbus"


@pytest.mark.parametrize(
    "package", [dynbus.actors, dynbus.bus, dynbus.kvrouter, dynbus.llm, dynbus.transfer]
)
def test_a_package_is_the_folder_of_the_same_name(package: ModuleType) -> None:
    folder = package.__name__.removeprefix("dynbus.")

    assert Path(package.__path__[0]).samefile(ROOT / folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_linked_and_the_link_holds_anywhere(folder: str) -> None:
    assert (SOURCE / folder).is_symlink()
    assert (SOURCE / folder).readlink() == Path("..", "..", folder)


def test_nothing_else_is_linked() -> None:
    assert {path.name for path in SOURCE.iterdir() if path.is_symlink()} == set(FOLDERS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    program = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_wheel_has_every_module_of_a_folder(folder: str, wheel: set[str]) -> None:
    modules = {
        f"dynbus/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")
    }

    assert modules
    assert modules <= wheel


def test_the_wheel_has_the_files_above_the_folders(wheel: set[str]) -> None:
    paths = [*SOURCE.iterdir(), *(SOURCE / "compat").rglob("*.py")]
    names = {f"dynbus/{path.relative_to(SOURCE).as_posix()}" for path in paths if path.is_file()}

    assert "dynbus/py.typed" in names
    assert names <= wheel


def test_the_wheel_has_nothing_beside_the_package(wheel: set[str]) -> None:
    assert {name.split("/")[0].partition("-")[0] for name in wheel} == {"dynbus"}
    assert [name for name in wheel if "/tests/" in name or "/examples/" in name] == []


def test_the_wheel_has_the_command(wheel: set[str]) -> None:
    assert [name for name in wheel if name.endswith(".dist-info/entry_points.txt")]
