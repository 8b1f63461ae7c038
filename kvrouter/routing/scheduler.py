"""`KvScheduler`: decides which rank gets a request, or that it waits. No I/O, no clock.

Whoever uses it tells it what happens to requests, and asks `release` after each such change.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from dynbus.bus.errors import ConfigError, DynbusError, Overloaded
from dynbus.bus.protocol.tokens import jitter
from dynbus.kvrouter.radix.index import Rank
from dynbus.kvrouter.stream.awareness import CacheAwareness, doubted

from .active_load import ActiveLoad
from .affinity import SessionAffinity
from .cost import Candidate, CostFunction, choose
from .decision import CandidateTable, Decision, DecisionLog, Reason
from .expected_caches import ExpectedCaches
from .kv_cost import KvCost
from .policies import policy_name
from .profile import InstanceProfile
from .request_queue import RETRY_AFTER, RequestQueue
from .reuse import ReuseWatch
from .scheduling import (
    Follower,
    LoadRecord,
    SchedulerConfig,
    SchedulerStatistics,
    SchedulingRequest,
    Ticket,
    base_awareness,
)
from .scoring import apply_constraints, scored
from .shadows import Shadows

logger = logging.getLogger(__name__)

AWARENESS_INTERVAL: Final = 0.1
"""Seconds for which what a follower says of itself is taken as it is."""


class KvScheduler:
    """Decides for the requests of one component. Times are seconds of one monotonic clock.

    Args:
        policy: the cost function; `KvCost` unless given.
        load: what runs where; an own `ActiveLoad` unless given.
        follower: the exact index; None when engines send no events.
        shadows: cost functions by name that score every request and decide nothing.
        random: breaks ties, and draws at a temperature.
    """

    def __init__(
        self,
        block_size: int,
        *,
        policy: CostFunction | None = None,
        config: SchedulerConfig | None = None,
        load: LoadRecord | None = None,
        follower: Follower | None = None,
        shadows: Mapping[str, CostFunction] | None = None,
        random: Random = jitter,
    ) -> None:
        self.block_size = block_size
        self.config = config = config or SchedulerConfig()
        self.load: LoadRecord = ActiveLoad(block_size) if load is None else load
        self.decisions = DecisionLog(config.decisions)
        self._shadows = Shadows(shadows or {}, random)
        self._follower = follower
        self._random = random
        self._queue = RequestQueue(config, self.load)
        self._affinity = SessionAffinity(ttl=config.session_ttl, overload=config.session_overload)
        self._caches = ExpectedCaches(follower, config)
        self._reuse = ReuseWatch(block_size)
        self._awareness = ""
        self._look_at = -math.inf
        self._running: dict[int, Decision] = {}
        self._number = 0
        self._counts: Counter[str] = Counter()
        self._policy: CostFunction = policy or KvCost()
        self._policy_name = policy_name(self._policy)
        self._has_failed = False

    def __repr__(self) -> str:
        return f"<KvScheduler [{len(self._running)} running, {len(self._queue)} waiting]>"

    def use_policy(self, policy: CostFunction, name: str = "") -> None:
        """Decide by another cost function from now on."""
        self._policy = policy
        self._policy_name = name or policy_name(policy)
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
        apply_constraints(request)
        if self._queue.holds(request):
            return self._queue.push(request)
        return self._decide(request, now)

    def release(self, now: float) -> list[tuple[Ticket, Decision | DynbusError]]:
        """Those that wait no longer, each with its decision, or what speaks against one.

        To be asked after every `submit` that gave a ticket, every `first_item` and `ended`, and
        after a change of the instances or of the load that other routers have told.
        """
        return [(ticket, self._answer(ticket.request, now)) for ticket in self._queue.take_free()]

    def _answer(self, request: SchedulingRequest, now: float) -> Decision | DynbusError:
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
                f"policy {self._policy_name} or what it was given failed: "
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
            self.load.prefill_completed(str(number))

    def grown(self, number: int, output_tokens: int) -> None:
        """A decision's request has so much output by now."""
        if number in self._running:
            self.load.grow(str(number), output_tokens)

    def ended(self, number: int, now: float, error: str = "") -> None:
        """A decision's request is over; `error` is the code of what it failed with."""
        decision = self._running.pop(number, None)
        if decision is not None:
            decision.outcome.ended_s = now - decision.decided_at
            decision.outcome.error = error
            self.load.free(str(number))

    def report_reused(self, request_id: str, tokens: int, now: float) -> Decision | None:
        """The engine found so many tokens of a request's prompt in its cache.

        Returns:
            The decision that it belongs to, the latest of the request; None when it is not
            kept any longer.
        """
        found = self.decisions.find(request_id)
        return self.note_reused(found[-1].number, tokens, now) if found else None

    def note_reused(self, number: int, tokens: int, now: float) -> Decision | None:
        """The same as `report_reused`, of a decision by its number."""
        decision = self.decisions.get(number)
        if decision is None or decision.outcome.reused_tokens is not None:
            return decision
        # An engine may say anything; of a prompt no more than all of it can be reused.
        tokens = min(tokens, decision.prompt_tokens)
        decision.outcome.reused_tokens = tokens
        self._counts["reused"] += tokens
        self._counts["compared"] += decision.expected_reuse
        if self._follower is not None:
            rank, told = decision.chosen, decision.told_reuse
            predicted, at = decision.expected_reuse, decision.decided_at
            reason = self._reuse.note(rank, told, predicted, tokens, at)
            if reason:
                self._reuse.asked(rank, now)
                self._counts["resyncs"] += 1
                self._follower.ask_resync(rank, reason)
        return decision

    def note_elsewhere(self, rank: Rank, sequence_hashes: Sequence[int], now: float) -> None:
        """Another router has sent a prompt to a rank, which will hold it."""
        self._caches.note_elsewhere(rank, sequence_hashes, now)

    def refresh(self, profiles: Sequence[InstanceProfile]) -> None:
        """Other instances are there now: whoever waits may go there as well."""
        self._queue.refresh(profiles)

    def remove_instance(self, instance: str) -> None:
        """An instance is gone for good: nothing is charged to it or expected of it any longer."""
        self.load.remove_instance(instance)
        self._caches.remove_instance(instance)
        self._reuse.remove_instance(instance)

    def forget_cache(self, instance: str) -> None:
        """An instance began anew with an empty cache: what was guessed of it is void."""
        self._caches.forget_cache(instance)
        self._reuse.remove_instance(instance)

    def awareness(self) -> CacheAwareness:
        """How far decisions can rely on what is known of the caches at this moment."""
        doubts = {
            f"{rank.instance}/{rank.dp_rank}": why for rank, why in self._reuse.doubts().items()
        }
        return doubted(base_awareness(self._follower, self.config), doubts)

    def statistics(self) -> SchedulerStatistics:
        """Figures of this scheduler."""
        counts = self._counts
        return SchedulerStatistics(
            decisions=self._number,
            running=len(self._running),
            waiting=len(self._queue),
            waited=counts["waited"],
            refused=self._queue.refused,
            sessions_kept=counts["session"],
            prompt_tokens=counts["prompt"],
            best_tokens=counts["best"],
            expected_tokens=counts["expected"],
            reused_tokens=counts["reused"],
            compared_tokens=counts["compared"],
            resyncs=counts["resyncs"],
            agreements=dict(self._shadows.agreements),
        )

    # Deciding -----------------------------------------------------------------------------

    def _decide(self, request: SchedulingRequest, now: float) -> Decision:
        shape = request.shape
        candidates, predicted = self._candidates(request, now)
        costs = self._costs(request, candidates)
        at, reason = self._choose(request, candidates, costs, now)
        chosen = candidates[at]
        self._number += 1
        reuse = min(shape.prompt_tokens, chosen.overlap.total * self.block_size)
        decision = Decision(
            number=self._number,
            request_id=request.request_id,
            attempt=request.attempt,
            decided_at=now,
            prompt_tokens=shape.prompt_tokens,
            prompt_blocks=shape.prompt_blocks,
            block_size=self.block_size,
            table=CandidateTable(candidates),
            costs=costs,
            chosen=chosen.rank,
            reason=reason,
            policy=self._policy_name,
            expected_reuse=reuse,
            told_reuse=min(reuse, (chosen.overlap.total - predicted[at]) * self.block_size),
            temperature=self.config.temperature,
            predicted=predicted,
            excluded=request.excluded,
            index_sequence=0 if self._follower is None else self._follower.position.sequence,
            awareness=self._known_awareness(now),
            session=request.session,
            waited_s=now - request.arrived,
            shadows=self._shadows.ask(shape, candidates, at),
        )
        self._commit(request, decision, chosen, predicted[at], now)
        return decision

    def _costs(
        self, request: SchedulingRequest, candidates: Sequence[Candidate]
    ) -> Sequence[float]:
        try:
            return scored(self._policy, self._policy_name, request, candidates)
        except ConfigError as error:
            # Each call is told what is wrong; the way there is logged once for each policy.
            if not self._has_failed:
                self._has_failed = True
                logger.error("%s", error.message, exc_info=error.__cause__)
            raise

    def _known_awareness(self, now: float) -> str:
        """How far the index can be relied on, looked at now and then since that takes time."""
        if now >= self._look_at:
            self._look_at = now + AWARENESS_INTERVAL
            self._awareness = str(self.awareness())
        return self._awareness

    def _candidates(
        self, request: SchedulingRequest, now: float
    ) -> tuple[list[Candidate], list[int]]:
        """Every rank that may be chosen, and how many blocks of its overlap are guessed."""
        shape = request.shape
        hashes = shape.sequence_hashes
        overlaps, predicted = self._caches.overlaps(request.profiles, shape, now)
        load_of, added_blocks = self.load.load, self.load.added_blocks
        candidates: list[Candidate] = []
        held = iter(overlaps)
        for profile in request.profiles:
            for rank in profile.ranks:
                prefill_tokens, blocks, requests = load_of(rank)
                candidates.append(
                    Candidate(
                        rank,
                        next(held),
                        prefill_tokens,
                        blocks,
                        added_blocks(rank, hashes),
                        requests,
                        profile.total_blocks,
                        profile.max_batched_tokens,
                    )
                )
        best = max(map(sum, overlaps), default=0)
        self._counts["best"] += min(best * self.block_size, shape.prompt_tokens)
        return candidates, predicted

    def _choose(
        self,
        request: SchedulingRequest,
        candidates: Sequence[Candidate],
        costs: Sequence[float],
        now: float,
    ) -> tuple[int, Reason]:
        if request.session:
            kept = self._affinity.find(request.session, request.shape, candidates, now)
            if kept is not None and costs[kept] < math.inf:
                self._counts["session"] += 1
                return kept, Reason.SESSION
        at = choose(costs, self.config.temperature, self._random)
        if at is None:
            raise Overloaded(
                f"policy {self._policy_name} finds none of {len(candidates)} candidates fit",
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
        chosen: Candidate,
        guessed: int,
        now: float,
    ) -> None:
        shape = request.shape
        rank = chosen.rank
        hashes = shape.sequence_hashes
        profile = next(one for one in request.profiles if one.instance == rank.instance)
        self._caches.note_sent(profile, chosen, guessed, hashes, now)
        if request.session:
            self._affinity.bind(request.session, rank, now)
        # Charged when all else is done: whoever gets no decision cannot say that it ended.
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
        self._counts["waited"] += now > request.arrived
        self._counts["expected"] += decision.expected_reuse
        self._counts["prompt"] += decision.prompt_tokens
