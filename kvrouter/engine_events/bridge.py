"""The bridge from an engine's messages to a sink of events, without its sockets.

Each data-parallel rank is a stream of its own, numbered by itself. Whatever comes, a bridge does
not raise; what it could not use is in its status, and logged once for each reason and minute.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, Protocol

from dynbus.kvrouter.events import MAX_RANK, AllBlocksCleared, KvEvent
from dynbus.kvrouter.stream.awareness import EXACT, AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.cache_mirror import CacheMirror
from dynbus.spi import monotonic

from .messages import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
    Quarantined,
    QuarantineReason,
    decode_payload,
)
from .numbering import Arrival, Numbering
from .status import BridgeStatus, RankKnowledge, worst_level
from .translation import Translation

logger = logging.getLogger(__name__)

LOG_INTERVAL: Final = 60.0
"""Seconds between two log records for the same reason."""
EXPIRE_AFTER: Final = 30.0
"""Seconds without a connection after which what an engine held is taken for gone."""

_KINDS: Final[Mapping[type[EngineEvent], str]] = {
    EngineStored: "stored",
    EngineRemoved: "removed",
    EngineCleared: "cleared",
}
_REPLAYING: Final = "the engine's earlier messages are being read"


class KvSink(Protocol):
    """The receiver of the KV-cache events of one engine, rank by rank and in order.

    Its methods return at once: the bridge that calls them must never fall behind its engine.
    """

    def publish(self, events: Sequence[KvEvent], *, dp_rank: int) -> None:
        """Take the next events of a rank that an index can follow."""
        ...

    def reset(self, dp_rank: int) -> None:
        """Forget what was published of a rank: it is not known any longer what the rank holds."""
        ...

    def set_awareness(self, awareness: CacheAwareness, *, dp_rank: int) -> None:
        """Take how far the events of a rank can be relied on from now on."""
        ...


class EngineBridge:
    """Publishes to a sink what one engine says of its KV cache.

    Args:
        block_size: tokens of a block, as routers hash them.
        lora_names: names of the adapters that the engine gives by number only.
        expire_after: seconds for which blocks of an engine that cannot be reached are kept.
        cache: what a rank holds, where the sink has that and leaves it to the bridge to take
            events in; one of the bridge's own for each rank unless given.
    """

    def __init__(
        self,
        sink: KvSink,
        *,
        block_size: int,
        lora_names: Mapping[int, str] | None = None,
        expire_after: float = EXPIRE_AFTER,
        clock: Callable[[], float] = monotonic,
        cache: Callable[[int], CacheMirror] | None = None,
    ) -> None:
        self.sink = sink
        self.cache = cache or _own_cache
        self._block_size = block_size
        self._lora_names = lora_names
        self.expire_after = expire_after
        self.clock = clock
        self.counters = BridgeStatus()
        self._streams: dict[int | None, RankStream] = {}
        self._last_logged: dict[str, float] = {}
        self._last_event: float | None = None

    def stream(self, dp_rank: int | None = None) -> RankStream:
        """The stream of a rank; with None the rank is the one that its first batch names.

        Raises:
            ValueError: a rank does not fit 16 bits.
        """
        if dp_rank is not None and not 0 <= dp_rank <= MAX_RANK:
            raise ValueError(f"data-parallel rank {dp_rank}: give one from 0 to {MAX_RANK}")
        if dp_rank not in self._streams:
            translation = Translation(
                self._block_size, lora_names=self._lora_names, cache=self.cache(dp_rank or 0)
            )
            self._streams[dp_rank] = RankStream(self, dp_rank, translation)
        return self._streams[dp_rank]

    def report_mode(self) -> Literal["incremental", "full"]:
        """The mode that vLLM 0.28 and later is to be given with each request, at this moment, as
        `SamplingParams(extra_args={"kv_cache_report_mode": ...})`.

        It is `full` while blocks are missing here that the engine holds: then it says of each
        request which blocks it reuses. Once it evicts nothing but blocks that came since, what
        came before is either known by its use or gone, and the rank is `exact` again.
        """
        wants = [stream.ask_reports() for stream in self._streams.values()]
        return "full" if any(wants) else "incremental"

    def cleared(self) -> None:
        """The engine's prefix cache was reset: an idle engine says so only with its next step."""
        for stream in self._streams.values():
            stream.cleared()

    def status(self) -> BridgeStatus:
        """The state and the counters as of now."""
        streams = list(self._streams.values())
        aware = [(stream, stream.awareness) for stream in streams]
        reasons = [f"rank {one.dp_rank or 0}: {held.reason}" for one, held in aware if held.reason]
        level = worst_level(held.level for _, held in aware)
        if not streams:
            reasons, level = ["no engine is followed"], AwarenessLevel.DEGRADED
        translations = [stream.translation for stream in streams]
        age = None if self._last_event is None else self.clock() - self._last_event
        return replace(
            self.counters,
            level=level,
            reason="; ".join(reasons) or None,
            events=self.counters.events.copy(),
            quarantined=self.counters.quarantined.copy(),
            filtered=sum((one.filtered for one in translations), Counter[str]()),
            unknown_parents=sum(one.unknown_parents for one in translations),
            incomplete_blocks=sum(one.incomplete_blocks for one in translations),
            unknown_media=sum(one.unknown_media for one in translations),
            block_size_mismatch=next((one.mismatch for one in translations if one.mismatch), None),
            last_event_age=age,
        )

    # For its streams ------------------------------------------------------------------------

    def count_events(self, events: Sequence[EngineEvent]) -> None:
        if events:
            self.counters.events.update(_KINDS[type(event)] for event in events)
            self._last_event = self.clock()

    def quarantine(self, rank: int, quarantined: Quarantined) -> None:
        reason = quarantined.reason
        self.counters.quarantined[reason] += 1
        self.warn(
            f"quarantined: {reason}",
            f"rank {rank}: an event of the engine was not used, {quarantined} "
            f"({self.counters.quarantined[reason]} for this reason)",
        )

    def warn(self, about: str, text: str) -> None:
        """Log a warning, unless there was one about the same within `LOG_INTERVAL`."""
        now = self.clock()
        last = self._last_logged.get(about)
        if last is None or now - last >= LOG_INTERVAL:
            self._last_logged[about] = now
            logger.warning("%s", text)


def _own_cache(dp_rank: int) -> CacheMirror:
    return CacheMirror()


class RankStream:
    """The numbered messages of one rank, and what became of them.

    The reader of the engine's socket calls `connected`, then `apply` for each published message,
    and `disconnected`. When `apply` returns False, messages are missing: it asks for a replay
    (`begin_replay`, `take_replayed` for each, then `end_replay` or `fail_replay`), and calls
    `skip_to` with the message, which gives up what is still missing. After `connected` it asks
    for a replay first, or calls `cannot_replay`.
    """

    def __init__(self, bridge: EngineBridge, dp_rank: int | None, translation: Translation) -> None:
        self._bridge = bridge
        self._given_rank = dp_rank
        self._numbering = Numbering()
        self._disconnected_at: float | None = None
        self._known = RankKnowledge()
        self._is_replaying = False
        self._reported_mismatch = False
        self._reported: tuple[int, CacheAwareness] | None = None
        self.dp_rank = dp_rank
        self.translation = translation
        self._tell()

    @property
    def awareness(self) -> CacheAwareness:
        """The degree to which the events of this rank can be relied on, and why not further."""
        return self._known.awareness(self.translation)

    def _tell(self) -> None:
        """Tell the sink what has changed of that."""
        rank, sink = self.dp_rank or 0, self._bridge.sink
        now = (rank, self.awareness)
        if now == self._reported:
            return
        if self._reported is not None and self._reported[0] != rank:
            # The rank was not known, and is another one: nothing is said of that one.
            sink.set_awareness(EXACT, dp_rank=self._reported[0])
        self._reported = now
        sink.set_awareness(now[1], dp_rank=rank)

    def ask_reports(self) -> bool:
        """True if the engine is to report what it reuses; it is then expected to do so."""
        if not self._known.lacks_blocks:
            return False
        if not self._known.asks_reports:
            self._known.asks_reports = True
            self.translation.report_hits()
        return True

    def cleared(self) -> None:
        """The engine's prefix cache was reset, which its events do not say yet."""
        self.translation.translate(EngineCleared())
        self._bridge.sink.publish([AllBlocksCleared()], dp_rank=self.dp_rank or 0)
        self._tell()

    # Connection -----------------------------------------------------------------------------

    def connected(self) -> None:
        """A connection to an engine stands, perhaps to another one than before."""
        self._known.connection = self._disconnected_at = None
        self._known.behind = _REPLAYING
        self._numbering.connected()
        self._tell()

    def disconnected(self, why: str) -> None:
        """There is no connection. To be called at each vain attempt: what is known expires."""
        now = self._bridge.clock()
        if self._disconnected_at is None:
            self._disconnected_at = now
        self._known.connection = why
        expire_after = self._bridge.expire_after
        if self._numbering.last >= 0 and now - self._disconnected_at > expire_after:
            self._reset(f"{why} for {expire_after:g} s")
        self._tell()

    def cannot_replay(self) -> None:
        """After `connected`, without a way to ask: what was known may be another engine's."""
        self._known.behind = None
        if self._numbering.last >= 0:
            self._reset("the engine reconnected, and no replay endpoint is configured")
        self._tell()

    # Messages -------------------------------------------------------------------------------

    def apply(self, number: int, payload: bytes) -> bool:
        """Use a published message, unless others are missing before it: then False."""
        arrival = self._numbering.arrive(number)
        if arrival is Arrival.RESTART:
            self._reset(f"the engine's numbers began anew at {number}")
            arrival = Arrival.NEXT if number == 0 else Arrival.GAP
        if arrival is Arrival.GAP:
            self._bridge.counters.gaps += 1
            self._known.behind = _REPLAYING
        elif arrival is Arrival.NEXT:
            self._use(number, payload)
            # Nothing lies between it and what is known.
            self._known.behind = None
        self._tell()
        return arrival is not Arrival.GAP

    @property
    def last(self) -> int:
        """Number of the last message used; -1 before the first."""
        return self._numbering.last

    def skip_to(self, number: int, payload: bytes) -> None:
        """Use a message; when those before it are still missing, what was known is void."""
        first = self._numbering.last + 1
        lost = number - first
        if lost < 0:
            # The replay brought it too.
            self._tell()
            return
        if lost:
            self._bridge.counters.lost += lost
            if first:
                self._reset(f"its messages {first} to {number - 1} are lost")
            self._known.history = (
                f"messages {first} to {number - 1} of the engine are lost, and with them blocks "
                "that it may hold"
            )
        self._use(number, payload)
        if not self._is_replaying:
            self._known.behind = None
        self._tell()

    # Replay ---------------------------------------------------------------------------------

    def begin_replay(self) -> int:
        """The number from which to ask."""
        self._is_replaying = True
        self._known.behind = _REPLAYING
        self._tell()
        return self._numbering.begin_replay()

    def take_replayed(self, number: int, payload: bytes) -> bool:
        """Use a replayed message, unless others are missing before it: then False."""
        arrival = self._numbering.replay(number, payload)
        if arrival is Arrival.RESTART:
            self._reset("the engine does not have the last message that is known")
            arrival = Arrival.NEXT if number == 0 else Arrival.GAP
        if arrival is Arrival.GAP:
            return False
        if arrival is Arrival.NEXT:
            self._bridge.counters.replayed += 1
            self._use(number, payload)
        self._tell()
        return True

    def end_replay(self) -> bool:
        """The answer is complete; True when it is to be asked for once more, from 0."""
        if not self._numbering.confirmed:
            # The engine has no message of this number or above: it is another one.
            self._reset("the engine does not have the last message that is known")
            self._tell()
            return True
        if self._numbering.last < 0:
            # It has said nothing, ever.
            self._known.history = None
        self._is_replaying = False
        self._known.behind = None
        self._tell()
        return False

    def fail_replay(self, why: str) -> None:
        """There is no answer, or none that ends."""
        self._bridge.warn(f"replay: {self.dp_rank}", f"rank {self.dp_rank or 0}: {why}")
        self._is_replaying = False
        self._known.behind = why
        if not self._numbering.is_same_engine:
            self._reset(why)
            self._known.behind = None
        self._tell()

    # ----------------------------------------------------------------------------------------

    def unreadable(self, detail: str) -> None:
        """Count a message that has not even a number."""
        self._quarantine(Quarantined(QuarantineReason.MALFORMED, detail))
        self._tell()

    def _use(self, number: int, payload: bytes) -> None:
        if number == 0:
            self._known.history = None
        self._numbering.mark_used(number, payload)
        self._bridge.counters.messages += 1
        batch = decode_payload(payload)
        for quarantined in batch.quarantined:
            self._quarantine(quarantined)
        if not self._is_own(batch):
            return
        self._bridge.count_events(batch.events)
        events: list[KvEvent] = []
        translation, known = self.translation, self._known
        for event in batch.events:
            orphans = translation.unknown_parents
            try:
                events += translation.translate(event)
            except Quarantined as quarantined:
                self._quarantine(quarantined)
            if isinstance(event, EngineCleared):
                known.begin_anew(None)
            elif known.history is None:
                known.orphans += translation.unknown_parents - orphans
        if self._known.asks_reports and self.translation.turned_over:
            self._known.turned_over()
        if self.translation.mismatch is not None:
            self._refuse()
        elif events:
            self._bridge.sink.publish(events, dp_rank=self.dp_rank or 0)

    def _is_own(self, batch: EngineBatch) -> bool:
        """True if a batch is of this stream's rank.

        A rank that was given holds, since it is the one whose port is read: engines have
        reported 0 for all of them. One that was not given is that of the first batch.
        """
        if self.dp_rank is None and batch.events:
            self.dp_rank = batch.dp_rank or 0
            self.translation.cache = self._bridge.cache(self.dp_rank)
        if batch.dp_rank is None or batch.dp_rank == self.dp_rank:
            return True
        if self._given_rank is not None:
            text = f"rank {self._given_rank}: the engine calls it rank {batch.dp_rank}"
            self._bridge.warn(f"called another rank: {self._given_rank}", text)
            return True
        detail = f"a batch of rank {batch.dp_rank} in the stream of rank {self.dp_rank}"
        self._quarantine(Quarantined(QuarantineReason.WRONG_RANK, detail))
        return False

    def _quarantine(self, quarantined: Quarantined) -> None:
        # A type that is not known says nothing that was ever used.
        self._known.unread += quarantined.reason is not QuarantineReason.UNKNOWN_TYPE
        self._bridge.quarantine(self.dp_rank or 0, quarantined)

    def _refuse(self) -> None:
        if not self._reported_mismatch:
            self._reported_mismatch = True
            logger.error("rank %d: %s", self.dp_rank or 0, self.translation.mismatch)
            self._bridge.counters.resets += 1
            self._bridge.sink.reset(self.dp_rank or 0)

    def _reset(self, why: str) -> None:
        rank = self.dp_rank or 0
        self._bridge.warn(f"reset: {rank}", f"rank {rank} is forgotten: {why}")
        self._numbering.begin_anew()
        self.translation.forget()
        self._known.begin_anew(f"forgotten: {why}")
        self._reported_mismatch = False
        self._bridge.counters.resets += 1
        self._bridge.sink.reset(rank)
