"""`Dispatch`: carries out what a scheduler decides on the calls of a component."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynbus.actors.calling.routing import RouteRequest
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import ConfigError
from dynbus.bus.records.discovery import Instance
from dynbus.kvrouter.radix.index import Rank

from .decision import Decision
from .load_sharing import LoadSharing
from .profile import InstanceProfile
from .profiles import Profiles
from .scheduler import KvScheduler
from .scheduling import SchedulingRequest, Ticket
from .waiting_calls import WaitingCalls

Offered = Callable[[], Sequence[Instance]]
"""The instances that may be chosen just now."""


class Dispatch:
    """The calls of one component, from the question where they go to their end.

    Args:
        profiles: of the component's instances.
        offered: see `KvRouter`.

    Attributes:
        sharing: where other routers are told of these calls; None for a router that is alone.
    """

    def __init__(self, scheduler: KvScheduler, profiles: Profiles, offered: Offered | None) -> None:
        self.scheduler = scheduler
        self.sharing: LoadSharing | None = None
        self._profiles = profiles
        self._offered = offered
        self._waiting = WaitingCalls(scheduler, self._look_again)

    def __repr__(self) -> str:
        return f"<Dispatch {self.scheduler!r}>"

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    async def decide(self, request: SchedulingRequest, call: RouteRequest) -> Decision:
        """The decision for a call, at once or when there is room for it.

        Raises:
            DynbusError: see `KvScheduler.submit` and `WaitingCalls.wait`.
        """
        answer = self.scheduler.submit(request, request.arrived)
        if isinstance(answer, Ticket):
            answer = await self._waiting.wait(answer, call)
        if answer.attempt > 1:
            tried = self.scheduler.decisions.tried_before(answer)
            answer.excluded = {**tried, **answer.excluded}
        self._tell()
        return answer

    def see(self, profiles: Sequence[InstanceProfile], now: float) -> None:
        """Forget what is gone of the instances; have those that wait know of new ones."""
        for instance in self._profiles.gone(now):
            self.scheduler.remove_instance(instance)
        for instance in self._profiles.restarted():
            self.scheduler.forget_cache(instance)
        if self._waiting:
            self.scheduler.refresh(profiles)
            self.release()

    def release(self) -> None:
        """Let calls go on that have waited long enough."""
        self._waiting.release()

    def note_elsewhere(self, rank: Rank, sequence_hashes: Sequence[int]) -> None:
        """Another router has sent a prompt to a rank."""
        self.scheduler.note_elsewhere(rank, sequence_hashes, monotonic())

    def close(self) -> None:
        """Fail the calls that wait."""
        self._waiting.close()

    def _look_again(self) -> None:
        """Whether calls that wait may go on because of what no call has told."""
        try:
            instances = () if self._offered is None else self._offered()
            profiles = self._profiles.of(instances)[0] if instances else ()
        except ConfigError:
            # Each that does not fit was logged; those that calls wait for may be free.
            profiles = ()
        self.see(profiles, monotonic())

    def _tell(self) -> None:
        if self.sharing is not None:
            self.sharing.notify()

    # What the observer of an attempt tells, which has a decision's number ---------------------

    def first_item(self, number: int) -> None:
        """The request has its first output."""
        self.scheduler.first_item(number, monotonic())
        self.release()
        self._tell()

    def grown(self, number: int, output_tokens: int) -> None:
        """The request has so much output by now."""
        self.scheduler.grown(number, output_tokens)

    def reused(self, number: int, tokens: int) -> None:
        """The engine has found so many tokens of the prompt in its cache."""
        self.scheduler.note_reused(number, tokens, monotonic())

    def ended(self, number: int, error: str) -> None:
        """The request is over."""
        self.scheduler.ended(number, monotonic(), error)
        self.release()
        self._tell()
