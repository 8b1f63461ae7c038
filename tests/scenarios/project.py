"""A user's project folder with a file of actors, and the `dynbus` commands that are run in it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from tests.conditions import PATIENCE, no_loop_reports, wait_until

from dynbus import cli
from dynbus.bus.nats.server_process import free_port

SOURCE = Path(__file__).resolve().parents[2] / "src"

GRACE = 20
"""Seconds that a front end has for the requests that run when it is stopped."""

ENGINE = """
from dynbus.llm.worker import ModelWorker

class Engine(ModelWorker, namespace="stack"):
    pass
"""

ACTORS = """
import asyncio, os, time
from collections.abc import AsyncGenerator
from pathlib import Path
from dynbus import Actor, depends, handler

class Splitter(Actor, namespace="demo"):
    def __init__(self, separator: str = " ") -> None:
        self.separator = separator

    @handler
    async def split(self, text: str) -> AsyncGenerator[str, None]:
        for word in text.split(self.separator):
            yield word

    @handler
    async def fail(self, text: str) -> str:
        raise ValueError(text)

class Shouter(Actor, namespace="demo"):
    splitter = depends(Splitter)

    @handler
    async def shout(self, text: str) -> AsyncGenerator[str, None]:
        async for word in self.splitter.split(text):
            yield word.upper()

class Slow(Actor, namespace="demo"):
    async def on_stop(self) -> None:
        Path("stopped").touch()

    @handler
    async def work(self, seconds: float) -> str:
        Path("working").touch()
        await asyncio.sleep(seconds)
        return "done"

    @handler
    async def tick(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(1_000_000):
                yield number
                await asyncio.sleep(0.05)
        finally:
            Path("cancelled").touch()

    @handler
    async def block(self, seconds: float) -> str:
        Path("blocking").touch()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                time.sleep(end - time.monotonic())
            except ValueError:
                break
        return "done"

    @handler
    async def die(self) -> str:
        os._exit(7)
"""


class Folder:
    """A user's project folder with the processes that run in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"nats://127.0.0.1:{free_port()}"
        self.log = path / "run.log"
        self.runs: list[subprocess.Popen[bytes]] = []
        self.calls: list[subprocess.Popen[str]] = []
        (path / "actors.py").write_text(ACTORS)

    def environment(self) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", ""))))
        return {**os.environ, "PYTHONPATH": paths, "NATS_URL": self.url}

    def start(self, *arguments: str, python: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start `dynbus run`."""
        return self._start("run", *arguments, python=python)

    def start_front_end(self, port: int, *more: str) -> subprocess.Popen[bytes]:
        """Start `dynbus http`, with more options."""
        options = ("--port", str(port), "--grace", str(GRACE), "--log-level", "warning")
        return self._start("http", *options, *more)

    def _start(self, *arguments: str, python: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start a command as a terminal would: in a process group of its own."""
        with self.log.open("ab") as output:
            run = subprocess.Popen(
                [sys.executable, *python, "-m", "dynbus", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.path,
                env=self.environment(),
                start_new_session=True,
            )
        self.runs.append(run)
        return run

    def start_ready(self, *arguments: str, instances: int = 1) -> subprocess.Popen[bytes]:
        run = self.start(*arguments)
        self.wait_for(lambda: self.output().count(" is ready") >= instances or run.poll())
        assert run.poll() is None, self.output()
        return run

    def dynbus(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end: in this process, which has imported what it needs."""
        output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
        with (
            chdir(self.path),
            patch.dict(os.environ, self.environment()),
            redirect_stdout(output),
            redirect_stderr(errors),
        ):
            try:
                cli.main(arguments)
            except SystemExit as end:
                code = int(end.code or 0)
        printed = [_text_of(each) for each in (output, errors)]
        return subprocess.CompletedProcess(arguments, code, *printed)

    def dynbus_in_a_process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end as a shell does."""
        return subprocess.run(
            [sys.executable, "-m", "dynbus", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=self.path,
            env=self.environment(),
            timeout=120,
            check=False,
        )

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """Begin a command; what it prints comes through its pipes."""
        call = subprocess.Popen(
            [sys.executable, "-m", "dynbus", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.path,
            env=self.environment(),
        )
        self.calls.append(call)
        return call

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, condition: Callable[[], Any], within: float = PATIENCE) -> float:
        """Wait until `condition()` is true; returns the seconds that it took, by a `Stopwatch`."""
        return wait_until(condition, within, what=self.output)

    def exit_of(self, process: subprocess.Popen[Any], within: float = PATIENCE) -> int:
        """Wait for the end of a process; returns its exit code."""
        self.wait_for(lambda: process.poll() is not None, within)
        return int(process.returncode)

    def wait_for_file(self, name: str) -> None:
        self.wait_for((self.path / name).exists)

    def workers(self) -> list[psutil.Process]:
        """The living child processes that serve instances here."""
        return [each for each in self.processes() if _line(each).startswith("dynbus worker ")]

    def processes(self) -> list[psutil.Process]:
        """Every living process that was started in, or for, this folder."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter(["cwd", "cmdline", "status"]):
            mine = process.info["cwd"] == str(self.path) or str(self.path) in _line(process)
            if mine and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found


def _text_of(written: io.TextIOWrapper) -> str:
    written.seek(0)
    return written.read()


def _line(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])


@contextmanager
def project_folder(path: Path, kind: type[Folder] = Folder) -> Generator[Folder, None, None]:
    """A project folder; at the end nothing that was started in it may be left."""
    project = kind(path)
    try:
        yield project
    finally:
        started: list[subprocess.Popen[Any]] = [*project.runs, *project.calls]
        for process in started:
            process.kill()
            process.wait(PATIENCE)
        for call in project.calls:
            for pipe in (call.stdout, call.stderr):
                if pipe is not None:
                    pipe.close()
    project.wait_for(lambda: project.processes() == [])
    assert no_loop_reports(project.output()), project.output()
