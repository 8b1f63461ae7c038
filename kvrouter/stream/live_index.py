"""An index with what is known of its ranks: who is alive, who lacks blocks, who is to be asked.

`LiveIndex` decides, without I/O or clock: times are given, of one monotonic clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from dynbus.kvrouter.events import CacheDigest
from dynbus.kvrouter.radix.index import MessageOutcome, RadixIndex, Rank
from dynbus.spi import StoredMessage

from .awareness import CacheAwareness, decode_awareness
from .digest import Comparison, IndexCheck
from .event_stream import RefusedEvents, apply_events, read_events
from .membership import QUIET_AFTER, Membership
from .resync import ResyncPlan, ResyncRequest

logger = logging.getLogger(__name__)

WINDOW: Final = 4096
"""Messages that are looked back at."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """Seconds from the hand-over to the publisher to the index, over the last messages.

    Clocks of two machines are compared: what they differ by is in it.
    """

    messages: int = 0
    p50: float = 0.0
    p99: float = 0.0
    worst: float = 0.0

    @classmethod
    def of(cls, ages: Iterable[float]) -> Staleness:
        """The percentiles of some ages; zeros of none."""
        ordered = sorted(ages)
        if not ordered:
            return cls()
        last = len(ordered) - 1
        return cls(len(ordered), ordered[last // 2], ordered[round(last * 0.99)], ordered[-1])


class LiveIndex:
    """Applies the messages of a stream to an index, and finds out what the index lacks.

    What the index holds is a function of the messages alone, but for instances that are gone.

    Args:
        name: for the log.
        on_need: called when a rank is in need, perhaps not for the first time.

    Attributes:
        index: another one after `begin_anew`.
        plan, members, check: who is asked when, who is there, and what digests have shown.
        ages: seconds, of the last messages when they were applied.
        refused: messages that could not be used, and times of publishing that are no number.
    """

    def __init__(
        self, name: str, index: RadixIndex, plan: ResyncPlan, on_need: Callable[[], None]
    ) -> None:
        self.index = index
        self.plan = plan
        self.members = Membership()
        self.check = IndexCheck()
        self.ages: deque[float] = deque(maxlen=WINDOW)
        self.refused = 0
        self._name = name
        self._on_need = on_need
        self._why_refused: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<LiveIndex {self._name} [{len(self.index.ranks)} ranks, {len(self.plan)} in need]>"

    # Messages -------------------------------------------------------------------------

    def apply(self, message: StoredMessage, now: float, unix_now: float, *, is_live: bool) -> None:
        """Take in a message of the stream.

        Args:
            unix_now: Unix seconds.
            is_live: whether it is read as it comes, and was not in the stream before.
        """
        events = read_events(message)
        if events is None:
            self.refused += 1
            return
        if isinstance(events, RefusedEvents):
            self._refuse(events, now)
            return
        rank, batch = events.rank, events.batch
        before = self.index.ranks.get(rank)
        applied = apply_events(self.index, events)
        if applied.verdict is MessageOutcome.STALE:
            if self.check.note_stale(rank):
                self.need(rank, "stale", now)
            return
        self.check.note_current(rank)
        # Of what is live the age is nothing, whatever the server's clock says.
        age = 0.0 if is_live else max(0.0, unix_now - events.time)
        self.members.heard(rank, now, age=age)
        is_new = self.index.ranks[rank] is not before
        if is_new and not batch.first_id:
            self.plan.answer(rank)
        elif applied.needs_resync or is_new:
            verdict = "joined late" if is_new else applied.verdict.value.replace("_", " ")
            self.need(rank, verdict, now, is_lost=applied.verdict is MessageOutcome.GAP)
        digest = batch.closing_digest
        if digest is not None and applied.verdict is not MessageOutcome.DUPLICATE:
            self._compare(rank, digest, now)
        if is_live and events.published:
            self._note_staleness(events.published, unix_now)

    def _refuse(self, events: RefusedEvents, now: float) -> None:
        """A message of a rank cannot be used: the rank may hold something else than is known."""
        rank, why = events
        self.refused += 1
        if rank.instance not in self._why_refused:
            logger.warning("%s: events of %s are refused: %s", self._name, rank, why)
        self._why_refused[rank.instance] = why
        if rank not in self.index.ranks and rank not in self.plan:
            # It stays unknown: an instance could have 65,536 of them asked.
            return
        if self.plan.is_asked(rank):
            self.plan.answer(rank)
        self.need(rank, why, now)

    def _compare(self, rank: Rank, digest: CacheDigest, now: float) -> None:
        is_doubted = rank in self.plan
        outcome = self.check.compare(self.index, rank, digest, now, is_doubted=is_doubted)
        if outcome is Comparison.AGREES or (
            # What it said again is here, but for what there is no room for.
            outcome is Comparison.EVICTED and self.plan.is_answered(rank)
        ):
            self.plan.confirm(rank)
        elif outcome not in (Comparison.EVICTED, Comparison.NOT_COMPARED):
            self.need(rank, outcome.value, now)

    def _note_staleness(self, published: str, unix_now: float) -> None:
        try:
            self.ages.append(unix_now - float(published))
        except ValueError:
            self.refused += 1

    def begin_anew(self, index: RadixIndex, now: float) -> None:
        """The stream is another one: nothing of what was read is in it, and all is asked for."""
        ranks = list(self.index.ranks)
        self.index = index
        self.check.forget_all()
        for rank in ranks:
            self.need(rank, "the stream was made again", now)

    # Ranks ----------------------------------------------------------------------------

    def need(self, rank: Rank, reason: str, now: float, *, is_lost: bool = False) -> None:
        """A rank is to say again what it holds; see `ResyncPlan.need`."""
        if rank not in self.plan:
            logger.info("%s: %s: %s", self._name, rank, reason)
        self.plan.need(rank, reason, now, is_lost=is_lost)
        self._on_need()

    @property
    def unsettled(self) -> list[Rank]:
        """Ranks of known instances that are in need."""
        is_known, silent = self.members.is_known, self.members.silent
        return [
            rank
            for rank in self.plan.ranks()
            if is_known(rank.instance) and rank.instance not in silent
        ]

    @property
    def trouble(self) -> str:
        """The trouble of one of the ranks that are in need; empty while nothing is known."""
        for rank in self.unsettled:
            if reason := self.plan.reason(rank):
                return f"{rank}: {reason}"
        return ""

    @property
    def stated(self) -> dict[str, CacheAwareness]:
        """The statements of ranks of known instances on their own events, where these are not
        `exact`."""
        return {
            str(rank): decode_awareness(state.stated)
            for rank, state in self.index.ranks.items()
            if state.stated and self.members.is_known(rank.instance)
        }

    @property
    def refusal(self) -> str:
        """The reason for which the events of one of the silent instances do not count; empty where
        none came."""
        instance = min(self._why_refused.keys() & self.members.silent, default=None)
        if instance is None:
            return ""
        return f"those of {instance} are refused, {self._why_refused[instance]}"

    def look_at_instances(self, known: Collection[str], now: float, *, can_hear: bool) -> None:
        """Forget who is gone, and find out who is too silent.

        Args:
            known: instances that have a lease.
            can_hear: whether everything that is published gets here.
        """
        present = {rank.instance for rank in self.index.ranks}
        for instance in self.members.update(known, present, now):
            self.index.remove_instance(instance)
            self.plan.forget(instance)
            self.check.forget(instance)
            self._why_refused.pop(instance, None)
        for rank in [rank for rank in self.plan.ranks() if not self.members.is_known(rank[0])]:
            if rank not in self.index.ranks:
                self.plan.forget(rank.instance)
        if not can_hear:
            self.members.not_listening()
            return
        for instance in self.members.to_ask(now):
            # Of its ranks, the one that each instance has.
            if (rank := Rank(instance, 0)) not in self.plan:
                self.need(rank, "no events", now)
        for rank in self.members.quiet(self.index.ranks, now):
            if rank not in self.plan:
                self.need(rank, f"nothing heard for {QUIET_AFTER:g} s", now)

    def requests(self, now: float) -> list[tuple[Rank, ResyncRequest]]:
        """The ranks that are to be asked now, and the questions; they count as asked."""
        requests: list[tuple[Rank, ResyncRequest]] = []
        for rank in self.plan.due(now):
            if self.members.is_known(rank.instance):
                state = self.index.ranks.get(rank)
                epoch = state.event_epoch if state is not None else 0
                requests.append((rank, ResyncRequest(epoch, self.plan.reason(rank))))
        return requests
