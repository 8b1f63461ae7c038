"""Systems measured in turn, on a nats-server of their own, by processes that tell figures."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click

from dynbus.testing import run_server

PEERS = Path(__file__).parent / "peers.py"


class Child:
    """A process of one system."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def figures(self) -> dict[str, float]:
        """What it tells at its end."""
        line = self.line()
        if self._process.wait(60) != 0 or not line:
            raise SystemExit(f"{self._process.args!r} failed")
        found: dict[str, float] = json.loads(line)
        return found


def compare(
    systems: Sequence[str], runs: int, measure: Callable[[str, str], dict[str, Any]]
) -> None:
    """Print the figures of each run of each system, and their medians.

    Args:
        measure: the figures of a system on the server at a URL.
    """
    figures: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for _ in range(runs):
        for system in systems:
            figures[system].append(asyncio.run(_measured(system, measure)))
            click.echo(f"{system} {json.dumps(figures[system][-1])}")
    for system in systems:
        row = {key: median(one[key] for one in figures[system]) for key in figures[system][0]}
        click.echo(f"median of {runs}: {system} {json.dumps(row)}")


async def _measured(system: str, measure: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        server = await run_server(store_dir=Path(folder))
        try:
            return await asyncio.to_thread(measure, system, server.url)
        finally:
            await server.stop()
