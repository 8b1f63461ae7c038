"""What a system under measurement provides, and where each one is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable


class Caller(Protocol):
    """The client side of one system.

    Calls raise whatever the system raises: a failed call makes the measurement fail.
    """

    async def unary(self) -> None:
        """Make one unary call and decode its result."""

    async def stream(self, endpoint: str, max_tokens: int, on_item: Callable[[Any], None]) -> None:
        """Read a stream to its end; `on_item` gets each decoded item."""

    def step_of(self, item: Any) -> float:
        """The `step` of an item of `stream_steps`."""
        ...


@runtime_checkable
class EngineCaller(Caller, Protocol):
    """A client of a system that has a way of its own for the streams of an engine."""

    async def engine_streams(
        self, count: int, max_tokens: int, on_item: Callable[[Any], None]
    ) -> None:
        """Read so many streams of `stream_steps` side by side to their ends."""


@runtime_checkable
class BytesCaller(Caller, Protocol):
    """A client that can leave items as the bytes that they came in."""

    async def bytes_streams(
        self, count: int, max_tokens: int, on_item: Callable[[bytes], Any]
    ) -> None:
        """Read so many streams of `stream_steps` side by side, as who passes them on does."""


@dataclass(frozen=True)
class Served:
    """A server that answers.

    Attributes:
        address: what the client process connects to.
        broker: process id of a message broker between the two ends, if there is one.
    """

    address: str
    broker: int | None = None


class System(Protocol):
    """A module in `systems/`."""

    def serve(self, folder: Path) -> AbstractAsyncContextManager[Served]:
        """Serve the echo until the block ends; `folder` is an own empty folder."""
        ...

    def connect(self, address: str) -> AbstractAsyncContextManager[Caller]:
        """Connect to a served echo; calls are answered from the first one on."""
        ...


MODULES: Final = {
    "bare": "bare_nats",
    "dynbus": "dynbus_actors",
    "dynamo": "dynamo_runtime",
    "grpc": "grpc_aio",
    "ray": "ray_serve",
}
BASELINE: Final = "bare"


def load(name: str) -> System:
    """Import the system called `name`.

    Raises:
        ImportError: the library that it measures is not installed.
    """
    return cast(System, importlib.import_module(f"{__package__}.systems.{MODULES[name]}"))
