"""How one routed attempt goes: its output is counted, and the engine's reused tokens are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from dynbus.bus.errors import DynbusError

from .request_fields import field_of


class AttemptSink(Protocol):
    """Who is told of an attempt, by the number of its decision."""

    def first_item(self, number: int) -> None: ...
    def grown(self, number: int, output_tokens: int) -> None: ...
    def reused(self, number: int, tokens: int) -> None: ...
    def ended(self, number: int, error: str) -> None: ...


class AttemptObserver:
    """Tells a sink how the attempt of one decision goes.

    Args:
        reused_field: where an item, or the result, says how many tokens of the prompt the engine
            found in its cache: names with dots; empty for nowhere.
        block_size: tokens after which the output has grown by a block; 0 to count none.
        waited: seconds in the queue, which the error of the attempt tells.
    """

    __slots__ = ("_block_size", "_key", "_number", "_output", "_reused_field", "_sink", "_waited")

    def __init__(
        self,
        sink: AttemptSink,
        number: int,
        reused_field: str,
        block_size: int,
        waited: float = 0.0,
    ) -> None:
        self._sink = sink
        self._number = number
        self._reused_field = reused_field
        # An item is decoded only when it may have the field: they are many, and most have none.
        self._key = f'"{reused_field.rpartition(".")[2]}"'.encode() if reused_field else b""
        self._block_size = block_size
        self._output = 0
        self._waited = waited

    def started(self) -> None:
        """The load was charged when it was decided."""

    def first_item(self) -> None:
        self._sink.first_item(self._number)

    def arrived(self, items: Sequence[bytes]) -> bool:
        if self._key:
            for item in items:
                if (
                    self._key in item
                    and (tokens := reused_in(item, self._reused_field)) is not None
                ):
                    self._key = b""
                    self._sink.reused(self._number, tokens)
                    break
        if self._block_size:
            before = self._output // self._block_size
            self._output += len(items)
            if self._output // self._block_size != before:
                self._sink.grown(self._number, self._output)
        return bool(self._key or self._block_size)

    def ended(self, error: DynbusError | None) -> None:
        self._sink.ended(self._number, "" if error is None else error.code)
        if error is not None and self._waited:
            # The time that is missing was not spent where the error arose.
            error.message = f"{error.message or error.code}; before, it {queued(self._waited)}"


def queued(seconds: float) -> str:
    """What errors say of a call that waited."""
    return f"waited {seconds:.3g} s in the router's queue"


def reused_in(item: bytes, path: str) -> int | None:
    """The number at a dotted path of an item, which is JSON; None where there is none."""
    try:
        value: Any = field_of(msgspec.json.decode(item), path)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The reader finds that out as well, and says so.
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
