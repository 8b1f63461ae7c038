"""The stream of a namespace's KV-cache events: its settings, and how its messages are read.

Nothing in it is ever purged. What is over a limit goes, oldest first; readers see that by the
numbering of the events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Final, NamedTuple

from dynbus import ConfigError
from dynbus.kvrouter.events import HEADER, EventBatch, InvalidEvents, decode_events
from dynbus.kvrouter.names import AWARENESS, PUBLISHED, kv_event_stream, kv_event_subject
from dynbus.kvrouter.radix.index import Applied, MessageOutcome, RadixIndex, Rank
from dynbus.spi import JetStream, StoredMessage, StreamConfig, StreamLimits, check_token

from .awareness import decode_awareness, encode_awareness

DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024
DEFAULT_MAX_AGE: Final = 24 * 3600.0
DUPLICATE_WINDOW: Final = 120.0
CLOCK_ALLOWANCE: Final = 24 * 3600 * 10**9
"""Nanoseconds by which an epoch may lie ahead of the time at which the server stored its message.
A clock that is set wrong is seldom off by more, and one that claims more would never be outdone by
a true epoch."""
UNREADABLE: Final = "a message that this version cannot read"

_TOKENS: Final = 5
_UNUSED: Final = (MessageOutcome.DUPLICATE, MessageOutcome.STALE)


@dataclass(frozen=True, slots=True)
class EventStream:
    """The settings of a namespace's stream of events; the same for all who publish or follow there.

    Attributes:
        max_bytes: of all messages.
        max_age: seconds.
        in_memory: whether they are lost with the server, instead of stored in files.
        replicas: how many servers of a cluster keep them at most; a stream that has fewer gets
            more as soon as there are servers for them. None for the `replicas` of the bus.

    Raises:
        ConfigError: the namespace is no legal name, or a limit is not a number above 0.
    """

    namespace: str
    max_bytes: int = DEFAULT_MAX_BYTES
    max_age: float = DEFAULT_MAX_AGE
    in_memory: bool = False
    replicas: int | None = None

    def __post_init__(self) -> None:
        check_token("namespace", self.namespace)
        for name, value in (
            ("max_bytes", self.max_bytes),
            ("max_age", self.max_age),
            ("replicas", self.replicas),
        ):
            # Not a number is not above 0 either.
            if value is not None and not (value > 0 and isfinite(value)):
                raise ConfigError(f"event stream of {self.namespace}: {name} = {value}: give > 0")

    @property
    def name(self) -> str:
        return kv_event_stream(self.namespace)

    @property
    def config(self) -> StreamConfig:
        return StreamConfig(
            name=self.name,
            subjects=(kv_event_subject(self.namespace, "*", "*", "*"),),
            limits=StreamLimits(
                max_bytes=self.max_bytes,
                max_age=self.max_age,
                # The server takes no window that is longer than the maximum age.
                duplicate_window=min(DUPLICATE_WINDOW, self.max_age),
            ),
            in_memory=self.in_memory,
            replicas=self.replicas,
            description="dynbus: KV-cache events",
        )


async def ensure_stream(
    jetstream: JetStream, stream: EventStream, *, probe: str = "", timeout: float = 5.0
) -> None:
    """Make the stream, or check that the one that is there fits.

    Args:
        probe: as `JetStream.ensure_stream` takes it.

    Raises:
        ConfigError: a stream of this name has other settings.
        Unavailable: JetStream does not answer.
    """
    wanted = stream.config
    await jetstream.ensure_stream(wanted, probe=probe, timeout=timeout)
    existing = await jetstream.stream_config(wanted.name, timeout=timeout)
    listed = wanted.differences(existing, "in_memory")
    if listed:
        raise ConfigError(
            f"stream {wanted.name} exists with {', '.join(listed)}: give EventStream its settings, "
            f"or change the stream with `nats stream edit {wanted.name}`; storage and retention "
            "can only be changed by deleting it, after which every instance sends its blocks again"
        )


def latest_epoch(stored: float) -> int:
    """The highest epoch that a message can have.

    Args:
        stored: Unix seconds at which the server stored it.
    """
    return int(stored * 1e9) + CLOCK_ALLOWANCE


class EpochClock:
    """Event epochs, each above all before in this process.

    What lies ahead of the clock by more than `CLOCK_ALLOWANCE` does not count: no index takes
    an epoch above it.

    Args:
        time_ns: Unix nanoseconds.
    """

    def __init__(self, time_ns: Callable[[], int]) -> None:
        self._time_ns = time_ns
        self._last = 0
        self._lock = threading.Lock()

    def next(self, above: int = 0) -> int:
        """An epoch above `above` and above all that were given out."""
        with self._lock:
            now = self._time_ns()
            known = [one for one in (self._last, above) if one <= now + CLOCK_ALLOWANCE]
            self._last = max([now, *(one + 1 for one in known)])
            return self._last

    def is_credible(self, event_epoch: int) -> bool:
        """True if an epoch can be the one of a message that is stored by now."""
        return event_epoch <= self._time_ns() + CLOCK_ALLOWANCE


class StoredEvents(NamedTuple):
    """A message of the stream that counts, read once.

    Attributes:
        time: Unix seconds at which the server stored it.
        stated: what the rank says of how far its events can be relied on; empty for exact.
        published: Unix seconds at which the first of them was handed over, as the publisher wrote
            it; empty where it did not.
    """

    rank: Rank
    batch: EventBatch
    time: float
    stated: str
    published: str


class RefusedEvents(NamedTuple):
    """A message on the subject of a rank that does not count, and why."""

    rank: Rank
    why: str


@lru_cache(maxsize=1 << 14)
def subject_rank(subject: str) -> Rank | None:
    """The rank that a subject of events names; None if it names none."""
    tokens = subject.split(".")
    if len(tokens) != _TOKENS:
        return None
    try:
        check_token("instance", tokens[3])
    except ConfigError:
        return None
    dp_rank = int(tokens[4]) if tokens[4].isascii() and tokens[4].isdecimal() else -1
    return Rank(tokens[3], dp_rank) if tokens[4] == str(dp_rank) else None


def read_events(message: StoredMessage) -> StoredEvents | RefusedEvents | None:
    """The events of a message of the stream; None if its subject names no rank.

    A function of the stored message alone, so that every index that follows refuses the same.
    """
    rank = subject_rank(message.subject)
    if rank is None:
        return None
    if len(message.data) < HEADER.size:
        return RefusedEvents(rank, "a message that is shorter than a header")
    try:
        batch = decode_events(message.data)
    except InvalidEvents:
        return RefusedEvents(rank, UNREADABLE)
    if batch.dp_rank != rank.dp_rank:
        # A publisher here speaks for this subject's rank alone.
        return RefusedEvents(rank, f"a message of rank {batch.dp_rank}")
    ahead = batch.event_epoch - latest_epoch(message.time)
    if ahead > 0:
        return RefusedEvents(
            rank,
            f"an epoch {ahead / 1e9:.0f} s further ahead of the server's clock than is allowed: "
            "set the clock of its machine",
        )
    stated = message.headers.get(AWARENESS, "")
    return StoredEvents(
        rank,
        batch,
        message.time,
        encode_awareness(decode_awareness(stated)) if stated else "",
        message.headers.get(PUBLISHED, ""),
    )


def apply_events(index: RadixIndex, events: StoredEvents) -> Applied:
    """Apply events to an index, with what their rank says of how far they can be relied on.

    Where the server's clock was set back, the index may have an epoch of the rank that no message
    can have any longer. Its instance is forgotten then: nothing that the rank says would count
    until the clock is there again.
    """
    rank, batch = events.rank, events.batch
    known = index.ranks.get(rank)
    if known is not None and batch.event_epoch < known.event_epoch > latest_epoch(events.time):
        index.remove_instance(rank.instance)
    applied = index.apply_batch(rank, batch)
    if applied.verdict not in _UNUSED:
        index.ranks[rank].stated = events.stated
    return applied
