"""Typed clients are checked by the type checkers: right calls pass, wrong ones do not.

Every `right_*.py` passes mypy --strict and pyright strict. In every `wrong_*.py` both report
exactly the lines that end with `# error`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
RIGHT = sorted(HERE.glob("right_*.py"))
WRONG = sorted(HERE.glob("wrong_*.py"))

Reports = dict[str, dict[int, str]]
"""By file and line: what a checker said."""


def _run(command: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=HERE,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def mypy(tmp_path: Path) -> Reports:
    """What mypy --strict says."""
    reports: Reports = {}
    output = _run(
        [
            "mypy",
            "--strict",
            "--config-file=",
            "--no-error-summary",
            "--hide-error-context",
            f"--cache-dir={tmp_path}",
            *(path.name for path in (*RIGHT, *WRONG)),
        ]
    )
    for found in re.finditer(r"^([^:\n]+):(\d+): error: (.*)$", output, re.MULTILINE):
        reports.setdefault(Path(found[1]).name, {})[int(found[2])] = found[3]
    return reports


@pytest.fixture
def pyright(tmp_path: Path) -> Reports:
    """What pyright says in strict mode."""
    # In a folder of their own: pyright reads the repository's configuration otherwise, and
    # takes relative paths only.
    for path in (*RIGHT, *WRONG):
        shutil.copy(path, tmp_path)
    config = {"typeCheckingMode": "strict", "extraPaths": [str(SOURCE)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    reports: Reports = {}
    for report in json.loads(_run(command))["generalDiagnostics"]:
        if report["severity"] == "error":
            line = report["range"]["start"]["line"] + 1
            reports.setdefault(Path(report["file"]).name, {})[line] = report["message"]
    return reports


def _marked(path: Path) -> set[int]:
    lines = path.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# error")}


@pytest.mark.timeout(180)
def test_mypy_accepts_right_calls_and_reports_every_wrong_line_and_no_other(mypy: Reports) -> None:
    assert _lines(mypy) == _expected()


@pytest.mark.timeout(180)
def test_pyright_accepts_right_calls_and_reports_every_wrong_line_and_no_other(
    pyright: Reports,
) -> None:
    assert _lines(pyright) == _expected()


def _lines(reports: Reports) -> dict[str, set[int]]:
    return {path.name: set(reports.get(path.name, {})) for path in (*RIGHT, *WRONG)}


def _expected() -> dict[str, set[int]]:
    """The lines to be reported: in a wrong file some, in a right file none."""
    assert all(_marked(path) for path in WRONG)
    return {path.name: _marked(path) for path in WRONG} | {path.name: set() for path in RIGHT}
