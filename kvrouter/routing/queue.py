"""Requests for a rank, and who of them waits while all instances that may serve it are busy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from dynbus import Context, NoInstances, Overloaded

from .active_load import ActiveLoad
from .cost import RequestShape
from .fairness import TIMES_FREE, FairTurns, Shares
from .profiles import InstanceProfile
from .requests import NO_CONSTRAINTS, Constraints

RETRY_AFTER: Final = 0.5
"""Seconds after which a request that found no instance for it has a chance."""

MOST_SHOWN: Final = 3
"""Refusals in the text of an error."""


@dataclass(slots=True, eq=False)
class SchedulingRequest:
    """A request, and who may serve it.

    Attributes:
        profiles: the instances that may be chosen.
        excluded: why others may not, by id.
        arrived: seconds of the scheduler's clock.
        hops: milliseconds of the way to instances of other zones and back, by id.
    """

    request_id: str
    shape: RequestShape
    profiles: Sequence[InstanceProfile]
    arrived: float
    attempt: int = 1
    session: str = ""
    constraints: Constraints = NO_CONSTRAINTS
    excluded: Mapping[str, str] = field(default_factory=dict[str, str])
    hops: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def is_narrow(self) -> bool:
        """True if it may go to some of the instances only, and so waits in a queue of its own."""
        return self.constraints.narrows or self.attempt > 1

    def apply_constraints(self) -> None:
        """Leave out the instances that its constraints forbid, and note why.

        Raises:
            NoInstances: they leave none.
        """
        if not self.constraints.narrows:
            return
        refusals = {
            profile.instance: refusal
            for profile in self.profiles
            if (refusal := self.constraints.refusal(profile)) is not None
        }
        self.profiles = [one for one in self.profiles if one.instance not in refusals]
        self.excluded = {**self.excluded, **refusals}
        if not self.profiles:
            first = list(refusals.items())[:MOST_SHOWN]
            shown = "; ".join(f"{instance} {why}" for instance, why in first)
            raise NoInstances(
                f"the request's constraints leave none of {len(refusals)} instances: {shown}",
                request_id=self.request_id,
                started=False,
            )


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits.

    Attributes:
        place: the order of service: the most urgent first, then by the turns of their tenants,
            then as they arrived.
        tenant: empty where there are none.
    """

    request: SchedulingRequest
    place: tuple[int, float, int]
    tenant: str


_place: Final = attrgetter("place")


class RequestQueue:
    """Requests of one component that wait for room. Those of one priority are served by tenants in
    turn, by the tokens of their prompts.

    Args:
        threshold, limit: `queue_threshold` and `queue_limit` of `RouterConfig`.
        load: what the instances have to compute.

    Attributes:
        refused: requests that found the queue full.
    """

    def __init__(self, threshold: float | None, limit: int, load: ActiveLoad) -> None:
        self.refused = 0
        self._threshold = threshold
        self._limit = limit
        self._load = load
        self._arrivals = 0
        # In the order of service.
        self._tickets: list[Ticket] = []
        self._turns = FairTurns()
        self._places = Shares(limit, TIMES_FREE)

    def __repr__(self) -> str:
        return f"<RequestQueue [{len(self)} of {self._limit} waiting]>"

    def __len__(self) -> int:
        return len(self._tickets)

    def holds(self, request: SchedulingRequest) -> bool:
        """True if a request that arrives now has to wait."""
        if self._threshold is None:
            return False
        if not request.is_narrow and self._has_before(request.shape.priority):
            return True
        return self._is_busy(request.profiles)

    def push(self, request: SchedulingRequest) -> Ticket:
        """Let a request wait.

        Raises:
            Overloaded: the queue is full, or as far as the request's tenant may fill it.
        """
        tenant = request.shape.metadata.get(Context.TENANT_KEY, "")
        if not self._places.reserve(tenant):
            self.refused += 1
            is_full = len(self) >= self._limit
            full = "the queue is full" if is_full else "what is free is for other tenants"
            raise Overloaded(
                f"all {len(request.profiles)} instances are busy and {len(self)} requests "
                f"wait: {full} (queue_limit)",
                retry_after=RETRY_AFTER,
                request_id=request.request_id,
                started=False,
            )
        self._arrivals += 1
        turn = self._turns.take(tenant, request.shape.prompt_tokens)
        ticket = Ticket(request, (-request.shape.priority, turn, self._arrivals), tenant)
        insort(self._tickets, ticket, key=_place)
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """A request waits no longer, since nobody wants it; False when it did not wait."""
        if not self._remove(ticket):
            return False
        self._turns.correct(ticket.tenant, -ticket.request.shape.prompt_tokens)
        return True

    def _remove(self, ticket: Ticket) -> bool:
        at = bisect_left(self._tickets, ticket.place, key=_place)
        if self._tickets[at : at + 1] != [ticket]:
            return False
        del self._tickets[at]
        self._places.give_back(ticket.tenant)
        return True

    def take_free(self) -> Iterator[Ticket]:
        """Those that need not wait any longer, in the order of service.

        The taker of one charges the load with it before it takes the next.
        """
        is_held = False
        for ticket in self._tickets.copy():
            request = ticket.request
            if is_held and not request.is_narrow:
                continue
            if self._is_busy(request.profiles):
                is_held = is_held or not request.is_narrow
                continue
            self._remove(ticket)
            self._turns.begin(ticket.place[1])
            yield ticket

    def refresh(self, profiles: Sequence[InstanceProfile]) -> None:
        """Other instances are there now: waiting requests may go there as well."""
        for ticket in self._tickets:
            request = ticket.request
            fit = [one for one in profiles if request.constraints.refusal(one) is None]
            if request.attempt > 1:
                # Others have turned the call away: they are for when there is nobody else.
                before = {one.instance for one in request.profiles}
                fit = [one for one in fit if one.instance in before] or fit
            request.profiles = fit or request.profiles

    def _has_before(self, priority: int) -> bool:
        """True if a request that arrives now would wait behind one that waits for all."""
        for ticket in self._tickets:
            if ticket.place[0] > -priority:
                return False
            if not ticket.request.is_narrow:
                return True
        return False

    def _is_busy(self, profiles: Sequence[InstanceProfile]) -> bool:
        """True if every candidate has more to compute than the threshold."""
        threshold = self._threshold
        if threshold is None:
            return False
        for profile in profiles:
            if profile.max_batched_tokens is None:
                return False
            limit = threshold * profile.max_batched_tokens
            if any(self._load.of(rank).prefill_tokens <= limit for rank in profile.ranks):
                return False
        return True
