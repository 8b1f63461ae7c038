"""One attempt at a call: the request to one instance, and the observers of its course.

`Invocation` is the call, which may take several of them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from dynbus.bus.calling.caller import Caller
from dynbus.bus.calling.pending_call import CallHead, PendingCall
from dynbus.bus.context import Context
from dynbus.bus.errors import Cancelled, DynbusError
from dynbus.bus.records.instance_view import Instance

from .routing import RouteObserver

logger = logging.getLogger(__name__)

EVENTS: Final = ("started", "first_item", "ended")


class Attempt:
    """One request of a call, from the choice of its instance to its end.

    Attributes:
        instance_id: where it goes.
        instance: what was known of it when it was chosen; None where it was chosen by its id.
        is_watched: whether anybody wants to know what arrives, and how it ends.
        metadata: the header value of this request, when its router gave metadata: that of the call
            and its own. None for that of the call.
        pending: what is open at the instance; None before the request is sent.
    """

    __slots__ = (
        "_observation",
        "_when_answered",
        "instance",
        "instance_id",
        "is_watched",
        "metadata",
        "pending",
    )

    def __init__(
        self,
        instance_id: str,
        observation: RouteObservation | None = None,
        metadata: str | None = None,
        instance: Instance | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.instance = instance
        self.is_watched = observation is not None
        self.metadata = metadata
        self.pending: PendingCall | None = None
        self._observation = observation
        self._when_answered: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<Attempt at {self.instance_id} [{'sent' if self.pending else 'not sent'}]>"

    def send(
        self, caller: Caller, head: CallHead, data: bytes, parent: Context | None
    ) -> PendingCall:
        """Send the request; what is open at the instance from now on.

        Raises:
            PayloadTooLarge, Unavailable: nothing was sent.
        """
        pending = self.pending = caller.begin(head, self.instance_id, data)
        if parent is not None:
            pending.follow(parent)
        if self._observation is not None:
            self._observation.started()
        return pending

    def when_answered(self, then: Callable[[], None]) -> None:
        """Have `then` called once, at the first item or the end, whichever comes first."""
        self._when_answered = then
        self.is_watched = True

    @property
    def has_begun(self) -> bool:
        """True if anything of the results has arrived."""
        return self.pending is not None and self.pending.reader.has_begun

    @property
    def sees_items(self) -> bool:
        """True if the router's observer wants the next items."""
        return self._observation is not None and self._observation.sees_items

    def was_answered(self, error: DynbusError) -> bool:
        """True if the request was sent and ended with this error."""
        return self.pending is not None and self.pending.error is error

    def was_unreachable(self, error: DynbusError) -> bool:
        """True if it ended with this error because nobody subscribes at the instance any longer."""
        return self.pending is not None and self.pending.error is error and self.pending.unreachable

    def arrived(self, items: Sequence[bytes]) -> None:
        """Tell the router's observer of items, or of the unary result."""
        if self._when_answered is not None:
            self._answered(self._when_answered)
        if self._observation is not None:
            self._observation.arrived(items)

    def end(self, error: BaseException | None) -> None:
        """Tell the router's observer how the attempt ended; more calls change nothing."""
        if self._when_answered is not None:
            self._answered(self._when_answered)
        observation, self._observation = self._observation, None
        if observation is not None:
            observation.ended(error)

    def _answered(self, then: Callable[[], None]) -> None:
        self._when_answered = None
        then()


class RouteObservation:
    """Tells an observer how an attempt goes, from the choice of its instance to its end.

    Raises:
        AttributeError: the observer lacks a method.
    """

    __slots__ = ("_arrived", "_ended", "_first_item", "_saw_item", "_started")

    def __init__(self, observer: RouteObserver) -> None:
        self._started = _method(observer, "started")
        self._first_item = _method(observer, "first_item")
        self._ended = _method(observer, "ended")
        try:
            self._arrived = _method(observer, "arrived")
        except AttributeError:
            self._arrived = None
        self._saw_item = False

    @property
    def sees_items(self) -> bool:
        """True if the observer wants the next items."""
        return self._arrived is not None

    def started(self) -> None:
        """The request was sent."""
        _notify(self._started)

    def arrived(self, items: Sequence[bytes]) -> None:
        """Items, or the unary result, arrived: the first ones, or more."""
        if not self._saw_item:
            self._saw_item = True
            _notify(self._first_item)
        if self._arrived is not None and not _notify(self._arrived, items):
            self._arrived = None

    def ended(self, error: BaseException | None) -> None:
        """The attempt is over; to be called once."""
        if error is not None and not isinstance(error, DynbusError):
            error = (
                DynbusError(f"{type(error).__name__}: {error}")
                if isinstance(error, Exception)
                else Cancelled("the caller left")
            )
        _notify(self._ended, error)


def _method(observer: RouteObserver, name: str) -> Callable[..., Any] | None:
    """A method of an observer; None for one that cannot be had, which is logged.

    Raises:
        AttributeError: it lacks the method.
    """
    try:
        method: Callable[..., Any] = getattr(observer, name)
    except (AttributeError, KeyboardInterrupt):
        raise
    except BaseException:
        logger.exception("%s.%s of a router raised", type(observer).__qualname__, name)
        return None
    return method


def _notify(method: Callable[..., Any] | None, *event: Any) -> Any:
    """Call a method of a user and return its result; an exception is logged and harms no call."""
    if method is None:
        return None
    try:
        returned = method(*event)
    except KeyboardInterrupt:
        raise
    except BaseException:
        # No cancellation of the task comes this way: that is raised where the task waits.
        logger.exception("%s of a router raised", getattr(method, "__qualname__", method))
        return None
    if inspect.iscoroutine(returned):
        returned.close()
        logger.error(
            "%s of a router did nothing, since it is asynchronous: write `def`",
            getattr(method, "__qualname__", method),
        )
        return None
    return returned
