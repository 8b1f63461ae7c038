"""`@dynamo_endpoint` and the hooks: what a service's methods are marked with."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable
from functools import cached_property
from typing import Annotated, Any, Final, TypeVar, overload

from pydantic import BaseModel, BeforeValidator
from pydantic_core import from_json

from dynbus import ConfigError, handler
from dynbus.spi import HandlerSpec

F = TypeVar("F", bound=Callable[..., Any])

_STREAMS: Final = (AsyncGenerator, AsyncIterator, AsyncIterable)
ON_START: Final = "__dynamo_on_start__"
ON_SHUTDOWN: Final = "__dynamo_on_shutdown__"


@overload
def dynamo_endpoint(function: F, /) -> F: ...
@overload
def dynamo_endpoint(name: str | None = None) -> Callable[[F], F]: ...
def dynamo_endpoint(name: Any = None) -> Any:
    """Make an `async def` method of a service callable by other services and clients.

    Unlike `handler`, of which it is made, it asks for no annotations: where there is none, what
    JSON has passes through, objects as dicts; a model that is returned is sent as its fields. A
    request that is annotated with a model may be given as its JSON text too. A method that says
    that it returns an `AsyncIterator` may yield its items or return what does.

    Args:
        name: the endpoint; the method's name unless given.

    Raises:
        ConfigError: the method or the name is not usable; the message says what to do.
    """
    if isinstance(name, str | None):
        return functools.partial(_endpoint, name=name)
    return _endpoint(name)


endpoint = dynamo_endpoint


def _endpoint(function: Any, name: str | None = None) -> Any:
    declare: Any = handler(name=name)
    method = declare(_annotated(function))
    spec = HandlerSpec.of(method)
    assert spec is not None
    fields = {each.name: getattr(spec, each.name) for each in dataclasses.fields(spec)}
    _EndpointSpec(**fields).mark(method)
    return method


class _EndpointSpec(HandlerSpec):
    """An endpoint whose request, where it is a model, may also be given as JSON text: programs of
    Dynamo send `request.model_dump_json()`."""

    @cached_property
    def annotations(self) -> dict[str, Any]:
        annotations = super().annotations
        name = self.parameter.name if self.parameter is not None else ""
        request = annotations.get(name)
        if isinstance(request, type) and issubclass(request, BaseModel):
            annotations[name] = Annotated[request, BeforeValidator(_from_text)]
        return annotations


def _from_text(value: Any) -> Any:
    return from_json(value) if isinstance(value, str) else value


def async_on_start(hook: F) -> F:
    """Run this method before the instance can be called; several run in their order."""
    return _marked(hook, ON_START)


def async_on_shutdown(hook: F) -> F:
    """Run this method after the instance's last call; several run in their order."""
    return _marked(hook, ON_SHUTDOWN)


def hooks(service: type[Any], mark: str) -> list[Callable[[Any], Any]]:
    """The methods of a class that have the mark: of base classes first, in their order."""
    methods: dict[str, Callable[[Any], Any]] = {}
    for base in reversed(service.__mro__):
        for name, value in vars(base).items():
            if getattr(value, mark, False):
                methods[name] = value
            else:
                methods.pop(name, None)
    return list(methods.values())


async def run_hook(hook: Callable[[Any], Any], service: object) -> None:
    """Run a hook, which may also be a plain method."""
    given = hook(service)
    if inspect.isawaitable(given):
        await typing.cast("Awaitable[object]", given)


def _marked(hook: F, mark: str) -> F:
    given: Any = hook
    if not inspect.isfunction(given):
        raise ConfigError(f"{hook!r} is no method: write the hook's decorator above `async def`")
    setattr(hook, mark, True)
    return hook


def _annotated(function: Any) -> Any:
    """The function with annotations for all that has none."""
    if not inspect.isfunction(function):
        raise ConfigError(f"{function!r} is no method: write @dynamo_endpoint() above `async def`")
    if inspect.iscoroutinefunction(function) and _says_stream(function):
        function = _iterating(function)
    annotations = function.__annotations__
    for name in list(inspect.signature(function).parameters)[1:]:
        annotations.setdefault(name, Any)
    returned = annotations.get("return", inspect.Signature.empty)
    if inspect.isasyncgenfunction(function):
        if returned is inspect.Signature.empty or returned in (*_STREAMS, *_NAMES):
            annotations["return"] = AsyncIterator[Any]
    elif returned is inspect.Signature.empty:
        annotations["return"] = Any
    return function


_NAMES: Final = tuple(kind.__name__ for kind in _STREAMS)


def _says_stream(function: Callable[..., Any]) -> bool:
    """True if the annotation of what a function returns is a stream, also as text."""
    returned = inspect.signature(function).return_annotation
    text = returned if isinstance(returned, str) else getattr(returned, "__name__", "")
    return text.partition("[")[0].rpartition(".")[2] in _NAMES


def _iterating(function: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    """The async generator of what the function returns; of nothing where that is None."""

    @functools.wraps(function)
    async def iterate(*given: Any, **named: Any) -> AsyncIterator[Any]:
        items = await function(*given, **named)
        if items is not None:
            async for item in items:
                yield item

    return iterate
