"""The stream of a namespace's KV-cache events: its settings, and how its messages are read.

Nothing in it is ever purged. What is over a limit goes, oldest first; readers see that by the
numbering of the events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isclose, isfinite
from typing import Final, NamedTuple

from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import TOKEN, check_token, kv_event_stream, kv_event_subject
from dynbus.bus.transport import REPLICAS, JetStream, StoredMessage, StreamConfig, StreamLimits
from dynbus.kvrouter.events import HEADER
from dynbus.kvrouter.radix.index import Applied, RadixIndex, Rank, Verdict

from .awareness import decode_awareness, encode_awareness

DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024
DEFAULT_MAX_AGE: Final = 24 * 3600.0
DUPLICATE_WINDOW: Final = 120.0
CLOCK_ALLOWANCE: Final = 24 * 3600 * 10**9
"""Nanoseconds by which an epoch may lie ahead of the time at which the server stored its message.
A clock that is set wrong is seldom off by more, and whoever claims more would never be outdone by
a true epoch."""

_TOKENS: Final = 5
_UNUSED: Final = (Verdict.DUPLICATE, Verdict.STALE, Verdict.MALFORMED)


@dataclass(frozen=True, slots=True)
class EventStream:
    """How the events of a namespace are kept; the same for all who publish or follow there.

    Attributes:
        max_bytes: of all messages.
        max_age: seconds.
        in_memory: whether they are lost with the server, instead of stored in files.
        replicas: how many servers of a cluster keep them at most; a stream that has fewer gets
            more as soon as there are servers for them.

    Raises:
        ConfigError: the namespace is no legal name, or a limit is not a number above 0.
    """

    namespace: str
    max_bytes: int = DEFAULT_MAX_BYTES
    max_age: float = DEFAULT_MAX_AGE
    in_memory: bool = False
    replicas: int = REPLICAS

    def __post_init__(self) -> None:
        check_token("namespace", self.namespace)
        for name, value in (
            ("max_bytes", self.max_bytes),
            ("max_age", self.max_age),
            ("replicas", self.replicas),
        ):
            # Not a number is not above 0 either.
            if not (value > 0 and isfinite(value)):
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


class _Setting(NamedTuple):
    name: str
    found: object
    wanted: object

    @property
    def is_met(self) -> bool:
        if isinstance(self.found, float) and isinstance(self.wanted, float):
            # The server keeps whole nanoseconds: a third of a second comes back as another float.
            return isclose(self.found, self.wanted, rel_tol=1e-12, abs_tol=2e-9)
        return self.found == self.wanted


async def ensure_stream(jetstream: JetStream, stream: EventStream, *, timeout: float = 5.0) -> None:
    """Make the stream, or check that the one that is there fits.

    Raises:
        ConfigError: a stream of this name has other settings.
        Unavailable: JetStream does not answer.
    """
    wanted = stream.config
    await jetstream.ensure_stream(wanted, timeout=timeout)
    found = await jetstream.stream_config(wanted.name, timeout=timeout)
    differing = [setting for setting in _settings(found, wanted) if not setting.is_met]
    if differing:
        listed = ", ".join(f"{name} = {has}, not {want}" for name, has, want in differing)
        raise ConfigError(
            f"stream {wanted.name} exists with {listed}: give EventStream its settings, "
            f"or change the stream with `nats stream edit {wanted.name}`; storage and retention "
            "can only be changed by deleting it, after which every instance sends its blocks again"
        )


def _settings(found: StreamConfig, wanted: StreamConfig) -> Iterator[_Setting]:
    for name in ("subjects", "in_memory", "work_queue"):
        yield _Setting(name, getattr(found, name), getattr(wanted, name))
    for name in StreamLimits._fields:
        has, want = getattr(found.limits, name), getattr(wanted.limits, name)
        yield _Setting(name, has, want)


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
        """Whether an epoch can be the one of a message that is stored by now."""
        return event_epoch <= self._time_ns() + CLOCK_ALLOWANCE


class MessageHeader(NamedTuple):
    """Whose a message says that it is, and where it stands among the rank's others."""

    dp_rank: int
    event_epoch: int
    first_id: int


def read_header(data: bytes) -> MessageHeader:
    """The header of a message that is as long as `HEADER` at least."""
    _, _, dp_rank, _, event_epoch, first_id, *_ = HEADER.unpack_from(data)
    return MessageHeader(dp_rank, event_epoch, first_id)


def subject_rank(subject: str) -> Rank | None:
    """The rank that a subject of events names; None if it names none."""
    tokens = subject.split(".")
    if len(tokens) != _TOKENS or not TOKEN.fullmatch(tokens[3]):
        return None
    dp_rank = int(tokens[4]) if tokens[4].isascii() and tokens[4].isdecimal() else -1
    return Rank(tokens[3], dp_rank) if tokens[4] == str(dp_rank) else None


def why_refused(message: StoredMessage, rank: Rank) -> str:
    """Why a message on the subject of `rank` does not count; empty when it does.

    A function of the stored message alone, so that every index that follows refuses the same.
    """
    if len(message.data) < HEADER.size:
        return "a message that is shorter than a header"
    header = read_header(message.data)
    if header.dp_rank != rank.dp_rank:
        # Whoever may publish here speaks for this subject's rank alone.
        return f"a message of rank {header.dp_rank}"
    ahead = header.event_epoch - latest_epoch(message.time)
    if ahead > 0:
        return (
            f"an epoch {ahead / 1e9:.0f} s further ahead of the server's clock than is allowed: "
            "set the clock of its machine"
        )
    return ""


def rank_of(message: StoredMessage) -> Rank | None:
    """The rank that a message's subject names, if the message may speak for it."""
    rank = subject_rank(message.subject)
    return None if rank is None or why_refused(message, rank) else rank


def forget_future(index: RadixIndex, rank: Rank, message: StoredMessage) -> None:
    """Forget a rank's instance if its epoch is one that no message can have any longer, and
    `message` has a lower one: the clock of the server was set back since.

    Nothing that the rank says would count otherwise, until the clock is there again.
    """
    state = index.ranks.get(rank)
    if state is None or state.event_epoch <= latest_epoch(message.time):
        return
    if read_header(message.data).event_epoch < state.event_epoch:
        index.remove_instance(rank.instance)


def apply_message(index: RadixIndex, rank: Rank, message: StoredMessage) -> Applied:
    """Apply a message that counts, with what it says of how far it can be relied on."""
    applied = index.apply(rank.instance, message.data)
    state = index.ranks.get(rank)
    if state is not None and applied.verdict not in _UNUSED:
        said = decode_awareness(message.headers.get(headers.KV_AWARENESS, ""))
        state.stated = encode_awareness(said)
    return applied
