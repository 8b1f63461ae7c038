"""Handlers behind their middleware: an endpoint whose calls, jobs and events pass it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dynbus.bus.context import context
from dynbus.bus.errors import ConfigError
from dynbus.bus.protocol.endpoint import Endpoint
from dynbus.bus.protocol.names import ComponentName
from dynbus.bus.protocol.reply_port import ReplyPort

from .passing import (
    Kind,
    Middleware,
    MiddlewareCall,
    around_items,
    around_results,
    pass_items,
    pass_result,
    reads_items,
)


def behind_middleware(
    endpoint: Endpoint, middleware: Sequence[Middleware], component: ComponentName, kind: Kind
) -> Endpoint:
    """An endpoint whose handler runs behind middleware; as it was where that does nothing there.

    The runner of its handler calls `invoke`, inside of the context of the call.

    Args:
        component: that serves it.
        kind: of what its handler runs with.

    Raises:
        ConfigError: the handler sends its items by a reply, and a middleware would read them.
    """
    address = component.endpoint(endpoint.name)
    chain = around_items(middleware) if endpoint.streaming else around_results(middleware)
    if not chain:
        return endpoint
    inner = endpoint.invoke

    def called(request: Any) -> MiddlewareCall:
        running = context()
        return MiddlewareCall("handler", kind, address, request, running, running.metadata)

    invoke: Callable[..., Any]
    if endpoint.by_port:
        for one in filter(reads_items, chain):
            raise ConfigError(
                f"{address} sends its items by a reply, and {type(one).__name__}.items reads those "
                "that a handler yields: yield them, or leave that middleware out"
            )
        invoke = partial(_by_port, chain, called, inner)
    elif endpoint.streaming:
        invoke = partial(_stream, chain, called, inner)
    else:
        invoke = partial(_result, chain, called, inner)
    return replace(endpoint, invoke=invoke)


async def _result(
    chain: Sequence[Middleware],
    called: Callable[[Any], MiddlewareCall],
    inner: Callable[..., Any],
    request: Any,
    **named: Any,
) -> Any:
    call = called(request)
    return await pass_result(chain, call, lambda: inner(call.request, **named))


def _stream(
    chain: Sequence[Middleware],
    called: Callable[[Any], MiddlewareCall],
    inner: Callable[..., Any],
    request: Any,
) -> AsyncGenerator[Any, None]:
    call = called(request)
    return pass_items(chain, call, lambda: inner(call.request))


async def _by_port(
    chain: Sequence[Middleware],
    called: Callable[[Any], MiddlewareCall],
    inner: Callable[..., Any],
    request: Any,
    port: ReplyPort,
) -> None:
    call = called(request)
    for each in chain:
        await each.before(call)
    await inner(call.request, port)
