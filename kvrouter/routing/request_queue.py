"""Who waits while all instances that may serve it are busy, and who need not wait any longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from dynbus.bus.errors import Overloaded

from .profile import InstanceProfile
from .scheduling import LoadRecord, SchedulerConfig, SchedulingRequest, Ticket
from .waiting import WaitingQueue

RETRY_AFTER: Final = 0.5
"""Seconds after which a request that found no instance for it has a chance."""


class RequestQueue:
    """Requests of one component that wait for room.

    Args:
        load: what the instances have to compute.

    Attributes:
        refused: requests that found the queue full.
    """

    def __init__(self, config: SchedulerConfig, load: LoadRecord) -> None:
        self.refused = 0
        self._threshold = config.queue_threshold
        self._load = load
        self._queue: WaitingQueue[Ticket] = WaitingQueue(config.queue_limit)

    def __repr__(self) -> str:
        return f"<RequestQueue [{len(self)} waiting]>"

    def __len__(self) -> int:
        return len(self._queue)

    def holds(self, request: SchedulingRequest) -> bool:
        """Whether a request that arrives now has to wait."""
        if self._threshold is None:
            return False
        if not request.is_narrow and self._queue.has_before(
            request.shape.priority, lambda ticket: not ticket.request.is_narrow
        ):
            return True
        return self._is_busy(request.profiles)

    def push(self, request: SchedulingRequest) -> Ticket:
        """Let a request wait.

        Raises:
            Overloaded: the queue is full.
        """
        if self._queue.is_full:
            self.refused += 1
            raise Overloaded(
                f"all {len(request.profiles)} instances are busy and {len(self._queue)} requests "
                "wait: no more may",
                retry_after=RETRY_AFTER,
                request_id=request.request_id,
                started=False,
            )
        ticket = Ticket(request)
        ticket.place = self._queue.push(ticket, request.shape.priority)
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """A request waits no longer, since nobody wants it; False when it did not wait."""
        return self._queue.remove(ticket.place)

    def take_free(self) -> Iterator[Ticket]:
        """Those that need not wait any longer, in the order of service.

        Whoever takes one charges the load with it before it takes the next.
        """
        is_held = False
        for ticket in self._queue:
            request = ticket.request
            if is_held and not request.is_narrow:
                continue
            if self._is_busy(request.profiles):
                is_held = is_held or not request.is_narrow
                continue
            self._queue.remove(ticket.place)
            yield ticket

    def refresh(self, profiles: Sequence[InstanceProfile]) -> None:
        """Other instances are there now: whoever waits may go there as well."""
        for ticket in self._queue:
            request = ticket.request
            fit = [one for one in profiles if request.constraints.refusal(one) is None]
            if request.attempt > 1:
                # Others have turned the call away: they are for when there is nobody else.
                before = {one.instance for one in request.profiles}
                fit = [one for one in fit if one.instance in before] or fit
            request.profiles = fit or request.profiles

    def _is_busy(self, profiles: Sequence[InstanceProfile]) -> bool:
        """Whether every candidate has more to compute than the threshold."""
        threshold = self._threshold
        if threshold is None:
            return False
        for profile in profiles:
            if profile.max_batched_tokens is None:
                return False
            limit = threshold * profile.max_batched_tokens
            if any(self._load.load(rank).prefill_tokens <= limit for rank in profile.ranks):
                return False
        return True
