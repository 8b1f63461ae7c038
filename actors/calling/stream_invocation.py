"""The call of a stream: what its reader is shown of each attempt, and how it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from dynbus.bus.calling.pending_call import PendingCall
from dynbus.bus.context import Context
from dynbus.bus.errors import ConfigError, DynbusError, ResumeMismatch, StreamLost
from dynbus.bus.protocol.names import EndpointName

from .client_side import ClientSide
from .continuation import Continuation, NextRequest
from .invocation import Invocation, Terms
from .options import CallOptions
from .parts import Parts
from .routing import Router


class OfInvocation:
    """The base of a caller's handles of a call."""

    __slots__ = ("_invocation",)

    _invocation: StreamInvocation

    @property
    def id(self) -> str:
        """The request id."""
        return self._invocation.request_id

    @property
    def instance_id(self) -> str:
        """The instance that serves the call; empty before it is chosen."""
        return self._invocation.instance_id

    @property
    def hop(self) -> str:
        """The handler that serves the call, as `DynbusError.hop` names it."""
        return self._invocation.endpoint.hop(self.instance_id)

    @property
    def instance_ids(self) -> list[str]:
        """The instances that serve it now: several where a stream goes on in parts."""
        return self._invocation.instance_ids


class StreamInvocation(Invocation):
    """A call that is a stream, or may turn out to be one; see `Invocation`.

    Args:
        after: items that were accepted elsewhere, so that the rest is asked for.

    Raises:
        ConfigError: nothing says how it goes on after these.
    """

    __slots__ = ("_continuation", "_parts", "_taken_over", "_why_not")

    def __init__(
        self,
        side: ClientSide,
        endpoint: EndpointName,
        router: Router,
        request: Any,
        data: bytes,
        terms: Terms,
        *,
        routed_as: Any = None,
        after: Sequence[bytes] = (),
        options: CallOptions,
        parent: Context | None = None,
    ) -> None:
        super().__init__(
            *(side, endpoint, router, request, data, terms),
            routed_as=routed_as,
            options=options,
            parent=parent,
        )
        self._continuation: Continuation | None = None
        # The calls that go on in its place.
        self._parts: Parts | None = None
        # Why it would not go on.
        self._why_not = "its caller knows no resume"
        if terms.resume is not None:
            if terms.migration_limit or after:
                self._continuation = terms.resume(data, request)
            if not terms.migration_limit:
                self._why_not = "its migration_limit is 0"
        # Whether the rest of what came elsewhere is asked for, and not the whole.
        self._taken_over = bool(after)
        if after:
            if self._continuation is None:
                raise ConfigError(
                    f"{endpoint}: nothing says how a stream that others began goes on"
                )
            self._continuation.accept(after)

    @property
    def is_direct(self) -> bool:
        """True if items may be read from `call` without passing here: nothing looks at them."""
        return self._continuation is None and not self.is_observed

    @property
    def is_observed(self) -> bool:
        """True if telemetry or the router's observer looks at items."""
        return self._observation is not None or (
            self._attempt is not None and self._attempt.sees_items
        )

    @property
    def is_open(self) -> bool:
        """True if there is something open at an instance."""
        return self.call is not None or self._parts is not None

    @property
    def instance_ids(self) -> list[str]:
        """The instances that serve the call now."""
        if self._parts is not None:
            return self._parts.instance_ids
        return [self.instance_id] if self.instance_id else []

    async def items(self) -> list[bytes]:
        """The next items of a stream; empty at its end. The first call sends the request.

        Raises:
            DynbusError: how the call ended.
        """
        if self._parts is not None:
            return await self._items_of_parts(self._parts)
        call = self.call or await self.open()
        while call is not None:
            try:
                items = await call.items()
            except DynbusError as error:
                call = await self.open_again(error)
                continue
            except BaseException as error:
                self._end(error)
                raise
            if not items:
                ended = self.finish(None)
                if ended is not None:
                    raise ended
                return []
            shown = self.arrived(items)
            if shown:
                return shown
        return [] if self._parts is None else await self._items_of_parts(self._parts)

    async def _items_of_parts(self, parts: Parts) -> list[bytes]:
        try:
            items = await parts.items()
        except BaseException as error:
            self._end(error)
            raise
        if not items:
            self._end(None)
        elif self._observation is not None:
            self._observation.items(len(items))
        return items

    def consumed(self, size: int) -> None:
        """The reader of `items` took so many bytes of them."""
        if self.call is not None:
            self.call.consumed(size)

    async def open(self) -> PendingCall | None:
        """Send the request of a stream, over as many attempts as are safe.

        Returns:
            What is open at its instance. None where nothing is: `items` has what follows, which is
            the end of a stream of which nothing is left to come, or what parts of it give.

        Raises:
            DynbusError: it could not be sent.
        """
        try:
            if self._taken_over:
                self._taken_over = False
                if not self._go_on():
                    return None
            while True:
                try:
                    return await self._begin()
                except DynbusError as error:
                    await self._prepare_retry(error)
        except BaseException as error:
            self._end(error)
            raise

    async def open_again(self, error: DynbusError) -> PendingCall | None:
        """Send the request of a stream once more, or the one that it goes on with, after `error`
        ended it; see `open`.

        Raises:
            DynbusError: the error itself, when it may not be; or that of a later attempt.
        """
        if not self.may_follow:
            ended = self.finish(error)
            assert ended is not None, "an error was given"
            raise ended
        has_begun = self.has_begun
        try:
            await self._prepare_retry(error)
            if has_begun and not self._go_on():
                return None
        except BaseException as last:
            self._end(last)
            raise
        return await self.open()

    @property
    def has_begun(self) -> bool:
        """True if anything of the results has arrived, so that the call is never repeated but by a
        stream that goes on.
        """
        return self._attempt is not None and self._attempt.has_begun

    @property
    def may_follow(self) -> bool:
        """True if another attempt may follow the present one, as far as its items go."""
        return self.continues or not self.has_begun

    def arrived(self, items: list[bytes]) -> list[bytes]:
        """Tell the observers of items that have arrived; those that the reader is shown.

        Raises:
            ResumeMismatch: they contradict what it was shown before. The call is left.
        """
        attempt = self._attempt
        if attempt is not None:
            attempt.arrived(items)
        if self._continuation is not None:
            items = self._taken(self._continuation, items)
        if self._observation is not None and items:
            self._observation.items(len(items))
        return items

    def finish(self, error: DynbusError | None) -> DynbusError | None:
        """A stream is over, and its last attempt has ended so; once its items were read.

        Returns:
            What its reader gets; None when it ended well.
        """
        attempt, continuation = self._attempt, self._continuation
        if error is not None and attempt is not None and attempt.was_unreachable(error):
            self._pass_over(error, unreachable=True)
        if error is None and continuation is not None:
            try:
                continuation.check_end()
            except ResumeMismatch as mismatch:
                self._mend(mismatch)
                error = mismatch
        elif error is not None and error.is_loss and not self.may_follow:
            # That the instance asks for another one is of no use to a reader who has items.
            error = self._policy.stream_lost(error, self._why_not, own=self._is_own(error))
            error.request_id = error.request_id or self.request_id
        self._end(error)
        return error

    def abandon(self, error: DynbusError | None = None) -> None:
        parts = self._parts
        if parts is None:
            super().abandon(error)
            return
        self._left = True
        parts.abandon(error)
        if error is None and self._observation is not None:
            self._observation.cancelled()
        self._end(error)

    # Internals -----------------------------------------------------------------------------

    def _taken(self, continuation: Continuation, items: list[bytes]) -> list[bytes]:
        try:
            shown = list(continuation.accept(items))
        except ResumeMismatch as mismatch:
            self._mend(mismatch)
            self.abandon(mismatch)
            raise
        if len(shown) < len(items) and self.call is not None:
            self.call.consumed(sum(map(len, items[: len(items) - len(shown)])))
        return shown

    def _mend(self, error: DynbusError) -> None:
        """Say of an error that arose here what is said of those that arrive."""
        error.request_id = error.request_id or self.request_id
        error.hop = error.hop or self.endpoint.hop(self.instance_id)

    def _go_on(self) -> bool:
        """Take what a stream goes on with; False where it is nothing, or several calls.

        Raises:
            DynbusError: it cannot go on.
        """
        continuation = self._continuation
        assert continuation is not None, "nothing goes on"
        try:
            following = continuation.next_requests()
        except StreamLost as error:
            raise self._given_up(error, error.message) from error
        if not following:
            self._end(None)
            return False
        if len(following) > 1:
            parts = [self._part(one) for one in following]
            self._parts = Parts(parts, self.side.bus.background)
            return False
        self._ask(following[0], continuation)
        return True

    def _part(self, following: NextRequest) -> StreamInvocation:
        """The call that goes on with a part of the stream, as this one would with the whole."""
        assert following.part is not None, "it is one of several requests"
        part = copy(self)
        part._selection = copy(self._selection)
        part._retry_policy = copy(self._retry_policy)
        # It is observed for itself.
        part._fields = part._observation = None
        part._ask(following, following.part)
        return part

    def _ask(self, following: NextRequest, continuation: Continuation) -> None:
        self.data = following.data
        self._selection.ask_for(following.request)
        # One that was taken over may still be for this process alone.
        self._continuation = continuation if self._terms.migration_limit else None
