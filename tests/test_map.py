"""`scripts/map`: it finds modules, classes and functions by folders and by words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "bus/__init__.py": ['"""The bus: calls over a wire.', "", 'What waits has a window."""'],
    "bus/clock.py": ['"""The clock of the', 'bus."""', "def now() -> float:", ' """Seconds."""'],
    "llm/pause.py": ['"""Back-off."""', "class LeastLoaded: ...", "class _Hidden: ..."],
    "llm/selection.py": ['"""A choice."""', "async def elect() -> None:", ' """One."""'],
}
BUS = "bus                                      The bus: calls over a wire."
CLOCK = "bus/clock.py                             The clock of the bus."
PAUSE = "llm/pause.py                             Back-off."


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small source tree with the script."""
    script = (ROOT / "scripts/map").read_text().splitlines()
    for name, lines in {**FILES, "scripts/map": script}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(lines))
    return tmp_path


def asked(tree: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, tree / "scripts/map", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.splitlines()


def test_all_packages_are_shown_unless_something_is_asked_for(tree: Path) -> None:
    assert asked(tree) == [BUS]


@pytest.mark.parametrize("folder", ["bus", "bus/"])
def test_a_folder_shows_its_modules_and_no_others(tree: Path, folder: str) -> None:
    assert asked(tree, folder) == [BUS, CLOCK]


def test_a_file_shows_its_public_classes_and_functions(tree: Path) -> None:
    assert asked(tree, "bus/clock.py") == [CLOCK, "", f"{'now':<40} Seconds."]
    assert asked(tree, "llm/pause.py") == [PAUSE, "", "LeastLoaded"]


@pytest.mark.parametrize(
    "words", [["back-off"], ["back_off"], ["backoff"], ["back", "off"], ["BackOff"], ["back"]]
)
def test_a_word_is_found_however_it_is_spelled(tree: Path, words: list[str]) -> None:
    assert asked(tree, *words) == [PAUSE]


@pytest.mark.parametrize("word", ["least-loaded", "least_loaded", "leastloaded", "loaded"])
def test_a_class_is_found_by_the_words_of_its_name(tree: Path, word: str) -> None:
    assert asked(tree, word) == ["llm/pause.py LeastLoaded"]


def test_a_word_is_found_anywhere_in_a_docstring(tree: Path) -> None:
    assert asked(tree, "window") == [BUS]


def test_a_word_is_found_at_the_beginning_of_words_alone(tree: Path) -> None:
    assert asked(tree, "elect") == [f"{'llm/selection.py elect':<40} One."]


def test_a_word_that_nothing_has_is_an_error_that_says_so(tree: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        asked(tree, "zebra")

    assert failed.value.stderr == ("nothing has 'zebra': give a folder, a file, or another word\n")
