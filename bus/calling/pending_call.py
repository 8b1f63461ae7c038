"""One call that was sent to one instance: what its reader waits for, and how it ends.

`Caller` makes it, hands it the frames that arrive and the heartbeats' news; the task that
awaits it takes bytes out, or one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import (
    Cancelled,
    DeadlineExceeded,
    DynbusError,
    PayloadTooLarge,
    StreamLost,
    UnknownOutcome,
)
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.wire import End, Failed, Item, Items, Part, error_of

from .call_progress import CallProgress
from .remote_instance import RemoteInstance

KILL_AFTER: Final = 1.0

M = TypeVar("M")


class CallHead(msgspec.Struct, frozen=True, gc=False):
    """The headers of a request.

    Attributes:
        deadline: on the clock of `monotonic`; None without a limit.
        request_id: printable ASCII.
        fields: further headers, checked by `headers.encode_lines`.
    """

    endpoint: EndpointName
    request_id: str
    deadline: float | None
    attempt: int
    streaming: bool
    fields: dict[str, str]


class Gathering(Generic[M]):
    """The calls with news of a reader of many, who is told of all of them at the end of a turn.

    Args:
        read: called with the members that have news, each once. A member is what the reader knows
            a call by.

    Attributes:
        fresh: those of this turn; `begin` comes before the first, and one may be in it twice.
    """

    __slots__ = ("_read", "fresh")

    def __init__(self, read: Callable[[list[M]], object]) -> None:
        self._read = read
        self.fresh: list[M] = []

    def __repr__(self) -> str:
        return f"<Gathering [{len(self.fresh)} fresh]>"

    def add(self, member: M) -> None:
        """A call has news."""
        if not self.fresh:
            self.begin()
        self.fresh.append(member)

    def begin(self) -> None:
        """The first call of a turn has news."""
        asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        fresh, self.fresh = self.fresh, []
        self._read(list(dict.fromkeys(fresh)))


class PendingCall(CallProgress):
    """A call that was sent to one instance. Owned by the task that awaits it.

    Args:
        on_end: called once it has ended.

    Attributes:
        doubt: the bounce token of the question whether it arrived at all; empty if unasked.
        unreachable: whether nobody took it, or its instance died.
        moves: whether it is a stream that goes on at another instance when this one is lost.
        deadline_number: of its deadline, for the wheel that has armed it.
        gathering: where it is noted in place of waking a task, whenever items have come or it has
            ended; for readers of many calls at once.
        member: what that reader knows it by.
    """

    __slots__ = (
        "_on_end",
        "_unlink",
        "_waiter",
        "deadline_number",
        "doubt",
        "endpoint",
        "gathering",
        "member",
        "moves",
        "remote",
        "request_id",
        "streaming",
        "unreachable",
    )

    def __init__(
        self,
        head: CallHead,
        remote: RemoteInstance[PendingCall],
        number: int,
        *,
        window: int,
        max_item_bytes: int,
        now: float,
        on_end: Callable[[PendingCall], None],
    ) -> None:
        super().__init__(
            number, head.attempt, window=window, max_item_bytes=max_item_bytes, now=now
        )
        self._on_end = on_end
        self.remote = remote
        self.endpoint = head.endpoint
        self.request_id = head.request_id
        self.streaming = head.streaming
        self.moves = head.streaming and headers.CONTINUES in head.fields
        self.doubt = ""
        self.deadline_number: int | None = None
        self.unreachable = False
        self.gathering: Gathering[Any] | None = None
        self.member: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._unlink: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<PendingCall {self.number} {self.endpoint} {self.reader!r}>"

    @property
    def hop(self) -> str:
        """The name of the endpoint at the instance that was called, in errors."""
        return self.endpoint.hop(self.remote.name.instance_id)

    async def result(self) -> bytes:
        """Wait for the end; the result of a unary call.

        Raises:
            DynbusError: how the call ended otherwise.
        """
        reader = self.reader
        try:
            while reader.terminal is None and self.error is None:
                await self.wait()
        except asyncio.CancelledError:
            self.abandon()
            raise
        if self.error is not None:
            raise self.error
        return reader.result()

    async def items(self) -> list[bytes]:
        """Wait for items; an empty list is the end of a stream.

        Items that arrived before an error are delivered before it is raised.

        Raises:
            DynbusError: how the call ended otherwise.
        """
        reader = self.reader
        try:
            while not reader.ready and self.is_open:
                await self.wait()
        except asyncio.CancelledError:
            self.abandon()
            raise
        if reader.ready:
            return reader.drain()
        if self.error is not None:
            raise self.error
        return []

    def consumed(self, size: int) -> None:
        """The reader took items of `size` bytes; tells the writer now and then."""
        credit = self.consume(size)
        if credit is not None:
            self.remote.grant(credit)

    def abandon(self) -> None:
        """The reader leaves: the far side stops, and is killed a second later."""
        if self.is_open:
            self._cancel_far_side(KILL_AFTER)
            self.fail(Cancelled("the caller left", request_id=self.request_id))

    def cancel(self, *, kill: bool = False) -> None:
        """Ask the far side to stop, or drop the call now; the reader goes on to the end."""
        if self.is_open:
            self._cancel_far_side(0.0 if kill else -1.0)

    def follow(self, context: Context) -> None:
        """Pass stop and kill of `context` on to this call."""
        self._unlink = context.link(lambda killed: self.cancel(kill=killed))

    # Called by the caller ----------------------------------------------------------------

    def receive(self, frame: Item | Items | Part | End | Failed) -> None:
        reader = self.reader
        try:
            reader.receive(frame)
        except PayloadTooLarge as error:
            self._cancel_far_side(0.0)
            self.fail(error)
            return
        if reader.terminal is not None:
            terminal = reader.terminal
            self.finish(self._failure(terminal) if isinstance(terminal, Failed) else None)
        elif reader.behind:
            question = self.ask_once(monotonic())
            if question is not None:
                self.remote.send((question,))
        self.wake()

    def wake(self) -> None:
        """Something has happened that the reader waits for."""
        if self.gathering is not None:
            self.gathering.add(self.member)
            return
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, error: DynbusError) -> None:
        """End the call on this side."""
        if not self.is_open:
            return
        if not error.request_id:
            error.request_id = self.request_id
        self.finish(error)
        self.wake()

    def expire(self) -> None:
        """The deadline passed."""
        if self.is_open:
            self._cancel_far_side(0.0)
            self.fail(
                DeadlineExceeded(
                    f"{self.endpoint} did not end in time",
                    hop=f"caller of {self.hop}",
                )
            )

    def _cancel_far_side(self, kill_after: float) -> None:
        self.remote.send((self.cancel_frame(kill_after),))

    def wait(self) -> asyncio.Future[None]:
        """The awaitable that is done when something has happened: items, the end, or an error."""
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError(f"another task already waits for call {self.request_id}")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiter = waiter
        return waiter

    def _failure(self, frame: Failed) -> DynbusError:
        """The error that ended the call at its instance."""
        error = error_of(frame)
        error.request_id = error.request_id or self.request_id
        if error.hop:
            return error
        # The instance keeps nothing of the call: not of which endpoint it was, nor whether that
        # streams.
        if self.streaming and isinstance(error, UnknownOutcome):
            error = StreamLost(error.message, request_id=error.request_id)
        error.hop = self.hop
        return error

    def finish(self, error: DynbusError | None = None) -> None:
        """The call has ended: its reader has the end, or `error` is one."""
        self.error = error
        if self._unlink is not None:
            self._unlink()
        self._on_end(self)
