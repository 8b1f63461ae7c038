"""`dynbus run --graph` draws what a file would run, and starts nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.actors.commands.conftest import MakeFolder

from dynbus import cli
from dynbus.bus import exit_codes

ACTORS = """
from collections.abc import AsyncGenerator
from dynbus import Actor, depends, handler

class Splitter(Actor, namespace="drawn"):
    @handler
    async def split(self, text: str) -> AsyncGenerator[str, None]:
        yield text

class Shouter(Actor, namespace="drawn"):
    splitter = depends(Splitter)

    @handler
    async def shout(self, text: str) -> str:
        return text
"""


@pytest.fixture(autouse=True)
def folder(folder_with: MakeFolder) -> Path:
    return folder_with("drawn_actors", ACTORS)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "drawn_actors.py", *arguments])
    return int(end.value.code or 0)


def test_the_tree_shows_the_settings_of_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run("--Splitter.workers=3", "--graph", "tree")

    assert code == 0
    assert capsys.readouterr().out == ("drawn.Shouter  (shout)\n└── drawn.Splitter x3  (split*)\n")


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    run("--graph", "json")

    assert json.loads(capsys.readouterr().out) == [
        {
            "address": "drawn.Splitter",
            "class": "drawn_actors:Splitter",
            "instances": 1,
            "resources": {},
            "endpoints": {"split": "stream"},
            "calls": [],
        },
        {
            "address": "drawn.Shouter",
            "class": "drawn_actors:Shouter",
            "instances": 1,
            "resources": {},
            "endpoints": {"shout": "unary"},
            "calls": ["drawn.Splitter"],
        },
    ]


def test_a_picture_needs_graphviz_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")

    code = run("--graph", "svg")

    assert code == exit_codes.CONFIG_ERROR
    assert "install the package graphviz, or use --graph mermaid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "code", "out", "err"),
    [
        ("#!/bin/sh\ncat; echo drawn", 0, "digraph run {", ""),
        ("#!/bin/sh\necho no font >&2; exit 1", exit_codes.CONFIG_ERROR, "", "Graphviz failed: no"),
        ("", exit_codes.CONFIG_ERROR, "", "Graphviz failed: [Errno 8] Exec format error"),
    ],
)
def test_a_picture_is_what_graphviz_makes_of_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    code: int,
    out: str,
    err: str,
) -> None:
    (folder / "dot").write_text(script)
    (folder / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    assert run("--graph", "svg") == code

    told = capsys.readouterr()
    assert out in told.out
    assert err in told.err


@pytest.mark.parametrize("other", ["--dry-run", "--json"])
def test_a_run_is_drawn_or_told_and_not_both(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--graph", "tree", other) == exit_codes.CONFIG_ERROR

    assert "leave --dry-run and --json out" in capsys.readouterr().err
