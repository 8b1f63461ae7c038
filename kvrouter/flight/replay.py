"""Decisions of routers, made again by the scheduler that made them, from what is on their tapes.

A tape that is read from its beginning gives the same decisions. One that is read from the middle
on, or that has a gap, begins with a scheduler that knows nothing: for some time its decisions may
differ for what happened before, and are counted apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus import DynbusError
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.routing import tape
from dynbus.kvrouter.routing.active_load import RankLoad
from dynbus.kvrouter.routing.config import RouterConfig, RouterSettings, configured
from dynbus.kvrouter.routing.decision import Decision
from dynbus.kvrouter.routing.policies import COST_FUNCTIONS
from dynbus.kvrouter.routing.profiles import InstanceProfile
from dynbus.kvrouter.routing.queue import SchedulingRequest, Ticket
from dynbus.kvrouter.routing.requests import Constraints
from dynbus.kvrouter.routing.scheduler import KvScheduler, SchedulerStatistics
from dynbus.kvrouter.routing.shared_load import LoadChanges, SharedLoad, decode_message
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness
from dynbus.kvrouter.stream.summary import CachesAbroad

WARM_AFTER: Final = 600.0
"""Seconds after which a scheduler that began with nothing is to decide as the one on record."""

MOST_PROMPTS: Final = 4096
"""Prompts of which it is remembered what the index said."""

BEFORE: Final = "what happened before the recording is not known"
SAMPLED: Final = "a share of the requests alone is on record"
NO_POLICY: Final = "the policy on record is none of dynbus's own: name one by --set policy="
UNKNOWN: Final = "it refers to records that are missing"
WAITS: Final = "waits"


class TapeEntry(Protocol):
    """A record of a flight as it is read; see `Entry` of the bus."""

    @property
    def recorder(self) -> str: ...
    @property
    def missing(self) -> int: ...
    @property
    def time(self) -> float: ...
    @property
    def at(self) -> float: ...
    @property
    def kind(self) -> str: ...
    @property
    def body(self) -> bytes | msgspec.Raw: ...


class Compared(NamedTuple):
    """A request of which came something else than on record.

    Attributes:
        time: Unix seconds.
        target: `namespace.component`.
        request: digest of its id.
        recorded, made: where it went, and where it goes now; or that it waits, or the code of what
            refused it.
        why: the reason, where one is known; empty for none.
    """

    time: float
    target: str
    request: int
    recorded: str
    made: str
    why: str


@dataclass(slots=True)
class Replayed:
    """The outcome of a replay.

    Attributes:
        decisions: that were made again.
        differing: those that came out otherwise.
        left_out: requests that could not be decided again, by the reason.
        missing: records that are not there.
        reuse, recorded_reuse: tokens that the chosen ranks were taken to hold, now and on record.
        placed, recorded_placed: how many requests went to each rank, now and on record.
    """

    decisions: int = 0
    differing: list[Compared] = field(default_factory=list[Compared])
    left_out: Counter[str] = field(default_factory=Counter[str])
    missing: int = 0
    reuse: int = 0
    recorded_reuse: int = 0
    placed: Counter[str] = field(default_factory=Counter[str])
    recorded_placed: Counter[str] = field(default_factory=Counter[str])

    @property
    def unexplained(self) -> list[Compared]:
        """Those that came out otherwise for no known reason."""
        return [each for each in self.differing if not each.why]


class Explained(NamedTuple):
    """A decision that was made again for a request that was asked for.

    Attributes:
        time: Unix seconds.
        target: `namespace.component`.
    """

    time: float
    target: str
    decision: Decision


class RouterState(NamedTuple):
    """A router as its tape has it so far.

    Attributes:
        time: of its last record, in Unix seconds: what it has not recorded since is not known.
        loads: of each rank that requests were offered last.
    """

    target: str
    time: float
    statistics: SchedulerStatistics
    loads: dict[Rank, RankLoad]


class Replay:
    """Makes the decisions of routers again, record by record.

    Args:
        settings: fields of `RouterConfig` that are to be others than those on record.
        requests: digests of the ids of requests whose decisions are kept.

    Attributes:
        explained: the decisions of these requests.

    Raises:
        ConfigError: one is not usable.
    """

    def __init__(
        self, settings: RouterSettings | None = None, requests: Set[int] = frozenset()
    ) -> None:
        self.outcome = Replayed()
        self.explained: list[Explained] = []
        self._requests = requests
        self._settings = settings or {}
        configured(None, self._settings)
        self._tapes: dict[str, _TapeReader] = {}

    def __repr__(self) -> str:
        return f"<Replay [{self.outcome.decisions} decisions of {len(self._tapes)} routers]>"

    @property
    def states(self) -> list[RouterState]:
        """The routers whose tapes are understood."""
        return [state for each in self._tapes.values() if (state := each.state) is not None]

    def take(self, entry: TapeEntry) -> None:
        """Take the next record of a flight; one that is of no router is passed over.

        Raises:
            ConfigError: a policy cannot be loaded.
        """
        outcome = self.outcome
        reader = self._tapes.get(entry.recorder)
        record = read_record(entry)
        if record is None and reader is None:
            return
        # Also what is no router's may be the first behind a gap in its tape.
        missing = entry.missing + (record is None and entry.kind in _KINDS)
        outcome.missing += missing
        if reader is None:
            reader = _TapeReader(self._settings, outcome, self._requests, self.explained)
            self._tapes[entry.recorder] = reader
        elif missing:
            reader.lose()
        if record is None:
            return
        try:
            reader.take(record, entry)
        except ValueError:
            # A later version has it otherwise, or it is damaged.
            outcome.missing += 1
            reader.lose()


_Record: TypeAlias = (
    tape.Began
    | tape.Profiled
    | tape.Offered
    | tape.Submitted
    | tape.Released
    | tape.Withdrawn
    | tape.FirstItem
    | tape.Grown
    | tape.Ended
    | tape.Reused
    | tape.Elsewhere
    | tape.Refreshed
    | tape.Gone
    | tape.PolicyChanged
    | tape.LoadHeard
    | tape.LoadExpired
)
_RECORDS: Final = msgspec.msgpack.Decoder(_Record)
_KINDS: Final = frozenset(one.__struct_config__.tag for one in get_args(_Record))


def read_record(entry: TapeEntry) -> Any:
    """The record of a router's tape; None for any other, and for one that is damaged."""
    if not entry.kind.startswith(tape.KIND):
        return None
    try:
        return _RECORDS.decode(entry.body)
    except (msgspec.DecodeError, RecursionError):
        # A later version may have further kinds.
        return None


class _Recorded(Random):
    """Draws what is on record, where it is among what may be drawn.

    Attributes:
        position: of the candidate that was chosen.
    """

    position = -1

    def choice(self, seq: Any) -> Any:
        return self.position if self.position in seq else super().choice(seq)

    def choices(self, population: Any, *args: Any, **given: Any) -> list[Any]:
        if self.position in population:
            return [self.position]
        return super().choices(population, *args, **given)


class _ReplayedScheduler(KvScheduler):
    """A scheduler that draws for each request what is on record of it.

    Attributes:
        positions: of the candidates that were chosen, by the ids of their requests.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        load: SharedLoad,
        follower: _RecordedCaches | None,
        abroad: CachesAbroad,
    ) -> None:
        self.positions: dict[str, int] = {}
        # Seeded: what is not on record is drawn the same each time.
        self._drawn = _Recorded(0)
        super().__init__(config, load=load, follower=follower, abroad=abroad, random=self._drawn)

    def _decide(self, request: SchedulingRequest, now: float) -> Decision:
        self._drawn.position = self.positions.pop(request.request_id, -1)
        return super()._decide(request, now)


class _RecordedCaches:
    """A `Follower` that says of prompts what the one on record said."""

    def __init__(self) -> None:
        self.sequence = 0
        self._overlaps: dict[tape.SeenPrompt, list[tape.SeenOverlap]] = {}

    @property
    def position(self) -> _RecordedCaches:
        return self

    def hear(self, seen: tape.Seen) -> None:
        """Say this from now on."""
        self.sequence = seen.sequence
        if len(self._overlaps) > MOST_PROMPTS:
            self._overlaps.clear()
        # With other settings a request may be decided later than on record.
        self._overlaps.update(seen.overlaps)

    def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
        # Nothing of what the one on record was not asked.
        seen = self._overlaps.get(tape.seen_prompt(block_hashes), ())
        return {Rank(instance, dp_rank): Overlap(*tiers) for instance, dp_rank, *tiers in seen}

    def awareness(self) -> CacheAwareness:
        return CacheAwareness(AwarenessLevel.EXACT)

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """Do nothing: the next message of the rank is on record."""


class _RecordedAbroad(CachesAbroad):
    """Caches of other regions that reach as far as is on record."""

    def __init__(self) -> None:
        super().__init__()
        self._reached: dict[tuple[tape.SeenPrompt, Rank], int] = {}

    def hear(self, seen: tape.Seen) -> None:
        """Say this from now on."""
        self._reached = {
            (prompt, Rank(instance, dp_rank)): blocks
            for prompt, instance, dp_rank, blocks in seen.abroad
        }

    def reach(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> int:
        return self._reached.get((tape.seen_prompt(sequence_hashes), rank), 0)


class _TapeReader:
    """Makes the decisions of one router again."""

    def __init__(
        self,
        settings: RouterSettings,
        outcome: Replayed,
        asked_for: Set[int],
        explained: list[Explained],
    ) -> None:
        self._settings = settings
        self._outcome = outcome
        self._asked_for = asked_for
        self._explained = explained
        self._scheduler: _ReplayedScheduler | None = None
        self._target = ""
        self._is_loadable = True
        # Of a scheduler that began with nothing; from then on it is to know all that counts.
        self._warm_at = math.inf
        # Until then it does not know what other requests have done that are on no record.
        self._sampled_until = -math.inf
        self._caches = _RecordedCaches()
        self._abroad = _RecordedAbroad()
        self._load: SharedLoad | None = None
        # The routers that told their load since it began.
        self._heard: set[str] = set()
        self._profiles: dict[int, InstanceProfile] = {}
        self._offered: dict[int, list[InstanceProfile]] = {}
        # What was offered last before the tape began anew.
        self._latest: list[InstanceProfile] = []
        # Of the last record, in Unix seconds.
        self._time = 0.0
        self._prompts = tape.TapedPrompts()
        # The number that a decision has now, by that on record.
        self._numbers: dict[int, int] = {}
        self._waiting: dict[int, Ticket] = {}
        self._serials: dict[Ticket, int] = {}
        # Of requests that wait on record: the digests of their ids.
        self._requests: dict[int, int] = {}
        # With other settings, by serials: what wait now, by the numbers of their decisions on
        # record and the digests of their ids; and what wait on record, and are decided now.
        self._behind: dict[int, tuple[int, int]] = {}
        self._early: dict[int, Decision | DynbusError] = {}

    @property
    def state(self) -> RouterState | None:
        """The router as far as its tape was read; None where that is not understood."""
        scheduler, load = self._scheduler, self._load
        if scheduler is None or load is None:
            return None
        latest = next(reversed(self._offered.values()), self._latest)
        loads = {rank: load.of(rank) for profile in latest for rank in profile.ranks}
        return RouterState(self._target, self._time, scheduler.statistics(), loads)

    def lose(self) -> None:
        """Records are missing: the scheduler no longer knows what the one on record knew."""
        self._scheduler = None

    def take(self, record: Any, entry: TapeEntry) -> None:
        self._time = entry.time
        if isinstance(record, tape.Began):
            self._begin(record, entry)
            return
        scheduler = self._scheduler
        if scheduler is None:
            if isinstance(record, tape.Submitted):
                self._outcome.left_out[UNKNOWN if self._is_loadable else NO_POLICY] += 1
            return
        now = entry.at
        match record:
            case tape.Profiled():
                self._profiles[record.number] = _profile(record)
            case tape.Offered():
                known = [self._profiles[each] for each in record.profiles if each in self._profiles]
                self._offered[record.number] = known
            case tape.Submitted():
                self._submit(scheduler, record, entry)
            case tape.Released():
                self._release(scheduler, record, entry)
            case tape.Withdrawn():
                self._withdraw(scheduler, record.serial, now)
            case tape.FirstItem():
                scheduler.first_item(self._number(record.number), now)
            case tape.Grown():
                scheduler.grown(self._number(record.number), record.tokens)
            case tape.Ended():
                number = self._numbers.pop(record.number, 0)
                scheduler.ended(number, now, record.error)
                for serial in [of for of, one in self._behind.items() if one[0] == record.number]:
                    self._withdraw(scheduler, serial, now)
            case tape.Reused():
                scheduler.note_reused(self._number(record.number), record.tokens, now)
            case tape.Elsewhere():
                hashes = np.frombuffer(record.blocks, "<u8").tolist()
                scheduler.note_elsewhere(Rank(record.instance, record.dp_rank), hashes, now)
            case tape.Refreshed():
                scheduler.refresh(self._offered.get(record.offered, []))
            case tape.Gone():
                if record.for_good:
                    scheduler.remove_instance(record.instance)
                else:
                    scheduler.forget_cache(record.instance)
            case tape.PolicyChanged():
                self._use_policy(scheduler, record.policy)
            case tape.LoadHeard():
                self._hear_load(record.data, now)
            case _:
                if self._load is not None:
                    self._load.expire(now)
        if self._settings:
            self._release_now(scheduler, now)

    def _hear_load(self, data: bytes, now: float) -> None:
        load = self._load
        if load is None:
            return
        message = decode_message(data)
        may_be_older = self._warm_at > -math.inf and message.router not in self._heard
        if may_be_older and isinstance(message, LoadChanges):
            # It has told its set before the tape began.
            load.assume(message.router, message.first, now)
        self._heard.add(message.router)
        load.receive(data, now)

    def _begin(self, began: tape.Began, entry: TapeEntry) -> None:
        if self._offered:
            self._latest = next(reversed(self._offered.values()))
        self._profiles.clear()
        self._offered.clear()
        self._prompts.clear()
        if self._scheduler is not None and not began.is_new:
            return
        self._target = began.target
        self._numbers.clear()
        self._waiting.clear()
        self._serials.clear()
        self._requests.clear()
        self._behind.clear()
        self._early.clear()
        self._warm_at = -math.inf if began.is_new else entry.at + WARM_AFTER
        # A file may come from anywhere: it names no code that is run here.
        self._is_loadable = began.policy in COST_FUNCTIONS or "policy" in self._settings
        if not self._is_loadable:
            self._scheduler = None
            return
        config = RouterConfig(
            policy=began.policy if began.policy in COST_FUNCTIONS else "kv",
            temperature=began.temperature,
            queue_threshold=began.queue_threshold,
            queue_limit=began.queue_limit,
            session_ttl=began.session_ttl,
            session_overload=began.session_overload,
            prediction_ttl=began.prediction_ttl,
            approximate_ttl=began.approximate_ttl,
            exact=began.is_exact,
        )
        self._load = SharedLoad(began.router or "alone")
        self._heard.clear()
        self._scheduler = _ReplayedScheduler(
            configured(config, self._settings),
            load=self._load,
            follower=self._caches if began.is_exact else None,
            abroad=self._abroad,
        )

    def _use_policy(self, scheduler: KvScheduler, policy: str) -> None:
        if "policy" in self._settings:
            return
        if policy not in COST_FUNCTIONS:
            self._is_loadable = False
            self._scheduler = None
            return
        scheduler.use_policy(policy)

    def _number(self, recorded: int) -> int:
        """The number of a decision now; 0 for one that was not made again."""
        return self._numbers.get(recorded, 0)

    # Requests -----------------------------------------------------------------------------

    def _submit(
        self, scheduler: _ReplayedScheduler, record: tape.Submitted, entry: TapeEntry
    ) -> None:
        request = self._request(record)
        if request is None:
            self._outcome.left_out[UNKNOWN] += 1
            return
        serial, chosen = record.serial, record.chosen
        if serial in self._waiting:
            raise ValueError(f"the tape has two requests {serial}")
        if record.one_in > 1:
            self._sampled_until = entry.at + WARM_AFTER
        self._hear(scheduler, record.seen, {serial: chosen})
        made: Decision | Ticket | DynbusError
        try:
            made = scheduler.submit(request, entry.at)
        except DynbusError as error:
            made = error
        if isinstance(made, Ticket):
            self._waiting[serial] = made
            self._serials[made] = serial
        if chosen is None and not record.refused:
            self._requests[serial] = record.request
            if self._settings and isinstance(made, Decision):
                self._early[serial] = made
                return
        self._compare(serial, chosen, record.refused, made, record.request, entry)
        if self._load is not None:
            # What it would tell others.
            for _ in self._load.outgoing(entry.at):
                pass

    def _request(self, record: tape.Submitted) -> SchedulingRequest | None:
        profiles = self._offered.get(record.offered)
        shape = self._prompts.read(record)
        if shape is None or profiles is None:
            return None
        return SchedulingRequest(
            str(record.serial),
            shape,
            profiles,
            record.arrived,
            record.attempt,
            record.session,
            Constraints(
                frozenset(record.required),
                record.preferred,
                record.lora_name,
                record.lora_required,
            ),
            hops=record.hops,
        )

    def _hear(
        self,
        scheduler: _ReplayedScheduler,
        seen: tape.Seen,
        chosen: Mapping[int, tape.Chosen | None],
    ) -> None:
        """Have the scheduler know and draw what is on record of requests, by their serials."""
        self._caches.hear(seen)
        self._abroad.hear(seen)
        if not self._settings:
            scheduler.positions = {str(of): one.position for of, one in chosen.items() if one}

    def _release(
        self, scheduler: _ReplayedScheduler, record: tape.Released, entry: TapeEntry
    ) -> None:
        self._hear(scheduler, record.seen, {of: chosen for of, chosen, _ in record.outcomes})
        self._release_now(scheduler, entry.at)
        for serial, chosen, refused in record.outcomes:
            if serial not in self._requests:
                # It came before the tape was understood.
                continue
            made = self._early.pop(serial, None) or self._waiting.get(serial)
            if made is not None:
                request = self._requests.pop(serial)
                self._compare(serial, chosen, refused, made, request, entry)

    def _release_now(self, scheduler: _ReplayedScheduler, now: float) -> None:
        """Let those go on that need not wait now."""
        if not self._waiting:
            return
        for ticket, made in scheduler.release(now):
            serial = self._serials.pop(ticket)
            del self._waiting[serial]
            if serial not in self._behind:
                self._early[serial] = made
            elif isinstance(made, Decision):
                recorded, request = self._behind.pop(serial)
                self._explain(request, made, self._time)
                self._count(made, recorded)

    def _withdraw(self, scheduler: _ReplayedScheduler, serial: int, now: float) -> None:
        """Nobody wants a request any longer, on record."""
        self._requests.pop(serial, None)
        self._behind.pop(serial, None)
        ticket = self._waiting.pop(serial, None)
        if ticket is not None:
            del self._serials[ticket]
            scheduler.withdraw(ticket)
        made = self._early.pop(serial, None)
        if isinstance(made, Decision):
            scheduler.ended(made.number, now, "Cancelled")

    def _explain(self, request: int, made: Decision, at: float) -> None:
        """Keep a decision if it is of a request that is asked for."""
        if request in self._asked_for:
            self._explained.append(Explained(at, self._target, made))

    def _count(self, made: Decision, recorded: int) -> None:
        """Count a decision, which has the number `recorded` on record; 0 for none."""
        self._outcome.reuse += made.expected_reuse
        self._outcome.placed[_placed(made)] += 1
        if recorded:
            self._numbers[recorded] = made.number

    def _compare(
        self,
        serial: int,
        chosen: tape.Chosen | None,
        refused: str,
        made: Decision | Ticket | DynbusError,
        request: int,
        entry: TapeEntry,
    ) -> None:
        outcome = self._outcome
        recorded = refused or (_place(chosen) if chosen else WAITS)
        if isinstance(made, Decision):
            now = _placed(made)
            self._explain(request, made, entry.time)
            self._count(made, chosen.number if chosen else 0)
        elif isinstance(made, Ticket):
            now = WAITS
            if chosen is not None:
                self._behind[serial] = chosen.number, request
        else:
            now = made.code
        if chosen is not None:
            outcome.recorded_reuse += chosen.reuse
            outcome.recorded_placed[recorded] += 1
        outcome.decisions += 1
        if now != recorded:
            why = BEFORE if entry.at < self._warm_at else ""
            if entry.at < self._sampled_until:
                why = SAMPLED
            outcome.differing.append(
                Compared(entry.time, self._target, request, recorded, now, why)
            )


def _place(chosen: tape.Chosen) -> str:
    return f"{chosen.instance}/{chosen.dp_rank}"


def _placed(decision: Decision) -> str:
    return f"{decision.chosen.instance}/{decision.chosen.dp_rank}"


def _profile(record: tape.Profiled) -> InstanceProfile:
    return InstanceProfile(
        record.instance,
        record.block_size,
        record.total_blocks,
        record.max_batched_tokens,
        tuple(Rank(record.instance, rank) for rank in range(record.dp_size)),
        record.has_events,
        record.fetches,
        record.lends,
        record.model,
        "",
        frozenset(record.tags),
        frozenset(record.loras),
        record.zone,
        record.region,
        record.routes,
    )
