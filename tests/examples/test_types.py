"""The examples are typed: both checkers accept them as their user's editor sees them.

Each example has an `actors.py` of its own, so each is checked as a program of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import EXAMPLES

NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/actors.py"))
SOURCE = str(EXAMPLES.parent / "src")

EXCEPTIONS = {
    # nats-py's own annotations have holes.
    "plain_nats": {"reportUnknownMemberType": False},
}


def _check(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "MYPYPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_there_are_nine_examples() -> None:
    assert NAMES == [
        "chat",
        "disaggregated",
        "fanout",
        "hello",
        "http_front",
        "kv_routing",
        "llm",
        "pipeline",
        "plain_nats",
    ]


@pytest.mark.timeout(600)
def test_mypy_strict_accepts_every_example(tmp_path: Path) -> None:
    for name in NAMES:
        _check(
            ["mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}", "."],
            EXAMPLES / name,
        )


@pytest.mark.timeout(600)
def test_pyright_strict_accepts_every_example(tmp_path: Path) -> None:
    # Copies, as pyright looks for a configuration in the folders above and takes relative
    # paths only. Each is an environment of its own, in which `actors` is its own.
    for name in NAMES:
        # The sockets of programs that run there are no files to copy.
        unwanted = shutil.ignore_patterns(".dynbus", "__pycache__")
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=unwanted)
    config = {
        "typeCheckingMode": "strict",
        "reportMissingTypeStubs": False,
        "executionEnvironments": [
            {"root": name, "extraPaths": [SOURCE], **EXCEPTIONS.get(name, {})} for name in NAMES
        ],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))

    _check(["pyright", "--pythonpath", sys.executable, "-p", str(tmp_path)], tmp_path)
