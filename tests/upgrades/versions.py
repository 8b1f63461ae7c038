"""Processes of this version and of the release before it, at one server."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from tests.scenarios.processes import Process

from . import shop

OLD, NEW = "the release", "this version"


class Shops:
    """Processes of two versions at one server.

    Attributes:
        notes: the file in which all of them note what they do.
    """

    def __init__(self, url: str, folder: Path, packages: dict[str, Path]) -> None:
        self.notes = folder / "notes"
        self._url = url
        self._folder = folder
        self._packages = packages
        self._started: list[Process] = []

    def start(self, version: str, program: str, *arguments: str) -> Process:
        """Start a program of a version."""
        log = self._folder / f"{len(self._started)}.log"
        process = Process(log, program, *arguments, package=self._packages[version])
        self._started.append(process)
        return process

    def begin(self, version: str, role: str, *arguments: str) -> Process:
        """Start a process of a version in a role of `shop`."""
        return self.start(version, "tests.upgrades.shop", role, self._url, *arguments)

    async def serve(self, version: str) -> Process:
        process = self.begin(version, "serve", str(self.notes))
        await process.says("serves")
        assert f"with {self._packages[version]}" in process.output
        return process

    async def ask(self, version: str, role: str, *arguments: str) -> Any:
        """The last line that a process prints in a role that ends, as JSON; None for none."""
        return await answer(self.begin(version, role, *arguments))

    def engines(self, version: str, role: str, *arguments: str) -> Process:
        """Start a process of a version in a role of `engines`."""
        return self.start(version, "tests.upgrades.engines", role, self._url, *arguments)

    def front_end(self, version: str, port: int) -> Process:
        """Start a front end of a version, which waits for no request when it is stopped."""
        options = ("--nats", self._url, "--port", str(port), "--grace", "0.1")
        return self.start(version, "dynbus", "http", *options)

    async def kv(self, version: str, command: str) -> list[str]:
        """The lines that `dynbus kv` of a version prints about the engines."""
        place = ("--namespace", shop.NAMESPACE, "--component", "Engine", "--nats", self._url)
        process = self.start(version, "dynbus", "kv", command, *place)
        assert await process.ended() == 0, process.output
        return process.output.splitlines()

    def noted(self) -> Counter[str]:
        return Counter(self.notes.read_text().splitlines()) if self.notes.exists() else Counter()

    def end(self) -> None:
        for process in self._started:
            process.kill()


async def answer(process: Process) -> Any:
    assert await process.ended() == 0, process.output
    *_, last = process.output.splitlines()
    return None if last.startswith("with ") else msgspec.json.decode(last)


async def stop(process: Process) -> None:
    process.terminate()
    assert await process.ended() == 0, process.output
