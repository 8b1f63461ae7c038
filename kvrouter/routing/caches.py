"""The assumed contents of each rank's cache: its own events, the requests sent to it, and their
agreement.

An index follows what engines say. Own decisions are guesses: they count alone when engines tell no
events, and beside the index for the time until the events of a request arrive. An index can agree
with every digest and still be wrong, when the instance itself is: it says that it holds what it
does not, or the other way round. Its own count of reused tokens tells.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.stream.awareness import AwarenessLevel, CacheAwareness, doubted
from dynbus.kvrouter.stream.summary import CachesAbroad

from .active_load import leading_blocks
from .candidates import NO_OVERLAP, Offer
from .config import RouterConfig
from .cost import RequestShape
from .decision import Decision
from .profiles import InstanceProfile

AWARENESS_INTERVAL: Final = 0.1
"""Seconds for which what a follower says of itself is taken as it is."""

DEFAULT_CAPACITY: Final = 65_536
"""Blocks that a rank is taken to have room for when its instance does not say."""

LOOKS: Final = 2
"""Computed prompts that each decision looks for in the index: more than decisions bring."""

LEAST_REQUESTS: Final = 8
"""Requests before a mean says anything."""
MEMORY: Final = 16
"""The latest request counts for so much of the mean: one part in as many."""
LEAST_BLOCKS: Final = 2.0
"""Blocks per request that predictions may be wrong by."""
LEAST_SHARE: Final = 0.25
"""Share of the tokens per request that predictions may be wrong by: caches change while a request
is on its way."""
FIRST_PATIENCE: Final = 30.0
MAX_PATIENCE: Final = 960.0
"""Seconds until a rank that is still wrong is asked again. Doubled each time: an answer costs all
that the rank holds."""


_OWN_DECISIONS: Final = CacheAwareness(
    AwarenessLevel.APPROXIMATE, "own decisions alone, no events are followed"
)
_NOTHING: Final = CacheAwareness(AwarenessLevel.OFF, "no events are followed, approximate_ttl is 0")


class StreamPosition(Protocol):
    """The position up to which a stream of events was applied."""

    @property
    def sequence(self) -> int: ...


class Follower(Protocol):
    """An index that follows the events of engines, as `IndexFollower` does."""

    @property
    def position(self) -> StreamPosition: ...
    def overlaps(self, block_hashes: NDArray[np.uint64]) -> Mapping[Rank, Overlap]:
        """`RadixIndex.overlaps`, for the instances that are there."""
        ...

    def awareness(self) -> CacheAwareness:
        """The degree to which the index can be relied on."""
        ...

    def ask_resync(self, rank: Rank, reason: str) -> None:
        """Have a rank say again what it holds."""
        ...


class _Sent(NamedTuple):
    """A prompt that a rank will hold, or says already that it does.

    Attributes:
        until: when its guess ends in any case.
    """

    rank: Rank
    shape: RequestShape
    until: float


class ExpectedCaches:
    """The caches of a component's instances, as far as its router knows or guesses them.

    Args:
        follower: the exact index; None when engines send no events.
        config: for how long guesses count.
        abroad: what instances of other regions say of their caches; None for nothing.
    """

    def __init__(
        self, follower: Follower | None, config: RouterConfig, abroad: CachesAbroad | None = None
    ) -> None:
        self._follower = follower
        self._abroad = abroad
        self._reuse = ReuseWatch()
        self._awareness = ""
        self._look_at = -inf
        self._approximates = config.approximate_ttl != 0
        self._prediction_ttl = config.prediction_ttl
        self._forgets = config.approximate_ttl is not None
        # Of instances that send events, until these arrive.
        self._predictions = ApproximateIndex(ttl=config.prediction_ttl)
        # By the numbers of their decisions, and, once these are computed, in this order. What the
        # index has had of them is guessed no longer, so that it may be evicted.
        self._sent: dict[int, _Sent] = {}
        self._computed: deque[_Sent] = deque()
        self._looked_at = -1
        # Of instances that send none.
        self._approximations = ApproximateIndex(ttl=config.approximate_ttl)
        # Blocks that each rank of these has room for; None where they do not say.
        self._capacities: dict[str, int | None] = {}

    def __repr__(self) -> str:
        guessed = len(self._predictions) + len(self._approximations)
        return f"<ExpectedCaches [{guessed} blocks guessed]>"

    def overlaps(
        self, offer: Offer, shape: RequestShape, now: float
    ) -> tuple[dict[int, Overlap], dict[int, int]]:
        """The overlaps with a prompt of the ranks that hold any of it, and how many blocks of that
        are guessed; both by the rank's position in the offer.
        """
        hashes = shape.sequence_hashes
        follower = self._follower
        if self._computed and follower is not None:
            self._look_for_computed(follower, now)
        overlaps: dict[int, Overlap] = {}
        if not hashes:
            return overlaps, {}
        positions = offer.positions
        if follower is not None:
            for rank, overlap in follower.overlaps(shape.block_hashes).items():
                at = positions.get(rank)
                if at is not None:
                    overlaps[at] = overlap
        if self._abroad is not None:
            for at in offer.abroad:
                # Whatever the index says of them is not of their caches.
                overlaps.pop(at, None)
                reach = self._abroad.reach(offer.ranks[at], hashes, now)
                if reach:
                    overlaps[at] = Overlap(reach, 0, 0, 0)
        guessed: dict[int, int] = {}
        follows, tells = follower is not None, offer.tells
        for guesses, is_followed in ((self._predictions, True), (self._approximations, False)):
            for rank in guesses.holders(hashes[0]):
                at = positions.get(rank)
                if at is None or (follows and tells[at]) is not is_followed:
                    continue
                device, host, disk, external = overlaps.get(at, NO_OVERLAP)
                known = device + host + disk + external
                added = guesses.beyond(rank, hashes, known, now)
                if added:
                    overlaps[at] = Overlap(device + added, host, disk, external)
                    guessed[at] = added
        return overlaps, guessed

    def note_sent(
        self,
        number: int,
        profile: InstanceProfile,
        rank: Rank,
        known: int,
        shape: RequestShape,
        now: float,
    ) -> None:
        """A prompt was sent to a rank, which will hold it.

        Args:
            number: of the decision.
            profile: of the rank's instance.
            known: how many blocks of the prompt it has said that it holds.
        """
        hashes = shape.sequence_hashes
        if not self._is_followed(profile):
            capacity = self._capacities[profile.instance] = profile.total_blocks
            self._approximations.store(rank, hashes, now, capacity=capacity)
        elif self._prediction_ttl:
            self._predictions.store(rank, hashes, now, start=known)
            if len(hashes) > known:
                self._sent[number] = _Sent(rank, shape, now + self._prediction_ttl)

    def note_computed(self, number: int) -> None:
        """The prompt of a decision is computed, or its request is over: its events come now."""
        sent = self._sent.pop(number, None)
        if sent is not None:
            self._computed.append(sent)
            self._looked_at = -1

    def note_elsewhere(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> None:
        """Another router has sent a prompt to a rank, which will hold it."""
        is_untold = rank.instance in self._capacities
        if self._follower is not None and not is_untold:
            self._predictions.store(rank, sequence_hashes, now)
        # Without a time to forget in, only what is known to be an instance is remembered.
        elif is_untold or self._forgets:
            capacity = self._capacities.get(rank.instance)
            self._approximations.store(rank, sequence_hashes, now, capacity=capacity)

    def note_reused(self, decision: Decision, tokens: int, now: float) -> bool:
        """An engine found so many tokens of a prompt in its cache.

        Returns:
            Whether its rank was asked to say again what it holds, since that is not true.
        """
        if self._follower is None or decision.chosen.instance in self._capacities:
            # One that is not followed has nothing to say again.
            return False
        reason = self._reuse.note(decision, tokens)
        if not reason:
            return False
        self._reuse.asked(decision.chosen, now)
        self._follower.ask_resync(decision.chosen, reason)
        return True

    def forget_cache(self, instance: str) -> None:
        """An instance began anew with an empty cache: what was guessed of it is void."""
        self._approximations.remove_instance(instance)
        self._predictions.remove_instance(instance)
        self._reuse.remove_instance(instance)

    def remove_instance(self, instance: str) -> None:
        """An instance is gone for good."""
        self._capacities.pop(instance, None)
        self.forget_cache(instance)

    @property
    def sequence(self) -> int:
        """Up to where the index has followed the events; 0 without one."""
        return 0 if self._follower is None else self._follower.position.sequence

    def awareness(self) -> CacheAwareness:
        """The degree to which decisions can rely on what is known of the caches at this moment."""
        if self._follower is None:
            return _OWN_DECISIONS if self._approximates else _NOTHING
        doubts = {str(rank): why for rank, why in self._reuse.doubts().items()}
        return doubted(self._follower.awareness(), doubts)

    def known_awareness(self, now: float) -> str:
        """The same, looked at now and then only, since that takes time."""
        if now >= self._look_at:
            self._look_at = now + AWARENESS_INTERVAL
            self._awareness = str(self.awareness())
        return self._awareness

    def _look_for_computed(self, follower: Follower, now: float) -> None:
        """See of some computed prompts whether the index has them by now."""
        sequence, computed = follower.position.sequence, self._computed
        if sequence == self._looked_at:
            return
        self._looked_at = sequence
        for _ in range(min(LOOKS, len(computed))):
            sent = computed.popleft()
            rank, hashes = sent.rank, sent.shape.block_hashes
            held = follower.overlaps(hashes).get(rank, NO_OVERLAP).total
            if held == len(hashes):
                self._predictions.confirm(rank, sent.shape.sequence_hashes, held)
            elif now < sent.until:
                computed.append(sent)

    def _is_followed(self, profile: InstanceProfile) -> bool:
        return self._follower is not None and profile.has_events and not profile.region


@dataclass(slots=True, eq=False)
class _Guess:
    """A prompt that a rank is taken to hold, but for what later ones begin with.

    Attributes:
        sequence_hashes: of all of its blocks.
        gone_at: when it is gone.
        start, end: which of its blocks are in no later prompt and were not forgotten.
    """

    sequence_hashes: array[int]
    gone_at: float
    start: int
    end: int


@dataclass(slots=True)
class _Held:
    """The blocks that a rank is taken to hold.

    Attributes:
        holders: all ranks that hold a prompt's first block, by its hash.
        firsts: the first blocks of prompts that are held here.
        gone_at: when all of it is gone, unless it is used again.
        reversals: how often a block was guessed again that the exact index had had.
        prompts: those that have blocks which no later one has, in the order of their use.
        blocks: the latest prompt that has a block, by its sequence hash. The oldest prompt's are
            forgotten first, from its last one on. So no block stays without the one before it:
            `leading_blocks` relies on that. Blocks that the exact index has stay here for the same
            reason, and are told apart by `confirmed`.
        confirmed: blocks that the exact index had, each with the value of `reversals` when it had
            it. While that value is the same, those before a block are here as well.
    """

    rank: Rank
    holders: dict[int, set[Rank]]
    firsts: set[int] = field(default_factory=set[int])
    gone_at: float = inf
    reversals: int = 0
    prompts: OrderedDict[_Guess, None] = field(default_factory=OrderedDict[_Guess, None])
    blocks: dict[int, _Guess] = field(default_factory=dict[int, _Guess])
    confirmed: dict[int, int] = field(default_factory=dict[int, int])

    def use(self, sequence_hashes: Sequence[int], gone_at: float) -> None:
        """A prompt is here, and its blocks were used the last."""
        at, count = 0, len(sequence_hashes)
        while at < count and (before := self.blocks.get(sequence_hashes[at])) is not None:
            at = before.start = self._shared(before, sequence_hashes, at)
            if before.start >= before.end:
                self.prompts.pop(before, None)
        guess = _Guess(array("Q", sequence_hashes), gone_at, 0, count)
        blocks = self.blocks
        for block in sequence_hashes:
            blocks[block] = guess
        if count:
            self.prompts[guess] = None
            first = sequence_hashes[0]
            if first not in self.firsts:
                self.firsts.add(first)
                self.holders.setdefault(first, set()).add(self.rank)

    def _shared(self, guess: _Guess, sequence_hashes: Sequence[int], start: int) -> int:
        """Behind which block of a prompt another one is the latest, given that at `start` it is
        not. A prompt's blocks follow each other, so that the cost grows with the logarithm."""
        low, high = start + 1, len(sequence_hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks.get(sequence_hashes[middle - 1]) is guess:
                low = middle
            else:
                high = middle - 1
        return low

    def confirm(self, sequence_hashes: Sequence[int], end: int) -> None:
        """The exact index has the first `end` blocks of a prompt, which are all here."""
        confirmed, reversals = self.confirmed, self.reversals
        for at in range(end - 1, -1, -1):
            block = sequence_hashes[at]
            if confirmed.get(block) == reversals:
                break
            confirmed[block] = reversals

    def shrink(self, limit: int) -> None:
        """Forget the blocks that were used the longest ago, beyond `limit`."""
        while len(self.blocks) > limit and self.prompts:
            oldest = next(iter(self.prompts))
            least = max(oldest.start, oldest.end - (len(self.blocks) - limit))
            self._forget(oldest, least)

    def expire(self, now: float) -> None:
        """Forget what is gone by now."""
        while self.prompts and (oldest := next(iter(self.prompts))).gone_at <= now:
            self._forget(oldest, oldest.start)

    def _forget(self, guess: _Guess, start: int) -> None:
        """Forget a prompt's blocks from `start` on."""
        blocks, confirmed = self.blocks, self.confirmed
        gone, guess.end = guess.sequence_hashes[start : guess.end], start
        if guess.start >= start:
            del self.prompts[guess]
            if not self.prompts:
                # With what another router may have said that is no prompt's.
                self.clear()
                return
        for block in gone:
            if blocks.get(block) is guess:
                del blocks[block]
                confirmed.pop(block, None)
                if block in self.firsts:
                    self._forget_first(block)

    def clear(self) -> None:
        """Forget all."""
        self.prompts.clear()
        self.blocks.clear()
        self.confirmed.clear()
        for first in tuple(self.firsts):
            self._forget_first(first)

    def _forget_first(self, first: int) -> None:
        self.firsts.discard(first)
        holders = self.holders[first]
        holders.discard(self.rank)
        if not holders:
            del self.holders[first]


class ApproximateIndex:
    """Blocks by rank, each for some time after its last use.

    Args:
        ttl: seconds after its last use until a block counts as gone; None for never.
    """

    def __init__(self, *, ttl: float | None) -> None:
        self._ttl = ttl
        # In the order of their last request, so that those that nobody asks for any longer are
        # found in front.
        self._ranks: OrderedDict[Rank, _Held] = OrderedDict()
        # By the first block of a prompt.
        self._holders: dict[int, set[Rank]] = {}

    def __repr__(self) -> str:
        return f"<ApproximateIndex [{len(self)} blocks, {len(self._ranks)} ranks]>"

    def __len__(self) -> int:
        return sum(len(held.blocks) for held in self._ranks.values())

    def holders(self, first_hash: int) -> Sequence[Rank]:
        """The ranks that hold a prompt's first block, or held it until its time was over."""
        return tuple(self._holders.get(first_hash, ()))

    def store(
        self,
        rank: Rank,
        sequence_hashes: Sequence[int],
        now: float,
        *,
        start: int = 0,
        capacity: int | None = None,
    ) -> None:
        """A request was sent to a rank, which will hold its blocks, or uses them again.

        Args:
            now: seconds of any clock that never goes back.
            start: blocks at the beginning that the exact index has, as after `confirm`.
            capacity: blocks that this rank has room for, beyond which the least recently used are
                forgotten; None for `DEFAULT_CAPACITY`.
        """
        held = self._ranks.get(rank)
        if held is None:
            held = self._ranks[rank] = _Held(rank, self._holders)
        self._ranks.move_to_end(rank)
        held.expire(now)
        held.gone_at = gone_at = inf if self._ttl is None else now + self._ttl
        confirmed = held.confirmed
        held.use(sequence_hashes, gone_at)
        if confirmed and not confirmed.keys().isdisjoint(guessed := sequence_hashes[start:]):
            for block in guessed:
                confirmed.pop(block, None)
            held.reversals += 1
        held.confirm(sequence_hashes, start)
        held.shrink(DEFAULT_CAPACITY if capacity is None else capacity)
        while self._ranks and next(iter(self._ranks.values())).gone_at <= now:
            self._ranks.popitem(last=False)[1].clear()

    def reach(
        self, rank: Rank, sequence_hashes: Sequence[int], now: float, *, start: int = 0
    ) -> int:
        """The number of blocks of a prompt that a rank holds from the first on.

        Args:
            start: how many of them it holds in any case. The answer is not less.
        """
        held = self._ranks.get(rank)
        if held is None:
            return start
        held.expire(now)
        if not held.blocks:
            del self._ranks[rank]
            return start
        end = leading_blocks(held.blocks, sequence_hashes, start)
        if held.confirmed:
            # What the exact index had and has no longer is not held, nor what comes after it.
            for at in range(start, end):
                if sequence_hashes[at] in held.confirmed:
                    return at
        return end

    def beyond(self, rank: Rank, sequence_hashes: Sequence[int], known: int, now: float) -> int:
        """The number of blocks of a prompt that a rank holds behind the first `known`, which the
        exact index has."""
        held = self._ranks[rank]
        # Looked at here, too: of many ranks a call for each would take longer than all else.
        if known and held.confirmed.get(sequence_hashes[known - 1]) != held.reversals:
            self.confirm(rank, sequence_hashes, known)
        # Most ranks hold what everybody sends, which the index has, and no more.
        if known == len(sequence_hashes) or sequence_hashes[known] not in held.blocks:
            return 0
        return self.reach(rank, sequence_hashes, now, start=known) - known

    def confirm(self, rank: Rank, sequence_hashes: Sequence[int], end: int) -> None:
        """The exact index has the first `end` blocks of a prompt: guess them no longer."""
        held = self._ranks.get(rank)
        if (
            held is None
            or not end
            or held.confirmed.get(sequence_hashes[end - 1]) == held.reversals
        ):
            return
        held.confirm(sequence_hashes, leading_blocks(held.blocks, sequence_hashes[:end]))

    def remove_instance(self, instance: str) -> None:
        """Forget an instance."""
        for rank in [rank for rank in self._ranks if rank.instance == instance]:
            self._ranks.pop(rank).clear()


@dataclass(slots=True)
class _Comparison:
    """The comparison of the predictions for one rank with what was reused.

    Attributes:
        error: mean tokens per request that were predicted and not reused; negative for more.
        tokens: mean tokens per request that were predicted or reused, whichever is more.
        since: of requests that were decided from then on.
        doubt: why it is doubted; empty for not.
    """

    requests: int = 0
    error: float = 0.0
    tokens: float = 0.0
    since: float = 0.0
    ask_at: float = 0.0
    patience: float = FIRST_PATIENCE
    doubt: str = ""


class ReuseWatch:
    """Finds ranks whose word on their cache is not what their engines reuse.

    Times are of one monotonic clock.
    """

    def __init__(self) -> None:
        self._comparisons: dict[Rank, _Comparison] = {}

    def __repr__(self) -> str:
        return f"<ReuseWatch [{len(self.doubts())} of {len(self._comparisons)} ranks doubted]>"

    def note(self, decision: Decision, reused: int) -> str:
        """An engine has reused so many tokens of a decision's prompt.

        Calls may come in another order than that in which the decisions were made.

        Returns:
            Why the rank is to be asked for a resync; empty when it is not.
        """
        compared = self._comparisons.setdefault(decision.chosen, _Comparison())
        claimed, decided_at = decision.told_reuse, decision.decided_at
        if decided_at < compared.since:
            return ""
        # Between what the rank claims and what is guessed beside it neither is wrong.
        error = claimed - reused if reused < claimed else min(0, decision.expected_reuse - reused)
        compared.requests += 1
        weight = max(1 / compared.requests, 1 / MEMORY)
        compared.error += (error - compared.error) * weight
        compared.tokens += (max(claimed, reused) - compared.tokens) * weight
        if compared.requests < LEAST_REQUESTS:
            return ""
        allowed = max(LEAST_BLOCKS * decision.block_size, LEAST_SHARE * compared.tokens)
        if abs(compared.error) <= allowed:
            compared.doubt = ""
            compared.patience = FIRST_PATIENCE
            return ""
        which = "fewer" if compared.error > 0 else "more"
        compared.doubt = (
            f"it reuses {abs(compared.error):.0f} tokens {which} than it says that it holds, "
            f"of {compared.tokens:.0f}"
        )
        if decided_at < compared.ask_at:
            return ""
        return compared.doubt

    def asked(self, rank: Rank, now: float) -> None:
        """A rank was asked for a resync: what was decided before says nothing any longer."""
        compared = self._comparisons.setdefault(rank, _Comparison())
        compared.requests = 0
        compared.error = compared.tokens = 0.0
        compared.since = now
        compared.ask_at = now + compared.patience
        compared.patience = min(2 * compared.patience, MAX_PATIENCE)

    def doubts(self) -> Mapping[Rank, str]:
        """Ranks that were found wrong and not yet right again, and how."""
        return {
            rank: compared.doubt for rank, compared in self._comparisons.items() if compared.doubt
        }

    def remove_instance(self, instance: str) -> None:
        """An instance is gone."""
        self._comparisons = {
            rank: one for rank, one in self._comparisons.items() if rank.instance != instance
        }
