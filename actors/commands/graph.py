"""The drawings of `dynbus run --graph`: which actors a run has, and who calls whom."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from dynbus.actors.running.drawing import called_by, dot, mermaid, tree
from dynbus.actors.running.plan import PlannedNode
from dynbus.bus.errors import ConfigError

GRAPHVIZ_SECONDS: Final = 60.0


def svg(nodes: Sequence[PlannedNode]) -> str:
    """A picture that Graphviz draws.

    Raises:
        ConfigError: Graphviz is not there, or fails.
    """
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            "--graph svg needs Graphviz, whose program dot is not on the path: install the "
            "package graphviz, or use --graph mermaid"
        )
    try:
        drawn = subprocess.run(
            [program, "-Tsvg"],
            input=dot(nodes),
            capture_output=True,
            text=True,
            timeout=GRAPHVIZ_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"Graphviz failed: {error}") from None
    if drawn.returncode != 0:
        raise ConfigError(f"Graphviz failed: {drawn.stderr.strip()}")
    return drawn.stdout


def as_json(nodes: Sequence[PlannedNode]) -> str:
    """For programs: each node with what it calls."""
    described = [
        {
            "address": node.address,
            "class": node.actor,
            "instances": node.service.workers,
            "resources": node.service.resources.declared(),
            "endpoints": node.endpoints,
            "calls": called_by(node),
        }
        for node in nodes
    ]
    return msgspec.json.format(msgspec.json.encode(described), indent=2).decode()


FORMATS: Final[Mapping[str, Callable[[Sequence[PlannedNode]], str]]] = {
    "tree": tree,
    "mermaid": mermaid,
    "dot": dot,
    "svg": svg,
    "json": as_json,
}
"""The drawing of a run's nodes, by the format that `dynbus run --graph` is given."""
