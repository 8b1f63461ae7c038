"""One call that was sent to one instance: what its reader waits for, and how it ends.

`Caller` makes it, hands it the frames that arrive and the heartbeats' news; the task that
awaits it takes bytes out, or one error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context
from dynbus.bus.errors import Cancelled, DeadlineExceeded, DynbusError, PayloadTooLarge
from dynbus.bus.protocol.names import EndpointName
from dynbus.bus.protocol.stream_reader import StreamReader
from dynbus.bus.protocol.tokens import random_bytes
from dynbus.bus.protocol.wire import (
    SECRET_BYTES,
    Cancel,
    Credit,
    End,
    Failed,
    Item,
    Items,
    Part,
    Resume,
    error_of,
)

if TYPE_CHECKING:
    from .caller import Caller
    from .remote_instance import RemoteInstance

KILL_AFTER: Final = 1.0


class CallHead(NamedTuple):
    """What a request says beside its payload.

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


class PendingCall:
    """A call that was sent to one instance. Owned by the task that awaits it.

    Attributes:
        begun_at: when it was sent, on the monotonic clock.
        doubt: the bounce token of the question whether it arrived at all; empty if unasked.
        unreachable: whether nobody took it, or its instance died.
    """

    __slots__ = (
        "_behind_at",
        "_caller",
        "_deadline_number",
        "_idle_at",
        "_missed",
        "_unlink",
        "_waiter",
        "attempt",
        "begun_at",
        "doubt",
        "endpoint",
        "error",
        "number",
        "reader",
        "remote",
        "request_id",
        "secret",
        "streaming",
        "unreachable",
    )

    def __init__(
        self,
        caller: Caller,
        remote: RemoteInstance,
        number: int,
        head: CallHead,
        window: int,
        now: float,
    ) -> None:
        self._caller = caller
        self.remote = remote
        self.number = number
        self.secret = random_bytes(SECRET_BYTES)
        self.attempt = head.attempt
        self.endpoint = head.endpoint
        self.request_id = head.request_id
        self.streaming = head.streaming
        self.begun_at = now
        self.doubt = ""
        self.reader = StreamReader(window=window, max_item_bytes=caller.bus.config.max_item_bytes)
        self.error: DynbusError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline_number: int | None = None
        self._unlink: Callable[[], None] | None = None
        self._missed = 0
        self._behind_at = -1
        self._idle_at = -1
        self.unreachable = False

    def __repr__(self) -> str:
        return f"<PendingCall {self.number} {self.endpoint} {self.reader!r}>"

    @property
    def is_open(self) -> bool:
        return self.error is None and self.reader.terminal is None

    async def result(self) -> bytes:
        """Wait for the end; the result of a unary call.

        Raises:
            DynbusError: how the call ended otherwise.
        """
        try:
            while self.is_open:
                await self.wait()
        except asyncio.CancelledError:
            self.abandon()
            raise
        if self.error is not None:
            raise self.error
        return self.reader.result()

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
        granted = self.reader.consume(size)
        if granted is not None and self.is_open:
            self._caller.send(
                self.remote,
                Credit(self.number, self.secret, self.attempt, granted, self.reader.next_sequence),
            )

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
            self._finish(error_of(terminal) if isinstance(terminal, Failed) else None)
        elif reader.behind:
            self._ask_to_resume()
        self.wake()

    def wake(self) -> None:
        """Something has happened that the reader waits for."""
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
        self._finish(error)
        self.wake()

    def expire(self) -> None:
        """The deadline passed."""
        if self.is_open:
            self._cancel_far_side(0.0)
            self.fail(
                DeadlineExceeded(
                    f"{self.endpoint} did not end in time",
                    hop=f"caller of {self.endpoint.hop(self.remote.instance_id)}",
                )
            )

    def arm(self, deadline: float, now: float) -> None:
        """Expire at `deadline`, on the clock of `monotonic`, which says `now`."""
        self._deadline_number = self._caller.deadlines.arm(deadline, now, self.expire)

    def compare(self, sent: int | None) -> Credit | Resume | None:
        """A heartbeat says what the writer has sent, or does not know this call (None).

        Acts on the second heartbeat in a row only: frames and heartbeats travel apart.

        Returns:
            What is to be said to the writer, if anything.
        """
        if sent is not None and sent <= self.reader.next_sequence:
            self._missed = 0
            self._behind_at = -1
            return self._repeated_credit()
        position = self.reader.next_sequence
        self._missed = self._missed + 1 if self._behind_at == position else 1
        self._behind_at = position
        if self._missed < 2:
            return None
        self._missed = 0
        return self.resume_frame()

    def _repeated_credit(self) -> Credit | None:
        """What a writer that sends nothing was granted: it may have missed that."""
        reader = self.reader
        position = reader.next_sequence
        was_idle, self._idle_at = self._idle_at == position, position
        if was_idle and reader.granted > reader.window:
            return Credit(self.number, self.secret, self.attempt, reader.granted, position)
        return None

    def resume_frame(self) -> Resume:
        """What asks the writer to send everything that is not here yet."""
        age = monotonic() - self.begun_at
        return Resume(self.number, self.secret, self.attempt, self.reader.next_sequence, age)

    def standing(self) -> list[Credit | Resume]:
        """What a writer is to be told that may have missed all that was said to it lately."""
        reader = self.reader
        said: list[Credit | Resume] = [self.resume_frame()]
        if reader.granted > reader.window:
            position = reader.next_sequence
            said.append(Credit(self.number, self.secret, self.attempt, reader.granted, position))
        return said

    def resume(self) -> None:
        """Ask the writer to send everything that is not here yet."""
        self._caller.send(self.remote, self.resume_frame())

    def _ask_to_resume(self) -> None:
        # Every frame behind a gap says so; one question per position is enough, and a lost
        # question is asked again at the next heartbeats.
        if self._behind_at != self.reader.next_sequence:
            self._behind_at = self.reader.next_sequence
            self.resume()

    def _cancel_far_side(self, kill_after: float) -> None:
        self._caller.send(self.remote, Cancel(self.number, self.secret, self.attempt, kill_after))

    def wait(self) -> asyncio.Future[None]:
        """What to await until something has happened: items, the end, or an error."""
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError(f"another task already waits for call {self.request_id}")
        waiter: asyncio.Future[None] = self._caller.bus.loop.create_future()
        self._waiter = waiter
        return waiter

    def _finish(self, error: DynbusError | None) -> None:
        self.error = error
        if self._deadline_number is not None:
            self._caller.deadlines.disarm(self._deadline_number, self.expire)
        if self._unlink is not None:
            self._unlink()
        self._caller.forget(self)
