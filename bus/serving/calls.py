"""One call at an instance: what was asked for, where its results go, and how far it is.

Plain state, of which each part has one owner: `Admission` decides who runs, the ledger knows
what its client was told, `Execution` runs its handler.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from dynbus.bus.context import Context
from dynbus.bus.errors import DynbusError, Overloaded
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.unread_bytes import ClientUnreadBytes

from .admission import Admission
from .batches import Batches
from .reply import CallReply

if TYPE_CHECKING:
    from dynbus.bus.telemetry.telemetry import CallObservation


class Call:
    """A call that waits or runs at an instance.

    Attributes:
        reply: where its results go; it has ended when the call has.
        turn_taker: whose turn it takes where calls wait.
        account: counts what is kept for its client.
        started_at: when the request arrived, on the monotonic clock.
        began_at: when its handler was started; None while it waits.
        task: what runs its handler.
        entered: whether the handler was, or never will be.
        settled: whether it is accounted for, since it neither runs nor waits any longer.
        deadline_number: of its deadline, as `Deadlines` knows it.
        waiting_bytes: the size of a request that waits, as its account counts it.
    """

    __slots__ = (
        "__weakref__",
        "account",
        "began_at",
        "context",
        "deadline_number",
        "entered",
        "kill_timer",
        "observation",
        "reply",
        "request",
        "served",
        "settled",
        "started_at",
        "task",
        "turn_taker",
        "waiting_bytes",
    )

    def __init__(
        self,
        served: ServedEndpoint,
        context: Context,
        reply: CallReply,
        now: float,
        *,
        turn_taker: str,
        account: ClientUnreadBytes,
    ) -> None:
        self.served = served
        self.context = context
        self.reply = reply
        self.turn_taker = turn_taker
        self.account = account
        self.request: Any = None
        self.task: asyncio.Task[None] | None = None
        self.entered = False
        self.settled = False
        self.deadline_number: int | None = None
        self.kill_timer: asyncio.TimerHandle | None = None
        self.waiting_bytes = 0
        self.started_at = now
        self.began_at: float | None = None
        self.observation: CallObservation | None = None

    def __repr__(self) -> str:
        state = "ended" if self.reply.ended else "waits" if self.began_at is None else "runs"
        return f"<Call {self.context.id} of {self.served.address} [{state}]>"

    @property
    def ended(self) -> bool:
        """True if nothing more is sent to its caller."""
        return self.reply.ended

    @property
    def is_continued(self) -> bool:
        """True if it continues a stream of which its caller has items already."""
        return self.served.endpoint.streaming and bool(self.context.delivered)

    @property
    def can_move(self) -> bool:
        """True if it is a stream with which its caller can go on at another instance."""
        return self.served.endpoint.streaming and self.context.continues

    def hold_request(self, size: int) -> None:
        """Count the request of a call that waits with what is kept for its client."""
        self.waiting_bytes = size
        self.account.add(size)

    def let_request_go(self) -> None:
        """The call waits no longer."""
        if self.waiting_bytes:
            self.account.add(-self.waiting_bytes)
            self.waiting_bytes = 0


def no_room(account: ClientUnreadBytes) -> Overloaded | None:
    """The reason for which a call of a client that does not take its results may not begin; None
    where it may."""
    if not account.is_refused:
        return None
    return Overloaded(
        f"{account.held} bytes of results wait for this client, and the instance has no room for "
        "more: read the open streams first",
        started=False,
    )


class ServedEndpoint:
    """An endpoint of one instance, with its address, its admission and its figures.

    Attributes:
        invoke: what a call runs, with its request, or with that and its port.
        batches: those that its calls go together into; None where each runs alone.
        items: what the streams have sent that are over.
    """

    def __init__(self, address: EndpointName, endpoint: Endpoint, instance_id: str) -> None:
        self.address = address
        self.hop = address.hop(instance_id)
        self.endpoint = endpoint
        self.invoke = endpoint.invoke
        self.batches: Batches | None = None
        self.admission: Admission[Call] = Admission(endpoint.places, endpoint.queue)
        self.requests = 0
        self.errors = 0
        self.last_error = ""
        self.processing_time = 0.0
        self.items = 0

    def gather_into(self, batches: Batches) -> None:
        """Have its calls go together."""
        self.batches = batches
        self.invoke = partial(self.endpoint.invoke, answer=batches.answer)

    def finished(self, seconds: float, error: DynbusError | None) -> None:
        """Count a call that ran for `seconds`, 0 where it never began."""
        self.requests += 1
        self.processing_time += seconds
        if error is not None:
            self.errors += 1
            self.last_error = f"{error.code}: {error.message}"[:200]
