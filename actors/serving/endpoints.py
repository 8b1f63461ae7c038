"""Endpoints made of handlers: of an object's methods, or of plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dynbus.actors.declaring.batching import Batching
from dynbus.actors.declaring.brief_repr import brief_repr
from dynbus.actors.declaring.handlers import HandlerSpec, spec_of
from dynbus.actors.declaring.reply import Reply
from dynbus.actors.declaring.schemas import encode_schemas, schema_of
from dynbus.bus.context import context
from dynbus.bus.errors import ConfigError, InvalidResponse
from dynbus.bus.protocol.endpoint import BatchRule, Contract, Endpoint
from dynbus.bus.protocol.reply_port import ReplyPort


def endpoints_of_object(served: object, specs: Mapping[str, HandlerSpec]) -> list[Endpoint]:
    """An endpoint for each handler of an object.

    Args:
        specs: the handlers by the attributes that have them.
    """
    return [make_endpoint(getattr(served, name), spec) for name, spec in specs.items()]


def endpoints_of_functions(functions: Mapping[str, Callable[..., Any]]) -> list[Endpoint]:
    """An endpoint for each of some typed functions, or bound methods, by its name.

    Raises:
        ConfigError: there is none, or one of them is no handler; the message says what to do.
    """
    if not functions:
        raise ConfigError("there is no endpoint to serve: give a function for each name")
    for name, function in functions.items():
        if not inspect.isroutine(function):
            raise ConfigError(
                f"endpoint {name!r}: {brief_repr(function)} is no function: write `async def`, or "
                "give a method that is bound to an object"
            )
    specs = {name: spec_of(name, function) for name, function in functions.items()}
    for name, spec in specs.items():
        if spec.durable is not None:
            raise ConfigError(
                f"endpoint {name!r} is durable, and the jobs of a function are done by nobody: put "
                "it into a class Name(Actor, namespace=...), or leave out what makes it durable"
            )
    return [make_endpoint(functions[name], spec) for name, spec in specs.items()]


def make_endpoint(method: Callable[..., Any], spec: HandlerSpec) -> Endpoint:
    """The endpoint of a handler that is bound to its object."""
    request_codec, result_codec = spec.request_codec, spec.result_codec
    encode = result_codec.encoder(InvalidResponse)
    # What a caller is to send, and what it gets.
    schemas: dict[str, Any] = {"response": schema_of(result_codec, written=True)}
    if request_codec is not None:
        schemas["request"] = schema_of(request_codec)
    batch: BatchRule | None = None
    invoke: Callable[..., Any]
    if spec.batch is not None:
        batch = _batch_rule(spec.batch, spec.label, _invoker(method, spec))
        invoke = _answered
    elif spec.takes_reply:
        invoke = _reply_invoker(method, spec, encode)
    else:
        invoke = _invoker(method, spec)
    return Endpoint(
        name=spec.name,
        streaming=spec.streaming,
        invoke=invoke,
        by_port=spec.takes_reply,
        batch=batch,
        decode=spec.request_decoder(),
        encode=encode,
        concurrency=spec.concurrency,
        queue=spec.queue,
        timeout=spec.timeout,
        idle_timeout=spec.idle_timeout,
        allow=spec.allow,
        schemas=schemas,
        contract=Contract(
            spec.schemas.hash,
            lambda: encode_schemas(spec.schemas, durable=spec.durable is not None),
        ),
    )


def _batch_rule(batch: Batching, label: str, run: Callable[[Any], Any]) -> BatchRule:
    return BatchRule(
        run=run,
        label=label,
        most=batch.most,
        wait=batch.wait,
        key=batch.key_function,
        size_of=batch.size_function,
    )


def _answered(request: Any, answer: Callable[[Any], Any]) -> Any:
    """A call of a handler of batches."""
    return answer(request)


def _invoker(method: Callable[..., Any], spec: HandlerSpec) -> Callable[[Any], Any]:
    """A function that calls a handler with a request, which is None for one that takes none."""
    parameter = spec.parameter
    if parameter is None:
        if spec.takes_context:
            return lambda _: method(context=context())
        return lambda _: method()
    name = parameter.name
    by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    if spec.takes_context:
        if by_name:
            return lambda request: method(**{name: request, "context": context()})
        return lambda request: method(request, context=context())
    if by_name:
        return lambda request: method(**{name: request})
    return method


def _reply_invoker(
    method: Callable[..., Any], spec: HandlerSpec, encode: Callable[[Any], bytes]
) -> Callable[[Any, ReplyPort], Any]:
    """The same of a handler with a reply, which is made of the call's port."""
    parameter, takes_context = spec.parameter, spec.takes_context
    by_name = parameter is not None and parameter.kind is inspect.Parameter.KEYWORD_ONLY

    def invoke(request: Any, port: ReplyPort) -> Any:
        named: dict[str, Any] = {"reply": Reply[Any](port, encode)}
        if takes_context:
            named["context"] = context()
        if parameter is None:
            return method(**named)
        if by_name:
            return method(**{parameter.name: request}, **named)
        return method(request, **named)

    return invoke
