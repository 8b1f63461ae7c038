"""The tape of a router: all that its scheduler is told, and what it decides, in one order.

What is on it is enough to have a scheduler decide the same again: requests by the hashes of their
blocks, what the index said of them, what other routers said of the load, and who was there. No
prompt is on it, and no name but those of components, instances, zones and policies: a request's id
is a digest; tenants, sessions, tags and adapters are digests with a key that nobody keeps.

Blocks that a prompt has in common with an earlier one are told once. From time to time a tape
begins anew, so that what is read from the middle on is understood soon.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Annotated, Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from dynbus import Context, DynbusError
from dynbus.kvrouter.hashing import hash_prefixes
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.stream.awareness import CacheAwareness
from dynbus.kvrouter.stream.summary import CachesAbroad

from .caches import Follower, StreamPosition
from .config import RouterConfig
from .cost import CostFunction, RequestShape
from .decision import Decision
from .profiles import MAX_DP_SIZE, InstanceProfile
from .queue import SchedulingRequest, Ticket
from .scheduler import KvScheduler
from .shared_load import Heard, SharedLoad

Note: TypeAlias = Callable[[msgspec.Struct, float], None]
"""Takes a record, and when it was on the monotonic clock."""


class Recorder(Protocol):
    """The recorder of a tape."""

    def note(self, record: msgspec.Struct, at: float) -> None:
        """Record something that happened at a time of the monotonic clock."""
        ...

    def share(self, digest: int) -> int:
        """The number of requests for which the one with this digest is recorded; 0 where it is
        not."""
        ...


KIND: Final = "kv."
"""The beginning of the kinds of all records on a tape."""

ANEW_AFTER: Final = 60.0
"""Seconds after which a tape begins anew."""
MARK_EVERY: Final = 8
"""Blocks between two places up to which a later prompt may be the same."""
MOST_MARKS: Final = 65_536
"""Such places that are remembered."""
MOST_OFFERED: Final = 16
"""Sets of instances that are remembered."""


# What is on it -------------------------------------------------------------------------------


class Began(msgspec.Struct, frozen=True, array_like=True, tag="kv.began", gc=False):
    """The tape begins, or begins anew: nothing before is referred to.

    Attributes:
        target: `namespace.component`.
        router: its id where routers share their load; empty where they do not.
        is_new: whether the router itself has just begun.
        policy: empty for a cost function that has no name by which it could be loaded.
        is_exact: whether it follows events.
    """

    target: str
    router: str
    is_new: bool
    policy: str
    temperature: float
    queue_threshold: float | None
    queue_limit: int
    session_ttl: float
    session_overload: float
    prediction_ttl: float
    approximate_ttl: float | None
    is_exact: bool


class Profiled(msgspec.Struct, frozen=True, array_like=True, tag="kv.profile", gc=False):
    """An instance as it is offered, which is called by its number from here on."""

    number: int
    instance: str
    block_size: int | None
    total_blocks: Annotated[int, Meta(ge=1)] | None
    max_batched_tokens: int | None
    dp_size: Annotated[int, Meta(ge=1, le=MAX_DP_SIZE)]
    has_events: bool
    fetches: bool
    lends: int | None
    model: str
    tags: list[str]
    loras: list[str]
    zone: str
    region: str
    routes: Annotated[int, Meta(ge=1)] = 1


class Offered(msgspec.Struct, frozen=True, array_like=True, tag="kv.offered", gc=False):
    """Profiles among which requests choose, called by their number from here on."""

    number: int
    profiles: list[int]


SeenOverlap: TypeAlias = tuple[str, int, int, int, int, int]
"""Instance and rank, and the blocks of a prompt in its tiers."""


SeenPrompt: TypeAlias = tuple[int, int]
"""A prompt that was looked for: how many blocks it has, and the hash of the last one."""


class Seen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """All that a decision, or several, asked of the caches.

    Attributes:
        sequence: up to where the index had followed the events.
        overlaps: of each prompt that was looked for.
        abroad: of each prompt, and each rank of another region, blocks that the rank had said. The
            hash is that of the sequence.
    """

    sequence: int
    overlaps: list[tuple[SeenPrompt, list[SeenOverlap]]]
    abroad: list[tuple[SeenPrompt, str, int, int]]


class Chosen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A decision.

    Attributes:
        number: as the scheduler counts them.
        position: among the candidates.
        reuse: tokens that the rank was taken to hold.
    """

    number: int
    position: int
    instance: str
    dp_rank: int
    reason: str
    reuse: int


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="kv.submitted", gc=False):
    """A request came, and was decided, waits, or was refused.

    Attributes:
        serial: counts the requests of a tape.
        request: digest of its id.
        known: blocks at its beginning that an earlier prompt had, up to the one whose sequence
            hash is `known_hash`.
        blocks: hashes of the others, little-endian u64.
        hops: milliseconds, by instance.
        chosen: None where it waits or was refused.
        refused: the code of the error; empty for none.
        one_in: requests of which this one alone is on the tape.
    """

    serial: int
    request: int
    attempt: int
    prompt_tokens: Annotated[int, Meta(ge=0)]
    block_size: Annotated[int, Meta(ge=1)]
    known: Annotated[int, Meta(ge=0)]
    known_hash: int
    blocks: bytes
    expected_output_tokens: int | None
    priority: int
    tenant: str
    session: str
    required: list[str]
    preferred: dict[str, float]
    lora_name: str
    lora_required: bool
    offered: int
    hops: dict[str, float]
    arrived: float
    seen: Seen
    chosen: Chosen | None
    refused: str
    one_in: int = 1


class Released(msgspec.Struct, frozen=True, array_like=True, tag="kv.released", gc=False):
    """Requests wait no longer: each with its serial, and its decision or the code of an error."""

    outcomes: list[tuple[int, Chosen | None, str]]
    seen: Seen


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag="kv.withdrawn", gc=False):
    """A request waits no longer, since nobody wants it."""

    serial: int


class FirstItem(msgspec.Struct, frozen=True, array_like=True, tag="kv.first", gc=False):
    """The first output of a decision's request came."""

    number: int


class Grown(msgspec.Struct, frozen=True, array_like=True, tag="kv.grown", gc=False):
    """A decision's request has so much output."""

    number: int
    tokens: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="kv.ended", gc=False):
    """A decision's request is over."""

    number: int
    error: str


class Reused(msgspec.Struct, frozen=True, array_like=True, tag="kv.reused", gc=False):
    """The engine found so many tokens of a decision's prompt in its cache."""

    number: int
    tokens: int


class Elsewhere(msgspec.Struct, frozen=True, array_like=True, tag="kv.elsewhere", gc=False):
    """Another router has sent a prompt to a rank. `blocks` are its sequence hashes."""

    instance: str
    dp_rank: int
    blocks: bytes


class Refreshed(msgspec.Struct, frozen=True, array_like=True, tag="kv.refreshed", gc=False):
    """Other instances may serve those that wait."""

    offered: int


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="kv.gone", gc=False):
    """An instance is gone for good, or began anew with an empty cache."""

    instance: str
    for_good: bool


class PolicyChanged(msgspec.Struct, frozen=True, array_like=True, tag="kv.policy", gc=False):
    """Another policy decides; empty for one that has no name by which it could be loaded."""

    policy: str


class LoadHeard(msgspec.Struct, frozen=True, array_like=True, tag="kv.load", gc=False):
    """Another router has told its load."""

    data: bytes


class LoadExpired(msgspec.Struct, frozen=True, array_like=True, tag="kv.expired", gc=False):
    """Other routers were looked for that have fallen silent."""


# Writing it ----------------------------------------------------------------------------------


class TapeWriter:
    """Puts on a tape what a scheduler is told, and refers to what was told before.

    Args:
        note: takes the records.
        router: see `Began`.
    """

    def __init__(
        self, note: Note, target: str, config: RouterConfig, *, is_exact: bool, router: str
    ) -> None:
        self._note = note
        self._key = secrets.token_bytes(16)
        policy = config.policy
        self._began = Began(
            target,
            router,
            True,
            policy if isinstance(policy, str) else "",
            config.temperature,
            config.queue_threshold,
            config.queue_limit,
            config.session_ttl,
            config.session_overload,
            config.prediction_ttl,
            config.approximate_ttl,
            is_exact,
        )
        self._serial = 0
        self._anew_at = -1.0
        self._marks: set[int] = set()
        # By the id of the object, which is kept so that no other gets it.
        self._profiles: dict[int, tuple[int, InstanceProfile]] = {}
        self._offered: list[Sequence[InstanceProfile]] = []
        self._digests: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<TapeWriter of {self._began.target} [{self._serial} requests]>"

    def put(self, record: msgspec.Struct, now: float) -> None:
        """Put a record on the tape."""
        if now >= self._anew_at:
            self._begin(now)
        self._note(record, now)

    def _begin(self, now: float) -> None:
        self._anew_at = now + ANEW_AFTER
        self._marks.clear()
        self._profiles.clear()
        self._offered.clear()
        self._digests.clear()
        self._note(self._began, now)
        self._began = msgspec.structs.replace(self._began, is_new=False)

    def use_policy(self, policy: str | CostFunction, now: float) -> None:
        name = policy if isinstance(policy, str) else ""
        self.put(PolicyChanged(name), now)
        self._began = msgspec.structs.replace(self._began, policy=name)

    def refreshed(self, profiles: Sequence[InstanceProfile], now: float) -> None:
        """Other instances may serve those that wait."""
        if now >= self._anew_at:
            self._begin(now)
        self._note(Refreshed(self._offer(profiles, now)), now)

    def _offer(self, profiles: Sequence[InstanceProfile], now: float) -> int:
        """The number of these profiles on the tape, which is that of the latest ones mostly."""
        for number in range(len(self._offered) - 1, -1, -1):
            # Profiles are objects that are kept: no field is looked at.
            if self._offered[number] == profiles:
                return number
        self._offered.append(list(profiles))
        number = len(self._offered) - 1
        self._note(Offered(number, [self._profile(each, now) for each in profiles]), now)
        return number

    def _profile(self, profile: InstanceProfile, now: float) -> int:
        known = self._profiles.get(id(profile))
        if known is not None:
            return known[0]
        number = len(self._profiles)
        self._profiles[id(profile)] = number, profile
        self._note(
            Profiled(
                number,
                profile.instance,
                profile.block_size,
                profile.total_blocks,
                profile.max_batched_tokens,
                len(profile.ranks),
                profile.has_events,
                profile.fetches,
                profile.lends,
                profile.model,
                self._all(profile.tags),
                self._all(profile.loras),
                profile.zone,
                profile.region,
                profile.stands_for,
            ),
            now,
        )
        return number

    def submitted(
        self,
        request: SchedulingRequest,
        profiles: Sequence[InstanceProfile],
        seen: Seen,
        chosen: Chosen | None,
        refused: str,
        now: float,
        digest: int,
        one_in: int,
    ) -> int:
        """Put a request on the tape, with what became of it; its serial.

        Args:
            profiles: that it was offered.
            digest: of its id.
            one_in: see `Submitted`.
        """
        is_full = len(self._marks) >= MOST_MARKS or len(self._offered) >= MOST_OFFERED
        if is_full or now >= self._anew_at:
            self._begin(now)
        self._serial += 1
        shape, constraints = request.shape, request.constraints
        known, known_hash = self._shared(shape)
        self._note(
            Submitted(
                self._serial,
                digest,
                request.attempt,
                shape.prompt_tokens,
                shape.block_size,
                known,
                known_hash,
                shape.block_hashes[known:].astype("<u8", copy=False).tobytes(),
                shape.expected_output_tokens,
                shape.priority,
                self._digest(tenant) if (tenant := shape.metadata.get(Context.TENANT_KEY)) else "",
                self._digest(request.session) if request.session else "",
                self._all(constraints.required) if constraints.required else [],
                {self._digest(tag): weight for tag, weight in constraints.preferred.items()},
                self._digest(constraints.lora_name) if constraints.lora_name else "",
                constraints.lora_required,
                self._offer(profiles, now),
                dict(request.hops),
                request.arrived,
                seen,
                chosen,
                refused,
                one_in,
            ),
            now,
        )
        return self._serial

    def _shared(self, shape: RequestShape) -> tuple[int, int]:
        """The number of blocks at the beginning of a prompt that are on the tape, and the last
        one's hash; the others count as on it from here on."""
        hashes, marks = shape.sequence_hashes, self._marks
        places = range(MARK_EVERY, len(hashes) + 1, MARK_EVERY)
        # Where a prompt is on it, all of its beginnings are.
        count = bisect_left(places, True, key=lambda place: hashes[place - 1] not in marks)
        known = MARK_EVERY * count
        marks.update(hashes[known + MARK_EVERY - 1 :: MARK_EVERY])
        return known, hashes[known - 1] if known else 0

    def _digest(self, text: str) -> str:
        """A digest with the key of this tape."""
        known = self._digests.get(text)
        if known is None:
            known = blake2b(_bytes(text), digest_size=8, key=self._key).hexdigest()
            self._digests[text] = known
        return known

    def _all(self, words: Set[str]) -> list[str]:
        return sorted(map(self._digest, words))


# Reading it ----------------------------------------------------------------------------------


class TapedPrompts:
    """The prompts of a tape, put together again from what they share with earlier ones."""

    def __init__(self) -> None:
        # By the sequence hashes of their beginnings: all their blocks, the hashes of all their
        # prefixes, and how many of these.
        self._known: dict[int, tuple[NDArray[np.uint64], list[int], int]] = {}

    def __repr__(self) -> str:
        return f"<TapedPrompts [{len(self._known)} beginnings]>"

    def clear(self) -> None:
        """Forget all: the tape begins anew, or lacks records."""
        self._known.clear()

    def read(self, record: Submitted) -> RequestShape | None:
        """The prompt of a request; None where what it refers to is not known."""
        if len(record.blocks) % 8:
            return None
        blocks = np.frombuffer(record.blocks, "<u8").astype(np.uint64)
        if record.known:
            earlier, before, length = self._known.get(record.known_hash, (blocks, [], -1))
            if length != record.known:
                return None
            # What was hashed is not hashed again: conversations grow.
            hashes = before[:length] + hash_prefixes(blocks, record.known_hash)
            blocks = np.concatenate([earlier[:length], blocks])
        else:
            hashes = hash_prefixes(blocks)
        metadata = {Context.TENANT_KEY: record.tenant} if record.tenant else {}
        shape = RequestShape(
            record.prompt_tokens,
            record.block_size,
            blocks,
            record.expected_output_tokens,
            record.priority,
            metadata,
        )
        if len(self._known) > 2 * MOST_MARKS:
            # No tape refers to so many.
            self._known.clear()
        shape.keep_prefixes(hashes)
        for place in range(record.known + MARK_EVERY, len(hashes) + 1, MARK_EVERY):
            self._known[hashes[place - 1]] = blocks, hashes, place
        return shape


def seen_prompt(hashes: Sequence[int] | NDArray[np.uint64]) -> SeenPrompt:
    """The prompt with blocks of these hashes, as it was looked for."""
    return len(hashes), int(hashes[-1]) if len(hashes) else 0


def request_digest(request_id: str) -> int:
    """The digest by which a request is called on tapes."""
    return int.from_bytes(blake2b(_bytes(request_id), digest_size=8).digest(), "big")


def _bytes(text: str) -> bytes:
    # JSON may bring half of a surrogate pair.
    return text.encode("utf-8", "surrogatepass")


class TapedCaches:
    """The caches as a scheduler asks them, and the answers since the last `take`."""

    def __init__(self, follower: Follower | None, abroad: CachesAbroad | None) -> None:
        self._overlaps: list[tuple[SeenPrompt, list[SeenOverlap]]] = []
        self._reached: list[tuple[SeenPrompt, str, int, int]] = []
        self._follower = follower
        self.follower = None if follower is None else _TapedFollower(follower, self._overlaps)
        self.abroad = None if abroad is None else _TapedAbroad(abroad, self._reached)

    def take(self) -> Seen:
        """The answers, which are then forgotten."""
        sequence = 0 if self._follower is None else self._follower.position.sequence
        seen = Seen(sequence, self._overlaps.copy(), self._reached.copy())
        self._overlaps.clear()
        self._reached.clear()
        return seen


class _TapedFollower:
    def __init__(
        self, follower: Follower, heard: list[tuple[SeenPrompt, list[SeenOverlap]]]
    ) -> None:
        self._follower = follower
        self._heard = heard

    @property
    def position(self) -> StreamPosition:
        return self._follower.position

    def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
        overlaps = self._follower.overlaps(block_hashes)
        # Of a thousand instances it takes 40 us so, and three times that by their fields.
        # Type checkers disagree about the sum.
        seen: list[Any] = [rank + one for rank, one in overlaps.items()]
        self._heard.append((seen_prompt(block_hashes), seen))
        return overlaps

    def awareness(self) -> CacheAwareness:
        return self._follower.awareness()

    def ask_resync(self, rank: Rank, reason: str) -> None:
        self._follower.ask_resync(rank, reason)


class _TapedAbroad(CachesAbroad):
    def __init__(self, caches: CachesAbroad, heard: list[tuple[SeenPrompt, str, int, int]]) -> None:
        super().__init__()
        self._caches = caches
        self._heard = heard

    def reach(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> int:
        blocks = self._caches.reach(rank, sequence_hashes, now)
        self._heard.append((seen_prompt(sequence_hashes), rank.instance, rank.dp_rank, blocks))
        return blocks


class TapedScheduler(KvScheduler):
    """A scheduler that puts what it is told, and what it decides, on a tape; of requests those
    alone that its recorder keeps.

    Args:
        target: `namespace.component`.
    """

    def __init__(
        self,
        config: RouterConfig,
        recorder: Recorder,
        *,
        target: str,
        load: TapedLoad | None = None,
        follower: Follower | None = None,
        abroad: CachesAbroad | None = None,
    ) -> None:
        self._taped = TapedCaches(follower, abroad)
        super().__init__(
            config, load=load, follower=self._taped.follower, abroad=self._taped.abroad
        )
        if load is not None:
            load.scheduler = self
        router = "" if load is None else load.router
        self._tape = TapeWriter(
            recorder.note, target, config, is_exact=follower is not None, router=router
        )
        self._share = recorder.share
        self._serials: dict[Ticket, int] = {}
        # The numbers of decisions for requests that are not on the tape.
        self._left_out: set[int] = set()
        # When something happened last: some things are told without a time.
        self._now = 0.0

    def use_policy(self, policy: str | CostFunction) -> None:
        super().use_policy(policy)
        self._tape.use_policy(policy, self._now)

    def submit(self, request: SchedulingRequest, now: float) -> Decision | Ticket:
        profiles, self._now = request.profiles, now
        try:
            decided = super().submit(request, now)
        except DynbusError as error:
            self._submitted(request, profiles, None, error.code, now)
            raise
        self._submitted(request, profiles, decided, "", now)
        return decided

    def _submitted(
        self,
        request: SchedulingRequest,
        profiles: Sequence[InstanceProfile],
        decided: Decision | Ticket | None,
        refused: str,
        now: float,
    ) -> None:
        """Put a request on the tape, unless it is of those that are not recorded."""
        seen, digest = self._taped.take(), request_digest(request.request_id)
        one_in = self._share(digest)
        if not one_in:
            if isinstance(decided, Decision):
                self._left_out.add(decided.number)
            return
        chosen = _chosen(decided) if isinstance(decided, Decision) else None
        serial = self._tape.submitted(request, profiles, seen, chosen, refused, now, digest, one_in)
        if isinstance(decided, Ticket):
            self._serials[decided] = serial

    def release(self, now: float) -> list[tuple[Ticket, Decision | DynbusError]]:
        self._now = now
        decided = super().release(now)
        if decided:
            outcomes: list[tuple[int, Chosen | None, str]] = []
            for ticket, one in decided:
                serial = self._serials.pop(ticket, None)
                if serial is not None:
                    outcomes.append(_outcome(serial, one))
                elif isinstance(one, Decision):
                    self._left_out.add(one.number)
            seen = self._taped.take()
            if outcomes:
                self._tape.put(Released(outcomes, seen), now)
        return decided

    def _put(self, record: msgspec.Struct, now: float) -> None:
        self._now = now
        self._tape.put(record, now)

    def _put_of(self, number: int, record: msgspec.Struct, now: float) -> None:
        """Put on the tape what became of the request of a decision, if that is on it."""
        if number not in self._left_out:
            self._now = now
            self._tape.put(record, now)

    def withdraw(self, ticket: Ticket) -> bool:
        was_waiting = super().withdraw(ticket)
        serial = self._serials.pop(ticket, None)
        if was_waiting and serial is not None:
            self._put(Withdrawn(serial), self._now)
        return was_waiting

    def first_item(self, number: int, now: float) -> None:
        self._put_of(number, FirstItem(number), now)
        super().first_item(number, now)

    def grown(self, number: int, output_tokens: int) -> None:
        self._put_of(number, Grown(number, output_tokens), self._now)
        super().grown(number, output_tokens)

    def ended(self, number: int, now: float, error: str = "") -> None:
        self._put_of(number, Ended(number, error), now)
        self._left_out.discard(number)
        super().ended(number, now, error)

    def note_reused(self, number: int, tokens: int, now: float) -> Decision | None:
        self._put_of(number, Reused(number, tokens), now)
        return super().note_reused(number, tokens, now)

    def note_elsewhere(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> None:
        # Its id is not told.
        if not sequence_hashes or self._share(sequence_hashes[-1]):
            blocks = np.array(sequence_hashes, dtype="<u8").tobytes()
            self._put(Elsewhere(rank.instance, rank.dp_rank, blocks), now)
        super().note_elsewhere(rank, sequence_hashes, now)

    def refresh(self, profiles: Sequence[InstanceProfile]) -> None:
        self._tape.refreshed(profiles, self._now)
        super().refresh(profiles)

    def remove_instance(self, instance: str) -> None:
        self._put(Gone(instance, for_good=True), self._now)
        super().remove_instance(instance)

    def forget_cache(self, instance: str) -> None:
        self._put(Gone(instance, for_good=False), self._now)
        super().forget_cache(instance)

    def load_heard(self, data: bytes, now: float) -> None:
        """Another router has told its load."""
        self._put(LoadHeard(data), now)

    def load_expired(self, now: float) -> None:
        """Routers that fell silent were forgotten."""
        self._put(LoadExpired(), now)


class TapedLoad(SharedLoad):
    """The shared load of a router whose scheduler puts on a tape what other routers say.

    Attributes:
        scheduler: whose tape it is, as that says itself.
    """

    scheduler: TapedScheduler | None = None

    def receive(self, data: bytes, now: float, *, sender: str | None = None) -> Heard:
        heard = super().receive(data, now, sender=sender)
        # What is no message was not used.
        # It hears itself, too.
        if self.scheduler is not None and sender != self.router:
            self.scheduler.load_heard(data, now)
        return heard

    def expire(self, now: float) -> bool:
        has_forgotten = super().expire(now)
        if has_forgotten and self.scheduler is not None:
            self.scheduler.load_expired(now)
        return has_forgotten


def _outcome(serial: int, decided: Decision | DynbusError) -> tuple[int, Chosen | None, str]:
    if isinstance(decided, Decision):
        return serial, _chosen(decided), ""
    return serial, None, decided.code


def _chosen(decision: Decision) -> Chosen:
    rank = decision.chosen
    return Chosen(
        decision.number,
        decision.candidates.ranks.index(rank),
        rank.instance,
        rank.dp_rank,
        decision.reason.value,
        decision.expected_reuse,
    )
