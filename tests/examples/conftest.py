"""Runs an example as its user does: `dynbus run actors.py` and `python client.py` in its folder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dynbus import NoInstances, Runtime
from dynbus.bus.nats.server_process import RunningServer

EXAMPLES = Path(__file__).parents[2] / "examples"
READY_TIMEOUT = 30.0


class Example:
    """A running example.

    Attributes:
        output: what the actors have written; complete after `stop`.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.output = ""
        self._folder = folder
        self._environment = {
            **os.environ,
            "NATS_URL": url,
            "PYTHONUNBUFFERED": "1",
            # For a checkout that is on the path by a relative name, without being installed.
            "PYTHONPATH": str(EXAMPLES.parent / "src"),
        }
        command = [sys.executable, "-m", "dynbus", "run", "actors.py", "--nats", url]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run_client(self) -> str:
        """What `python client.py` prints."""
        done = subprocess.run(
            [sys.executable, "client.py"],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        """Press Ctrl-C; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self.output += self._process.communicate(timeout=20)[0]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.output += self._process.communicate()[0]
            raise
        return self._process.returncode

    def check_alive(self) -> None:
        """Fail with the actors' output when they have ended."""
        if self._process.poll() is not None:
            self.stop()
            pytest.fail(f"dynbus run ended with {self._process.returncode}:\n{self.output}")


async def _wait_until_ready(url: str, example: Example, endpoints: tuple[str, ...]) -> None:
    async with asyncio.timeout(READY_TIMEOUT), Runtime.connect(url) as runtime:
        for name in endpoints:
            client = await runtime.endpoint(name).client()
            while not client.instance_ids():
                example.check_alive()
                try:
                    await client.wait_for_instances(timeout=0.5)
                except NoInstances:
                    continue


@contextmanager
def _running(name: str, url: str, endpoints: tuple[str, ...]) -> Generator[Example]:
    example = Example(EXAMPLES / name, url)
    try:
        asyncio.run(_wait_until_ready(url, example, endpoints))
        yield example
    finally:
        example.stop()


RunExample = Callable[..., Example]


@pytest.fixture
def run_example(nats_server: RunningServer) -> Iterator[RunExample]:
    """Starts the actors of an example and waits for the endpoints that are named."""
    with ExitStack() as stack:

        def run(name: str, *endpoints: str) -> Example:
            return stack.enter_context(_running(name, nats_server.url, endpoints))

        yield run
