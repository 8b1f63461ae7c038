"""Calls that wait in a router until an instance has room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from dynbus.actors.calling.routing import RouteRequest
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DeadlineExceeded, Draining

from .attempt import queued
from .decision import Decision
from .scheduler import KvScheduler
from .scheduling import Ticket

ANSWER_MARGIN: Final = 0.05
"""Seconds before the deadline of a handler at which its calls leave the queue: what they say of it
would come too late to its caller."""

LOOK_INTERVAL: Final = 0.2
"""Seconds between two looks at the instances while calls wait."""


class WaitingCalls:
    """Carries out what a scheduler decides on calls that wait.

    Args:
        look: called every `LOOK_INTERVAL` while calls wait. It tells the scheduler what there is
            to know of the instances, and asks `release`.
    """

    def __init__(self, scheduler: KvScheduler, look: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._look = look
        self._next_look: asyncio.TimerHandle | None = None
        self._waiting: dict[Ticket, asyncio.Future[Decision]] = {}

    def __repr__(self) -> str:
        return f"<WaitingCalls [{len(self._waiting)}]>"

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, ticket: Ticket, request: RouteRequest) -> Decision:
        """The decision for a call, when it is made.

        Raises:
            DeadlineExceeded: the deadline of the handler that makes the call is over before.
            Draining: the router was closed before.
            DynbusError: what speaks against a decision.
        """
        future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = future
        begun = monotonic()
        try:
            # What it waits for may have happened when nobody waited.
            self.release()
            self._look_later()
            async with asyncio.timeout(_time_in_queue(request, begun)):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                # Decided in the same turn in which the time was over.
                return future.result()
            raise DeadlineExceeded(
                f"the call to {request.endpoint} {queued(monotonic() - begun)} until its deadline: "
                f"all instances are busy (calls that wait: {len(self._waiting)})",
                request_id=request.request_id,
                started=False,
            ) from None
        except asyncio.CancelledError as error:
            error.add_note(
                f"it {queued(monotonic() - begun)} (calls that wait: {len(self._waiting)})"
            )
            if future.done() and not future.cancelled() and future.exception() is None:
                # Decided in the same turn in which the caller left.
                self._scheduler.ended(future.result().number, monotonic(), "Cancelled")
                self.release()
            raise
        finally:
            self._scheduler.withdraw(ticket)
            del self._waiting[ticket]

    def release(self) -> None:
        """Let those go on who have waited long enough."""
        if not self._waiting:
            return
        now = monotonic()
        for ticket, answer in self._scheduler.release(now):
            future = self._waiting.get(ticket)
            if future is None or future.done():
                if isinstance(answer, Decision):
                    self._scheduler.ended(answer.number, now, "Cancelled")
            elif isinstance(answer, Decision):
                future.set_result(answer)
            else:
                future.set_exception(answer)

    def close(self) -> None:
        """Fail all that wait with `Draining`: nobody would tell them that they may go on."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        now = monotonic()
        for ticket, future in self._waiting.items():
            self._scheduler.withdraw(ticket)
            if not future.done():
                future.set_exception(
                    Draining(
                        f"the call {queued(now - ticket.request.arrived)}, which was closed: "
                        "repeat it by another router",
                        request_id=ticket.request.request_id,
                        started=False,
                    )
                )

    def _look_later(self) -> None:
        if self._next_look is None:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(LOOK_INTERVAL, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        if self._waiting:
            self._look_later()
            self._look()


def _time_in_queue(request: RouteRequest, now: float) -> float | None:
    """Seconds after which a handler's call leaves the queue, so that its caller hears why."""
    parent = request.parent
    if parent is None or parent.deadline is None:
        return None
    return max(0.0, parent.deadline - now - ANSWER_MARGIN)
