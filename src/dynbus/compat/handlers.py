"""Endpoints of a program of Dynamo: functions without annotations."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import aclosing
from typing import Any, Final, Protocol, cast

from dynbus import ConfigError, handler
from dynbus import Context as CallContext
from dynbus.spi import monotonic

HELD: Final = 0.005
"""Seconds for which a handler may hold the loop between two items; then all others have a turn."""

_NOT_ASYNC: Final = "write `async def`, and yield or return what is answered"


class Context:
    """The facts that a handler has of its call; also what a program gives a call to be able to stop
    it.

    Args:
        id: the request id; a random one unless given.
    """

    def __init__(self, id: str | None = None) -> None:
        self.call_context = CallContext(id or "")

    @classmethod
    def of(cls, call_context: CallContext) -> Context:
        """The context of a call that is running."""
        made = cls.__new__(cls)
        made.call_context = call_context
        return made

    def __repr__(self) -> str:
        return repr(self.call_context)

    def id(self) -> str:
        """The request id."""
        return self.call_context.id

    def is_stopped(self) -> bool:
        """True if the call was asked to stop, or was killed."""
        return self.call_context.is_stopped()

    def is_killed(self) -> bool:
        """True if the call was killed."""
        return self.call_context.is_killed()

    def stop_generating(self) -> None:
        """Ask the call, and every call that it made, to finish tidily."""
        self.call_context.stop_generating()

    async def async_killed_or_stopped(self) -> bool:
        """Wait until the call is asked to stop or is killed; then True."""
        await self.call_context.stopped()
        return True


class Translation(Protocol):
    """The differences between the messages of an endpoint and those that its handler takes and
    gives."""

    def request(self, request: Any) -> Any:
        """The request as the handler takes it."""
        ...

    def answer(self, item: Any) -> Any:
        """An item as its reader takes it."""
        ...


def streaming_handler(
    name: str, function: Callable[..., Any], translation: Callable[[], Translation | None]
) -> Callable[..., Any]:
    """A handler of dynbus that calls a function of Dynamo's, whose answer is always a stream.

    The function takes a request, and `context` where it has a parameter of that name. It is an
    async generator, or a coroutine function, whose result is the only item.

    Args:
        translation: asked at each call, since a model may be registered for the endpoint later.

    Raises:
        ConfigError: it is neither.
    """
    takes_context = _takes_context(name, function)

    # Dynamo bounds neither how many calls run at a time nor how long one may think.
    @handler(name=name, concurrency=None, idle_timeout=None)
    async def serve(request: Any, context: CallContext) -> AsyncGenerator[Any, None]:
        translated = translation()
        if translated is not None:
            request = translated.request(request)
        named = {"context": Context.of(context)} if takes_context else {}
        answer = function(request, **named)
        if inspect.isawaitable(answer):
            answer = await answer
        if not isinstance(answer, AsyncIterable):
            yield answer if translated is None else translated.answer(answer)
            return
        given = cast("Any", answer)
        turned = monotonic()
        async with aclosing(_closable(given)) as items:
            async for item in items:
                yield item if translated is None else translated.answer(item)
                if monotonic() - turned > HELD:
                    # Engines of the guides are plain generators, which hold the loop as they work.
                    await asyncio.sleep(0)
                    turned = monotonic()

    return serve


async def _given_on(items: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    async for item in items:
        yield item


def _closable(items: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    return (
        cast("AsyncGenerator[Any, None]", items) if hasattr(items, "aclose") else _given_on(items)
    )


def _takes_context(name: str, function: Any) -> bool:
    """True if a function takes the context beside the request.

    Raises:
        ConfigError: it cannot be a handler; the message says what to do.
    """
    if not callable(function):
        raise ConfigError(
            f"serve_endpoint of {name!r} was given {type(function).__name__}: give a function, "
            "such as RequestHandler(engine).generate"
        )
    label = getattr(function, "__qualname__", type(function).__name__)
    if inspect.isgeneratorfunction(function):
        raise ConfigError(f"{label} is a plain generator: write `async def` and keep `yield`")
    if inspect.isroutine(function) and not (
        inspect.isasyncgenfunction(function) or inspect.iscoroutinefunction(function)
    ):
        raise ConfigError(f"{label} is not async: {_NOT_ASYNC}")
    try:
        signature = inspect.signature(function)
        takes_context = "context" in signature.parameters
        signature.bind(None, **({"context": None} if takes_context else {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{label} cannot be called with a request: {error}; "
            "write `async def generate(self, request)`, and `context` behind it if it is needed"
        ) from None
    return takes_context
