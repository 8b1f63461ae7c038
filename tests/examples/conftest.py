"""Runs an example as its user does: `dynbus run actors.py` and `python client.py` in its folder."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dynbus import NoInstances, Runtime
from dynbus.testing import RunningServer

EXAMPLES = Path(__file__).parents[2] / "examples"
READY_TIMEOUT = 120.0


class Example:
    """A running example.

    Attributes:
        output: what the actors have written; complete after `stop`.
    """

    def __init__(self, folder: Path, url: str, options: Sequence[str], file: str) -> None:
        self.output = ""
        self._folder = folder
        self._environment = {
            **os.environ,
            "NATS_URL": url,
            "PYTHONUNBUFFERED": "1",
            # For a checkout that is on the path by a relative name, without being installed.
            "PYTHONPATH": str(EXAMPLES.parent / "src"),
        }
        command = [sys.executable, "-m", "dynbus", "run", file, "--nats", url, *options]
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
        return self._run("client.py")

    def run_command(self, *arguments: str) -> str:
        """What `dynbus` with these arguments prints."""
        return self._run("-m", "dynbus", *arguments)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A program of the folder that goes on beside the actors; its user's to end."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        """Press Ctrl-C; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self.output += self._process.communicate(timeout=60)[0]
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
        for name, count in Counter(endpoints).items():
            client = await runtime.endpoint(name).client()
            while len(client.instance_ids()) < count:
                example.check_alive()
                try:
                    await client.wait_for_instances(timeout=0.5, count=count)
                except NoInstances:
                    continue


@contextmanager
def running(
    name: str,
    url: str,
    endpoints: tuple[str, ...],
    options: Sequence[str] = (),
    *,
    file: str = "actors.py",
) -> Generator[Example]:
    """The actors of an example, once the endpoints are served."""
    example = Example(EXAMPLES / name, url, options, file)
    try:
        asyncio.run(_wait_until_ready(url, example, endpoints))
        yield example
    finally:
        example.stop()


RunExample = Callable[..., Example]


@pytest.fixture
def run_example(nats_server: RunningServer) -> Iterator[RunExample]:
    """Starts the actors of an example and waits for the endpoints that are named.

    One that is named three times is waited for until it has three instances.
    """
    with ExitStack() as stack:

        def run(name: str, *endpoints: str, options: Sequence[str] = ()) -> Example:
            return stack.enter_context(running(name, nats_server.url, endpoints, options))

        yield run
