"""Middleware and the order in which calls pass it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Literal, cast

from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.bus.context import Context
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.names import EndpointName

Side = Literal["handler", "client"]
Kind = Literal["unary", "stream", "job", "submit", "event"]
Proceed = Callable[[], Awaitable[Any]]


class MiddlewareCall:
    """A call as its middleware sees it.

    Attributes:
        side: `"handler"` at the instance that answers it, `"client"` at who makes it.
        kind: `"unary"`, `"stream"`, `"job"` for a durable handler (at its instance each try is
            one), `"submit"` for a client that submits a job and does not wait for it, or `"event"`
            at an instance that hears a topic (each try is one).
        endpoint: which is called.
        request: as the handler gets it, or the client gave it; None without one. Another one may be
            put in its place: what comes after sees that.
        context: of the call at its handler; at a client that of the running call that makes it,
            None outside of one.
        metadata: what came with the call; at a client what goes with it, and more may be added.
    """

    __slots__ = ("context", "endpoint", "kind", "metadata", "request", "side")

    def __init__(
        self,
        side: Side,
        kind: Kind,
        endpoint: EndpointName,
        request: Any,
        context: Context | None,
        metadata: Mapping[str, str],
    ) -> None:
        self.side: Side = side
        self.kind: Kind = kind
        self.endpoint = endpoint
        self.request = request
        self.context = context
        self.metadata: dict[str, str] = dict(metadata)

    def __repr__(self) -> str:
        return f"<MiddlewareCall {self.kind} of {self.endpoint} at its {self.side}>"


class Middleware:
    """Code around calls: a subclass has any of these methods.

    It stands in `middleware` of an actor's class, for its handlers, or is given to a client, for
    the calls that are made with it; the same object may do both. Of several the first is outermost:
    its `before`, then its `around` or `items`, and inside of these all of the next one.
    """

    async def before(self, call: MiddlewareCall) -> None:
        """Runs before the call; an exception ends it with that error."""

    async def around(self, call: MiddlewareCall, proceed: Proceed) -> Any:
        """The result of a call that has one, and no stream: what `proceed()` gives, or another.

        `proceed` may be called again, after an error for example, or not at all.
        """
        return await proceed()

    def items(self, call: MiddlewareCall, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The items of a stream, in place of those that come: write an `async def` that yields."""
        return items


def checked_middleware(given: object, label: str) -> tuple[Middleware, ...]:
    """Middleware as it is given to a class or a client.

    Args:
        label: how messages name the option.

    Raises:
        ConfigError: it is no tuple or list of middleware.
    """
    if not isinstance(given, tuple | list):
        raise ConfigError(f"{label}={brief_repr(given)}: give a tuple of objects of Middleware")
    for each in cast("Sequence[object]", given):
        if isinstance(each, type) and issubclass(each, Middleware):
            name = each.__name__
            raise ConfigError(f"{label}: {name} is a class: give an object, {name}()")
        if not isinstance(each, Middleware):
            text = f"{label} has {brief_repr(each)}, which is no Middleware: subclass it"
            raise ConfigError(text)
    return tuple(cast("Sequence[Middleware]", given))


_RESULT: Final = ("before", "around")
_ITEMS: Final = ("before", "items")


def around_results(middleware: Sequence[Middleware]) -> tuple[Middleware, ...]:
    """Those that do something around calls with one result."""
    return _those_with(middleware, _RESULT)


def around_items(middleware: Sequence[Middleware]) -> tuple[Middleware, ...]:
    """Those that do something around streams."""
    return _those_with(middleware, _ITEMS)


def reads_items(one: Middleware) -> bool:
    """True if it sees the items of streams."""
    return type(one).items is not Middleware.items


def _those_with(middleware: Sequence[Middleware], names: Sequence[str]) -> tuple[Middleware, ...]:
    return tuple(
        one
        for one in middleware
        if any(getattr(type(one), name) is not getattr(Middleware, name) for name in names)
    )


async def pass_result(
    middleware: Sequence[Middleware], call: MiddlewareCall, proceed: Proceed
) -> Any:
    """The result of a call that passes each of these, the first outermost.

    Args:
        proceed: makes the call itself, with `call.request`.

    Raises:
        Exception: what one of them or the call itself raises.
    """
    if not middleware:
        return await proceed()
    first, rest = middleware[0], middleware[1:]
    await first.before(call)
    return await first.around(call, lambda: pass_result(rest, call, proceed))


async def pass_items(
    middleware: Sequence[Middleware],
    call: MiddlewareCall,
    open_stream: Callable[[], AsyncGenerator[Any, None]],
) -> AsyncGenerator[Any, None]:
    """The items of a stream that pass each of these, the first outermost.

    Args:
        open_stream: makes the call itself, with `call.request`.
    """
    async with AsyncExitStack() as closing:
        passed: AsyncIterator[Any]
        if middleware:
            first, rest = middleware[0], middleware[1:]
            await first.before(call)
            inner = pass_items(rest, call, open_stream)
            closing.push_async_callback(inner.aclose)
            passed = first.items(call, inner)
        else:
            passed = open_stream()
        close: Callable[[], Awaitable[None]] | None = getattr(passed, "aclose", None)
        if close is not None:
            closing.push_async_callback(close)
        async for item in passed:
            yield item
