"""The tutorial: each page is carried out as its reader does, in a folder of its own."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.conditions import wait_until

from dynbus.testing import RunningServer, free_port

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"
PAGES = sorted(TUTORIAL.glob("[0-9]*.md"))
PORTS = ("8000", "8080")
MAX_LINES = 40
READY_TIMEOUT = 120


class Step(NamedTuple):
    """A marked block of a page.

    Attributes:
        action: `save` a file, `serve` in the first terminal, which `shows` these lines then, `run`
            in the second one, which `prints` this, or something that `fails`.
        name: of the file that is saved.
    """

    action: str
    name: str
    text: str


def steps_of(page: str) -> Iterator[Step]:
    block = re.compile(
        r"^<!-- \w+: (?P<action>\w+)(?: (?P<name>[\w.]+))? -->\n```\w+\n(?P<text>.*?)^```$",
        re.MULTILINE | re.DOTALL,
    )
    for found in block.finditer(page):
        yield Step(found["action"], found["name"] or "", found["text"])


class Reader:
    """Somebody who does what a page says, in a folder."""

    def __init__(self, folder: Path, server_url: str) -> None:
        self._folder = folder
        self._ports = {port: str(free_port()) for port in PORTS}
        # `dynbus` and `python` are those of this environment, as on the path of a reader.
        commands = folder / "bin"
        commands.mkdir()
        for name, words in {"dynbus": "-m dynbus", "python": ""}.items():
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            script.chmod(0o755)
        self._environment = {
            **os.environ,
            "NATS_URL": server_url,
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
        }

    def _with_ports(self, text: str) -> str:
        for port, free in self._ports.items():
            text = text.replace(port, free)
        return text

    def save(self, name: str, text: str) -> None:
        (self._folder / name).write_text(self._with_ports(text))

    @contextmanager
    def serving(self, command: str, shows: str) -> Generator[None]:
        """Have the first terminal serve, once it has shown what it is to show."""
        log = self._folder / "log"
        words = shlex.split(self._with_ports(command))
        with log.open("w") as output:
            run = subprocess.Popen(
                words,
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(
                lambda: run.poll() is not None or shown(log.read_text(), self._with_ports(shows)),
                READY_TIMEOUT,
                what=log.read_text,
            )
            yield
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
            code = run.wait(timeout=60)
        assert code == 0, log.read_text()

    def do(self, line: str, *, fails: bool = False) -> str:
        """Type a line into the second terminal; returns what it prints."""
        done = subprocess.run(
            ["sh", "-c", self._with_ports(line)],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=READY_TIMEOUT,
            check=False,
        )
        assert (done.returncode != 0) is fails, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


def expected(text: str) -> re.Pattern[str]:
    """What prints a text in which dots stand for anything."""
    return re.compile(re.escape(text).replace(re.escape("..."), ".*"), re.DOTALL)


def shown(log: str, text: str) -> bool:
    """Whether a log has lines for all lines of a text, each for one of them."""
    lines = log.splitlines()
    for wanted in text.splitlines():
        found = [line for line in lines if expected(wanted).fullmatch(line)]
        if not found:
            return False
        lines.remove(found[0])
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_does_what_it_says(page: Path, own_server: RunningServer, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    reader = Reader(folder, own_server.url)
    steps = list(steps_of(page.read_text()))
    printed = ""
    with ExitStack() as stack:
        for step, following in zip(steps, [*steps[1:], Step("", "", "")], strict=True):
            match step.action:
                case "save":
                    reader.save(step.name, step.text)
                case "serve":
                    assert following.action == "shows"
                    stack.enter_context(reader.serving(step.text, following.text))
                case "run" | "fails":
                    lines = step.text.splitlines()
                    printed = "".join(reader.do(one, fails=step.action == "fails") for one in lines)
                case "prints":
                    assert expected(step.text).fullmatch(printed), printed
                case "shows":
                    pass  # it was waited for
                case other:
                    pytest.fail(f"nobody knows how to {other}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_program_of_the_tutorial_is_short(page: Path) -> None:
    programs = {step.name: step.text for step in steps_of(page.read_text()) if step.name}

    assert programs
    assert [name for name, text in programs.items() if text.count("\n") >= MAX_LINES] == []


def test_the_tutorial_lists_its_pages_in_order_and_each_leads_to_the_next() -> None:
    listed = re.findall(r"\]\(([1-9][\w-]*\.md)\)", (TUTORIAL / "README.md").read_text())

    assert listed == [page.name for page in PAGES]
    assert [
        page.name
        for page, following in zip(PAGES, PAGES[1:], strict=False)
        if f"({following.name})" not in page.read_text()
    ] == []
