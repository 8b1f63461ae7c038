"""`KvScheduler`: decides which rank gets a request, or that it waits. No I/O, no clock.

Its user, a router or a simulation in virtual time, tells it what happens to requests, and
asks `release` after each such change:

    scheduler = KvScheduler(RouterConfig(policy="kv", queue_threshold=1.0), follower=index)
    found = scheduler.submit(SchedulingRequest("mine", shape, profiles, arrived=now), now)
    scheduler.first_item(number, now)       # of a `Decision`; a `Ticket` waits
    scheduler.ended(number, now)
    for ticket, found in scheduler.release(now): ...
"""

from __future__ import annotations

import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError, Context, DynbusError, Overloaded
from dynbus.kvrouter.radix.index import Overlap, Rank
from dynbus.kvrouter.stream.awareness import CacheAwareness
from dynbus.kvrouter.stream.summary import CachesAbroad

from .active_load import ActiveLoad
from .caches import ExpectedCaches, Follower
from .candidates import Candidates, Offer
from .config import RouterConfig
from .cost import CostFunction, Popularity, RequestShape, choose
from .decision import Decision, DecisionLog, Reason
from .policies import Policy, Shadows
from .profiles import InstanceProfile
from .queue import RETRY_AFTER, RequestQueue, SchedulingRequest, Ticket

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 65_536
"""Sessions that are remembered; beyond it the least recently used are forgotten."""


@dataclass(slots=True)
class SchedulerStatistics:
    """Figures of a scheduler since it began.

    Attributes:
        running: requests that were sent somewhere and did not end.
        waiting: requests in the queue now.
        waited: decisions that were made after a time in the queue.
        refused: requests that found the queue full.
        prompt_tokens: of all decisions.
        best_tokens, expected_tokens: prompt tokens that the best candidate, and the chosen
            one, were taken to hold.
        reused_tokens: what engines said that they found, of the `compared_tokens` that were
            expected of the same requests.
        resyncs: how often a rank was asked for one because its engine reused something else.
        agreements: by shadow policy, in how many decisions it would have chosen the same.
    """

    decisions: int = 0
    running: int = 0
    waiting: int = 0
    waited: int = 0
    refused: int = 0
    sessions_kept: int = 0
    prompt_tokens: int = 0
    best_tokens: int = 0
    expected_tokens: int = 0
    reused_tokens: int = 0
    compared_tokens: int = 0
    resyncs: int = 0
    agreements: Mapping[str, int] = field(default_factory=dict[str, int])


class SessionAffinity:
    """Remembers where each session was, for some time after its last request.

    Args:
        ttl, overload: `session_ttl` and `session_overload` of `RouterConfig`.
    """

    def __init__(self, *, ttl: float, overload: float) -> None:
        self._ttl = ttl
        self._overload = overload
        self._sessions: OrderedDict[str, tuple[Rank, float]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<SessionAffinity [{len(self._sessions)} sessions]>"

    def find(
        self, session: str, request: RequestShape, candidates: Candidates, now: float
    ) -> int | None:
        """The position of the candidate where a session was; None when it is to be chosen anew.

        That is so for a new session, and when its rank is no candidate or has too much load.
        """
        rank = self.rank_of(session, now)
        if rank is None:
            return None
        block_size = request.block_size
        if rank not in candidates.ranks:
            return None
        at = candidates.ranks.index(rank)
        loads = candidates.active_prefill_tokens / block_size + candidates.active_blocks
        bearable = self._overload * (float(loads.min()) + request.prompt_blocks)
        return at if loads[at] <= bearable else None

    def rank_of(self, session: str, now: float) -> Rank | None:
        """The rank where a session was; None for an unknown one."""
        rank, until = self._sessions.get(session, (None, 0.0))
        return rank if until > now else None

    def bind(self, session: str, rank: Rank, now: float) -> None:
        """A request of a session goes to a rank."""
        sessions = self._sessions
        sessions[session] = (rank, now + self._ttl)
        sessions.move_to_end(session)
        while sessions and (
            len(sessions) > MAX_SESSIONS or next(iter(sessions.values()))[1] <= now
        ):
            sessions.popitem(last=False)


_Lender: TypeAlias = tuple[Rank | None, int]
"""A rank, and how many blocks of the prompt it has said that it holds, and lends."""
_Model: TypeAlias = tuple[str, str, str]
"""The fingerprint of a model, and the region and the zone of who serves it."""


class Lenders(NamedTuple):
    """The candidates that can send the longest prefix to another one with the same model.

    Those of one zone send to each other alone: from another zone or region a prefix comes later
    than it is computed.

    Attributes:
        best: by model, region and zone the best two instances, so that one of them is another
            than the fetching one.
    """

    best: Mapping[_Model, tuple[_Lender, _Lender]]

    @classmethod
    def of(
        cls,
        offer: Offer,
        overlaps: Mapping[int, Overlap],
        predicted: Mapping[int, int],
    ) -> Lenders:
        """Those among the ranks of an offer, by whose positions the overlaps are."""
        if not offer.fetching:
            return NO_LENDERS
        # By instance the best of its ranks, in the order of the offer.
        best: dict[str, tuple[_Model, _Lender]] = {}
        for at in sorted(overlaps):
            profile = offer.profile_of[at]
            if not profile.fetches:
                continue
            # What is only guessed may not be computed yet.
            held = overlaps[at].total - predicted.get(at, 0)
            if profile.lends is not None:
                held = min(held, profile.lends)
            model = profile.model, profile.region, profile.zone
            _, before = best.get(profile.instance, (model, _NOBODY))
            if held > before[1]:
                best[profile.instance] = model, (offer.ranks[at], held)
        lenders: dict[_Model, tuple[_Lender, _Lender]] = {}
        for model, lender in best.values():
            first, second = lenders.get(model, (_NOBODY, _NOBODY))
            if lender[1] > first[1]:
                lenders[model] = lender, first
            elif lender[1] > second[1]:
                lenders[model] = first, lender
        return cls(lenders)

    def blocks(self, offer: Offer, overlaps: Mapping[int, Overlap]) -> NDArray[np.int64] | None:
        """`Candidate.peer_blocks` of shape [ranks]; None where all are 0."""
        if not self.best:
            return None
        blocks = np.zeros(len(offer.ranks), dtype=np.int64)
        for model, ((lender, lent), (_, second)) in self.best.items():
            positions = offer.fetching[model]
            blocks[positions] = lent
            if lender is not None:
                own = [at for at in positions if offer.ranks[at].instance == lender.instance]
                blocks[own] = second
        for at, overlap in overlaps.items():
            blocks[at] = max(0, int(blocks[at]) - overlap.total)
        return blocks

    def other_than(self, profile: InstanceProfile) -> _Lender:
        """The best for an instance that fetches: another one, with the same model."""
        model = profile.model, profile.region, profile.zone
        first, second = self.best.get(model, (_NOBODY, _NOBODY))
        return second if first[0] is not None and first[0].instance == profile.instance else first


_NOBODY: Final[_Lender] = (None, 0)
NO_LENDERS: Final = Lenders({})


class KvScheduler:
    """Decides for the requests of one component. Times are seconds of one monotonic clock.

    Args:
        config: its policy, the policies on trial, its queue and its sessions; what is about
            requests and instances (`fields`, `block_size`, `tokenizer_id`, `lora`,
            `reused_field`) is for the maker of `SchedulingRequest`s.
        load: what runs where; shared with other routers, or an own one unless given.
        follower: the exact index; None when engines send no events.
        abroad: what instances of other regions say of their caches; None for nothing.
        random: breaks ties, and draws at a temperature.

    Raises:
        ConfigError: a policy cannot be loaded.
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        load: ActiveLoad | None = None,
        follower: Follower | None = None,
        abroad: CachesAbroad | None = None,
        random: Random | None = None,
    ) -> None:
        self.config = config = config or RouterConfig()
        self.load = ActiveLoad() if load is None else load
        self.decisions = DecisionLog(config.decisions)
        self._policy = Policy.of(config.policy)
        # Not the module's own generator: that is the program's, which may have seeded it.
        self._random = random or Random()
        self._shadows = Shadows(config.named_shadows, self._random)
        self._queue = RequestQueue(config.queue_threshold, config.queue_limit, self.load)
        self._affinity = SessionAffinity(ttl=config.session_ttl, overload=config.session_overload)
        self._caches = ExpectedCaches(follower, config, abroad)
        self._popularity = Popularity()
        self._offer = Offer(())
        self._running: dict[int, Decision] = {}
        self._counts = SchedulerStatistics()
        self._has_failed = False

    def __repr__(self) -> str:
        return f"<KvScheduler [{len(self._running)} running, {len(self._queue)} waiting]>"

    @property
    def policy(self) -> str:
        """The name of the cost function that decides now."""
        return self._policy.name

    def use_policy(self, policy: str | CostFunction) -> None:
        """Decide by another policy from now on; a module's file is read again.

        Raises:
            ConfigError: it cannot be loaded. The one before goes on.
        """
        self._policy = Policy.of(policy, reload=True)
        self._has_failed = False

    # Requests -----------------------------------------------------------------------------

    def submit(self, request: SchedulingRequest, now: float) -> Decision | Ticket:
        """The decision for a request, or the ticket with which it waits.

        The chosen rank is charged with the request until `ended`.

        Raises:
            NoInstances: its constraints leave no instance.
            Overloaded: the queue is full, or the policy finds every candidate unfit.
            ConfigError: the policy does not return one cost for each candidate.
        """
        request.apply_constraints()
        if self._queue.holds(request):
            return self._queue.push(request)
        return self._decide(request, now)

    def release(self, now: float) -> list[tuple[Ticket, Decision | DynbusError]]:
        """Those that wait no longer, each with its decision, or what speaks against one.

        To be asked after every `submit` that gave a ticket, every `first_item` and `ended`, and
        after a change of the instances or of the load that other routers have told.
        """
        return [(one, self._decide_safely(one.request, now)) for one in self._queue.take_free()]

    def _decide_safely(self, request: SchedulingRequest, now: float) -> Decision | DynbusError:
        """The decision for a request that waited, or what speaks against one.

        Whatever fails, fails for this request alone: others are released with it.
        """
        try:
            return self._decide(request, now)
        except DynbusError as error:
            return error
        except Exception as error:
            logger.exception("request %s cannot be routed", request.request_id)
            return ConfigError(
                f"policy {self._policy.name} or what it was given failed: "
                f"{type(error).__name__}: {error}",
                request_id=request.request_id,
                started=False,
            )

    def withdraw(self, ticket: Ticket) -> bool:
        """A request waits no longer, since nobody wants it; False when it did not wait."""
        return self._queue.withdraw(ticket)

    def first_item(self, number: int, now: float) -> None:
        """The first output of a decision's request came: its prompt is computed."""
        decision = self._running.get(number)
        if decision is not None and decision.outcome.first_item_s is None:
            decision.outcome.first_item_s = now - decision.decided_at
            self._caches.note_computed(number)
            self.load.prefill_completed(str(number))

    def grown(self, number: int, output_tokens: int) -> None:
        """A decision's request has so much output by now."""
        decision = self._running.get(number)
        if decision is not None:
            self.load.grow(str(number), output_tokens, decision.block_size)

    def ended(self, number: int, now: float, error: str = "") -> None:
        """A decision's request is over; `error` is the code of what it failed with."""
        decision = self._running.pop(number, None)
        if decision is not None:
            decision.outcome.ended_s = now - decision.decided_at
            decision.outcome.error = error
            self._caches.note_computed(number)
            self.load.free(str(number))

    def report_reused(self, request_id: str, tokens: int, now: float) -> Decision | None:
        """The engine found so many tokens of a request's prompt in its cache.

        Returns:
            The decision that it belongs to, the latest of the request; None when it is not
            kept any longer.
        """
        decisions = self.decisions.find(request_id)
        return self.note_reused(decisions[-1].number, tokens, now) if decisions else None

    def note_reused(self, number: int, tokens: int, now: float) -> Decision | None:
        """The same as `report_reused`, of a decision by its number."""
        decision = self._running.get(number) or self.decisions.get(number)
        if decision is None or decision.outcome.reused_tokens is not None:
            return decision
        # An engine may say anything; of a prompt no more than all of it can be reused.
        tokens = min(tokens, decision.prompt_tokens)
        decision.outcome.reused_tokens = tokens
        self._counts.reused_tokens += tokens
        self._counts.compared_tokens += decision.expected_reuse
        self._counts.resyncs += self._caches.note_reused(decision, tokens, now)
        return decision

    def note_elsewhere(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> None:
        """Another router has sent a prompt to a rank, which will hold it."""
        self._caches.note_elsewhere(rank, sequence_hashes, now)

    def instance_of(self, session: str, now: float) -> str | None:
        """The instance to which a session was sent last; None for an unknown one."""
        rank = self._affinity.rank_of(session, now)
        return None if rank is None else rank.instance

    def refresh(self, profiles: Sequence[InstanceProfile]) -> None:
        """Other instances are there now: waiting requests may go there as well."""
        self._queue.refresh(profiles)

    def remove_instance(self, instance: str) -> None:
        """An instance is gone for good: nothing is charged to it or expected of it any longer."""
        self.load.remove_instance(instance)
        self._caches.remove_instance(instance)

    def forget_cache(self, instance: str) -> None:
        """An instance began anew with an empty cache: what was guessed of it is void."""
        self._caches.forget_cache(instance)

    def awareness(self) -> CacheAwareness:
        """The degree to which decisions can rely on what is known of the caches at this moment."""
        return self._caches.awareness()

    def statistics(self) -> SchedulerStatistics:
        """Figures of this scheduler."""
        return replace(
            self._counts,
            running=len(self._running),
            waiting=len(self._queue),
            refused=self._queue.refused,
            agreements=dict(self._shadows.agreements),
        )

    # Deciding -----------------------------------------------------------------------------

    def _decide(self, request: SchedulingRequest, now: float) -> Decision:
        shape = request.shape
        block_size = shape.block_size
        shape.popularity = self._popularity.note(shape.sequence_hashes)
        offer = self._offer_of(request)
        candidates, predicted, lenders = self._candidates(request, offer, now)
        costs = self._costs(request, offer, candidates)
        at, reason = self._choose(request, candidates, costs, now)
        chosen, profile = candidates[at], offer.profile_of[at]
        # Blocks that it has said itself that it holds.
        said = chosen.overlap.total - predicted.get(at, 0)
        self._counts.decisions += 1
        # Engines compute at least the last token of a prompt, of whose logits they draw the next.
        most = max(0, shape.prompt_tokens - 1) // block_size
        reuse = min(most, chosen.overlap.total) * block_size
        peer, peer_overlap = lenders.other_than(profile) if chosen.peer_blocks else (None, 0)
        decision = Decision(
            number=self._counts.decisions,
            request_id=request.request_id,
            attempt=request.attempt,
            decided_at=now,
            prompt_tokens=shape.prompt_tokens,
            prompt_blocks=shape.prompt_blocks,
            block_size=block_size,
            candidates=candidates,
            costs=costs,
            chosen=chosen.rank,
            reason=reason,
            policy=self._policy.name,
            expected_reuse=reuse,
            told_reuse=min(reuse, said * block_size),
            peer=peer,
            peer_overlap=peer_overlap,
            temperature=self.config.temperature,
            predicted=predicted,
            excluded=request.excluded,
            index_sequence=self._caches.sequence,
            awareness=self._caches.known_awareness(now),
            session=request.session,
            waited_s=now - request.arrived,
            tenant=shape.metadata.get(Context.TENANT_KEY, ""),
            shadows=self._shadows.ask(shape, candidates, at),
        )
        self._commit(request, decision, profile, said, now)
        return decision

    def _offer_of(self, request: SchedulingRequest) -> Offer:
        """The ranks that a request may get, which are those of the request before it mostly."""
        profiles = tuple(request.profiles)
        if profiles == self._offer.profiles:
            return self._offer
        offer = Offer(profiles)
        if not request.is_narrow:
            self._offer = offer
        return offer

    def _costs(
        self, request: SchedulingRequest, offer: Offer, candidates: Candidates
    ) -> NDArray[np.float64]:
        """The cost of each candidate: the policy's, times the request's preference."""
        try:
            costs = self._policy.costs(request.shape, candidates, request_id=request.request_id)
        except ConfigError as error:
            # Each call is told what is wrong; the way there is logged once for each policy.
            if not self._has_failed:
                self._has_failed = True
                logger.error("%s", error.message, exc_info=error.__cause__)
            raise
        constraints = request.constraints
        if not constraints:
            return costs
        factors = [constraints.multiplier(profile) for profile in offer.profile_of]
        with np.errstate(over="ignore"):
            return np.maximum(costs * factors, -sys.float_info.max)

    def _candidates(
        self, request: SchedulingRequest, offer: Offer, now: float
    ) -> tuple[Candidates, dict[int, int], Lenders]:
        """Every rank that may be chosen, how many blocks of its overlap are guessed, and who can
        send blocks to another."""
        shape = request.shape
        overlaps, predicted = self._caches.overlaps(offer, shape, now)
        lenders = Lenders.of(offer, overlaps, predicted)
        load = self.load.columns(offer, shape.sequence_hashes)
        if offer.routes is not None:
            load = load.of_one(offer.routes)
        candidates = Candidates(
            offer.ranks,
            overlaps,
            load.prefill_tokens,
            load.blocks,
            load.added_blocks,
            load.requests,
            offer.total_blocks,
            offer.max_batched_tokens,
            offer.totals,
            lenders.blocks(offer, overlaps),
            offer.hops(request.hops) if request.hops else None,
        )
        best = max(map(sum, overlaps.values()), default=0)
        self._counts.best_tokens += min(best * shape.block_size, shape.prompt_tokens)
        return candidates, predicted, lenders

    def _choose(
        self,
        request: SchedulingRequest,
        candidates: Candidates,
        costs: NDArray[np.float64],
        now: float,
    ) -> tuple[int, Reason]:
        if request.session:
            kept = self._affinity.find(request.session, request.shape, candidates, now)
            if kept is not None and costs[kept] < math.inf:
                self._counts.sessions_kept += 1
                return kept, Reason.SESSION
        at = choose(costs, self.config.temperature, self._random)
        if at is None:
            raise Overloaded(
                f"policy {self._policy.name} gives infinity to all {len(candidates)} candidates",
                retry_after=RETRY_AFTER,
                request_id=request.request_id,
                started=False,
            )
        if len(candidates) == 1:
            return at, Reason.ONLY_CANDIDATE
        return at, Reason.SAMPLED if self.config.temperature > 0 else Reason.LOWEST_COST

    def _commit(
        self,
        request: SchedulingRequest,
        decision: Decision,
        profile: InstanceProfile,
        said: int,
        now: float,
    ) -> None:
        shape, rank = request.shape, decision.chosen
        hashes = shape.sequence_hashes
        self._caches.note_sent(decision.number, profile, rank, said, shape, now)
        if request.session:
            self._affinity.bind(request.session, rank, now)
        # Charged when all else is done: a caller that gets no decision cannot say that it ended.
        self.load.add(
            str(decision.number),
            rank,
            hashes,
            shape.prompt_tokens,
            decision.expected_reuse,
            shape.expected_output_tokens,
        )
        self._running[decision.number] = decision
        self.decisions.add(decision)
        self._counts.waited += now > request.arrived
        self._counts.expected_tokens += decision.expected_reuse
        self._counts.prompt_tokens += decision.prompt_tokens
