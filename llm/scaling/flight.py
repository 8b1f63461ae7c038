"""The flight of an autoscaler: all that it saw and decided, on record, and decided again.

Each decision is on record with the whole observation that it was made by, so that a policy of the
same settings that sees the same decides the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import click
import msgspec

from dynbus import ConfigError
from dynbus.spi import Bus, InstanceName, monotonic, terminal

from .observation import Observation, PoolState, PoolTarget
from .policy import ScalingConfig, ScalingPolicy

KIND: Final = "scaling."
"""The beginning of the kinds of these records."""
ANEW_AFTER: Final = 60.0
"""Seconds after which the settings are told again, for who reads from the middle on."""
MOST_SHOWN: Final = 10

BEFORE: Final = "what the autoscaler had seen before the recording, or in a gap, is not known"


class Began(msgspec.Struct, frozen=True, array_like=True, tag="scaling.began", gc=False):
    """An autoscaler begins to decide, or tells its settings again.

    Attributes:
        autoscaler: the address of the instance.
        is_new: whether it has decided nothing before.
    """

    autoscaler: str
    is_new: bool
    config: ScalingConfig


class Decided(msgspec.Struct, frozen=True, array_like=True, tag="scaling.decided", gc=False):
    """A decision.

    Attributes:
        observation: by which it was made.
        targets: by pools.
    """

    observation: Observation
    targets: dict[str, PoolTarget]


class ScalingFlight:
    """Records what an autoscaler decides, where its process records anything.

    Args:
        name: of the autoscaler, in the flight of whose namespace it is.
    """

    def __init__(self, bus: Bus, name: InstanceName, config: ScalingConfig) -> None:
        self._name = name
        self._events = bus.flight
        self._recorder = bus.recorder(name.namespace)
        self._began = Began(str(name), True, config)
        self._anew_at = 0.0
        self._before: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<ScalingFlight of {self._name}>"

    def close(self) -> None:
        """Send what is gathered."""
        if self._recorder is not None:
            self._recorder.close()

    def begin(self) -> None:
        """A policy that has seen nothing decides from now on."""
        self._began = msgspec.structs.replace(self._began, is_new=True)
        self._anew_at = 0.0
        self._before.clear()

    def decided(self, observation: Observation, targets: dict[str, PoolTarget]) -> None:
        """Record a decision, and as events the pools that are to have another number."""
        recorder, events, now = self._recorder, self._events, monotonic()
        if recorder is None or events is None:
            return
        if now >= self._anew_at:
            recorder.note(self._began, now)
            self._began = msgspec.structs.replace(self._began, is_new=False)
            self._anew_at = now + ANEW_AFTER
        recorder.note(Decided(observation, targets), now)
        for pool, target in targets.items():
            ready = observation.pools[pool].ready
            before = self._before.get(pool, ready)
            self._before[pool] = target.desired
            if target.desired != before:
                events.note(
                    self._name.namespace,
                    "pool.decided",
                    pool,
                    before=before,
                    desired=target.desired,
                    ready=ready,
                    reason=target.reason,
                )

    def failed(self, pool: str, target: PoolTarget) -> None:
        """Record that nobody has carried out a target."""
        if self._events is not None:
            self._events.note(self._name.namespace, "pool.not_scaled", pool, desired=target.desired)


# Reading it ----------------------------------------------------------------------------------


class ScalingEntry(Protocol):
    """A record of a flight as it is read; see `Entry` of the bus."""

    @property
    def recorder(self) -> str: ...
    @property
    def missing(self) -> int: ...
    @property
    def time(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def body(self) -> bytes | msgspec.Raw: ...


class Compared(NamedTuple):
    """A target that came out otherwise than on record.

    Attributes:
        time: Unix seconds.
        why: the reason, where one is known; empty for none.
    """

    time: float
    pool: str
    recorded: PoolTarget
    made: PoolTarget
    why: str


@dataclass(slots=True)
class _Deciding:
    """An autoscaler of which a record was read.

    Attributes:
        is_whole: whether all that it saw was on record.
        time: Unix seconds of its last decision.
    """

    name: str
    policy: ScalingPolicy
    is_whole: bool
    time: float = 0.0
    pools: Mapping[str, PoolState] = field(default_factory=dict[str, PoolState])
    targets: Mapping[str, PoolTarget] = field(default_factory=dict[str, PoolTarget])


class ScalingReplay:
    """The decisions of all autoscalers in a flight, made again.

    Args:
        settings: of routers, which change nothing here: instances that come and go as on record
            say nothing of other targets.
        request: likewise.
    """

    title: Final = "scaling"

    def __init__(self, settings: Mapping[str, str], request: str) -> None:
        self._deciding: dict[str, _Deciding] = {}
        self._records = msgspec.msgpack.Decoder(Began | Decided)
        self._decisions = self._missing = 0
        self._differing: list[Compared] = []

    def __repr__(self) -> str:
        return f"<ScalingReplay [{self._decisions} targets, {len(self._differing)} otherwise]>"

    def take(self, entry: ScalingEntry) -> None:
        """Take the next record of the flight."""
        known = self._deciding.get(entry.recorder)
        if known is not None and entry.missing:
            known.is_whole = False
            self._missing += entry.missing
        if not entry.kind.startswith(KIND):
            return
        try:
            record = self._records.decode(entry.body)
            if isinstance(record, Decided):
                if known is not None:
                    self._decide(known, record, entry.time)
            elif known is None or record.is_new:
                self._deciding[entry.recorder] = _Deciding(
                    record.autoscaler, ScalingPolicy(record.config), record.is_new
                )
        except (msgspec.DecodeError, ConfigError, ArithmeticError, ValueError, RecursionError):
            # Others may write into a flight what no autoscaler does, numbers that are none too.
            self._missing += 1
            if known is not None:
                known.is_whole = False

    def _decide(self, known: _Deciding, record: Decided, time: float) -> None:
        made = known.policy.decide(record.observation)
        known.time, known.pools, known.targets = time, record.observation.pools, made
        why = "" if known.is_whole else BEFORE
        for pool in sorted(made.keys() & record.targets.keys()):
            self._decisions += 1
            if made[pool] != record.targets[pool]:
                self._differing.append(Compared(time, pool, record.targets[pool], made[pool], why))

    @property
    def _unexplained(self) -> list[Compared]:
        return [one for one in self._differing if not one.why]

    @property
    def is_as_recorded(self) -> bool:
        """True if every target came out as on record, or is explained."""
        return not self._unexplained

    def load(self) -> dict[str, float]:
        """Nothing: it is routers that place requests."""
        return {}

    def bars(self) -> list[tuple[str, float, str]]:
        """Nothing, likewise."""
        return []

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain values."""
        return {
            "decisions": self._decisions,
            "same": self._decisions - len(self._differing),
            "explained": Counter(one.why for one in self._differing if one.why),
            "unexplained": [msgspec.to_builtins(one._asdict()) for one in self._unexplained],
            "missing": self._missing,
            "pools": [
                {
                    "autoscaler": one.name,
                    "time": one.time,
                    "pool": pool,
                    "ready": one.pools[pool].ready,
                    "draining": one.pools[pool].draining,
                    "desired": target.desired,
                    "reason": target.reason,
                }
                for one in self._deciding.values()
                for pool, target in one.targets.items()
            ],
        }

    def lines(self) -> list[str]:
        """The outcome for people; none where no autoscaler is on record."""
        if not self._decisions:
            return []
        same = self._decisions - len(self._differing)
        lines = [f"{same} of {self._decisions} targets of autoscalers as on record"]
        explained = Counter(one.why for one in self._differing if one.why)
        lines += [f"{count} otherwise: {why}" for why, count in explained.items()]
        for one in self._unexplained[:MOST_SHOWN]:
            lines.append(
                f"{one.pool}: {one.recorded.desired} ({one.recorded.reason}), now "
                f"{one.made.desired} ({one.made.reason})"
            )
        if (more := len(self._unexplained) - MOST_SHOWN) > 0:
            lines.append(f"{more} more are otherwise")
        return lines

    def print_state(self) -> None:
        """Print the targets that were decided last."""
        for one in self._deciding.values():
            if one.targets:
                terminal.print_table(
                    ("POOL", "READY", "DESIRED", "REASON"),
                    [
                        (
                            terminal.plain(pool),
                            str(one.pools[pool].ready),
                            str(target.desired),
                            terminal.plain(target.reason),
                        )
                        for pool, target in sorted(one.targets.items())
                    ],
                )
                click.echo(
                    terminal.printable(f"{one.name} decided so at {terminal.utc_time(one.time)}")
                )

    def print_request(self) -> None:
        """Nothing: no request is asked for here."""
