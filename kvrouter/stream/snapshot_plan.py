"""When a snapshot is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynbus.bus.errors import ConfigError
from dynbus.bus.transport import StreamInfo, StreamLimits


class Due(NamedTuple):
    """Why a snapshot is due.

    Attributes:
        is_urgent: the limits come near what the latest one needs of the stream, so that a new
            one cannot wait for better times.
    """

    reason: str
    is_urgent: bool = False


class Covered(NamedTuple):
    """Up to where the latest snapshot covers the stream, and since when, Unix seconds."""

    sequence: int
    written: float


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """How often snapshots are taken. Whatever comes first counts.

    Attributes:
        messages, size, seconds: of the stream since the latest one; `size` is in bytes, and an
            estimate from the mean of all messages.
        margin: of what the stream may hold, the part that may be newer than the latest
            snapshot: from there on it is urgent.

    Raises:
        ConfigError: a number is not above 0, or `margin` not below 1.
    """

    messages: int = 100_000
    size: int = 128 * 1024 * 1024
    seconds: float = 600.0
    margin: float = 0.5

    def __post_init__(self) -> None:
        for name in ("messages", "size", "seconds", "margin"):
            # Not a number is not above 0 either.
            if not getattr(self, name) > 0:
                raise ConfigError(f"snapshot plan: {name} = {getattr(self, name)}: give > 0")
        if self.margin >= 1:
            raise ConfigError(
                f"snapshot plan: margin = {self.margin}: give less than 1, or snapshots come "
                "when the limits have cut off what follows the one before"
            )

    def due(
        self, latest: Covered | None, stream: StreamInfo, limits: StreamLimits, now: float
    ) -> Due | None:
        """Why a snapshot is due; None while none is.

        Args:
            latest: the newest snapshot of this making of the stream.
            now: Unix seconds.
        """
        if not stream.last_sequence:
            return None
        if latest is None:
            return Due("there is none", is_urgent=True)
        newer = stream.last_sequence - latest.sequence
        if newer <= 0:
            return None
        urgent = self._urgency(latest, newer, stream, limits, now)
        if urgent:
            return Due(urgent, is_urgent=True)
        size = _newer_size(newer, stream)
        age = now - latest.written
        if newer >= self.messages:
            return Due(f"{newer} messages since the latest")
        if size >= self.size:
            return Due(f"about {size} bytes since the latest")
        if age >= self.seconds:
            return Due(f"{age:.0f} s since the latest")
        return None

    def _urgency(
        self,
        latest: Covered,
        newer: int,
        stream: StreamInfo,
        limits: StreamLimits,
        now: float,
    ) -> str:
        """What limit comes near what the latest snapshot needs of the stream; empty for none."""
        if stream.first_sequence > latest.sequence + 1:
            return "the limits have cut off what follows the latest"
        is_cut = stream.first_sequence > 1
        if is_cut and newer >= self.margin * stream.messages:
            return f"{newer} of {stream.messages} messages are newer than the latest"
        size = _newer_size(newer, stream)
        if limits.max_bytes is not None and size >= self.margin * limits.max_bytes:
            return f"about {size} of {limits.max_bytes} bytes are newer than the latest"
        if limits.max_messages is not None and newer >= self.margin * limits.max_messages:
            return f"{newer} of {limits.max_messages} messages are newer than the latest"
        if limits.max_age is not None and now - latest.written >= self.margin * limits.max_age:
            return f"{now - latest.written:.0f} s of {limits.max_age:.0f} since the latest"
        return ""


def _newer_size(newer: int, stream: StreamInfo) -> int:
    return stream.size * min(newer, stream.messages) // max(1, stream.messages)
