"""Handlers as tools of a model: told to it by their signatures, and called as it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import anyio
import msgspec

from dynbus import ConfigError, InvalidRequest
from dynbus.llm.openai.typed import ToolCall
from dynbus.spi import HandlerSpec, brief_repr

Tool = Callable[..., Any] | Mapping[str, Any]
"""A handler of a class or of a client; or an object with `type` and `function`, as OpenAI's."""

_NOTHING: Final[dict[str, Any]] = {"type": "object", "properties": {}}


class _Known(NamedTuple):
    """A handler that a model may call.

    Attributes:
        wrapped: the parameter that has its value as a field of the arguments; empty where the
            arguments are the value.
    """

    spec: HandlerSpec
    method: Callable[..., Any]
    wrapped: str


class ToolBox:
    """The tools of a request.

    Args:
        client: makes the client of a class whose handler is given.

    Attributes:
        definitions: as a request tells them.

    Raises:
        ConfigError: one of them cannot be a tool, or two have one name.
    """

    def __init__(self, tools: Sequence[Tool], client: Callable[[type[Any]], Any]) -> None:
        self.definitions: list[Mapping[str, Any]] = []
        self._known: dict[str, _Known] = {}
        for tool in tools:
            if not callable(tool):
                self.definitions.append(tool)
                continue
            spec = _spec_of(tool)
            if spec.name in self._known:
                raise ConfigError(
                    f"two tools are called {spec.name!r}: name a handler by @handler(name=...)"
                )
            schema, wrapped = _arguments_of(spec)
            function: dict[str, Any] = {"name": spec.name, "parameters": schema}
            if spec.function.__doc__:
                function["description"] = " ".join(spec.function.__doc__.split())
            self.definitions.append({"type": "function", "function": function})
            self._known[spec.name] = _Known(spec, _method_of(tool, spec, client), wrapped)

    def check_callable(self) -> None:
        """Refuse tools that are only described.

        Raises:
            ConfigError: there is one.
        """
        if len(self._known) < len(self.definitions):
            raise ConfigError("a tool is an object, which cannot be called: give handlers")

    async def call(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Call what a model calls, side by side; the messages that tell it what came of it.

        Raises:
            DynbusError: how a handler failed that did not refuse its arguments.
        """
        answers = [""] * len(calls)
        failures: list[Exception] = []

        async def run(place: int, call: ToolCall) -> None:
            try:
                answers[place] = await self._call(call)
            except Exception as error:  # noqa: BLE001 - raised below, without a group
                failures.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for place, call in enumerate(calls):
                tasks.start_soon(run, place, call)
        if failures:
            raise failures[0]
        return [
            {"role": "tool", "tool_call_id": call.id or "", "content": content}
            for call, content in zip(calls, answers, strict=True)
        ]

    async def _call(self, call: ToolCall) -> str:
        name = call.function.name or ""
        known = self._known.get(name)
        if known is None:
            return f"error: there is no tool {name!r}; the tools are {', '.join(self._known)}"
        try:
            request = _request_of(known, call.function.arguments)
            result = await known.method(*request)
        except InvalidRequest as error:
            return f"error: {error.message}"
        if isinstance(result, str):
            return result
        return known.spec.result_codec.encode(result).decode()


def _spec_of(tool: Callable[..., Any]) -> HandlerSpec:
    spec = HandlerSpec.of(tool)
    if spec is None:
        raise ConfigError(
            f"{brief_repr(tool)} is no tool: give a handler, such as Orders.find or "
            "self.orders.find, or OpenAI's object"
        )
    if spec.streaming:
        raise ConfigError(f"{spec.label} is a stream and no tool: give a handler that returns")
    spec.check()
    return spec


def _method_of(
    tool: Callable[..., Any], spec: HandlerSpec, client: Callable[[type[Any]], Any]
) -> Callable[..., Any]:
    """The function that calls the handler: it is bound to a client, or found at one of its
    class.
    """
    owner = spec.owner
    if tool is not spec.function and getattr(tool, "__func__", None) is not spec.function:
        return tool
    if getattr(tool, "__self__", None) is not None:
        # A handler of this very instance: it is called as it is.
        return tool
    if owner is None or owner.__dynbus_abstract__:
        raise ConfigError(
            f"{spec.label} is of no class that is served: give the handler of a client, such as "
            "self.orders.find"
        )
    attribute = next(
        name for name, each in owner.__dynbus_handlers__.items() if each.name == spec.name
    )
    method: Callable[..., Any] = getattr(client(owner), attribute)
    return method


def _arguments_of(spec: HandlerSpec) -> tuple[dict[str, Any], str]:
    """The schema of a handler's arguments, and the parameter that is wrapped in it."""
    codec = spec.request_codec
    if codec is None or spec.parameter is None:
        return dict(_NOTHING), ""
    schema: dict[str, Any] = dict(codec.schema())
    reference = str(schema.get("$ref", "")).rpartition("/")[2]
    root = schema.get("$defs", {}).get(reference, schema) if reference else schema
    if root.get("type") == "object" and "properties" in root:
        if root is not schema:
            schema = {**root, "$defs": schema["$defs"]}
        return schema, ""
    definitions = schema.pop("$defs", None)
    name = spec.parameter.name
    wrapped: dict[str, Any] = {"type": "object", "properties": {name: schema}}
    if spec.default is spec.parameter.empty:
        wrapped["required"] = [name]
    if definitions:
        wrapped["$defs"] = definitions
    return wrapped, name


def _request_of(known: _Known, arguments: str) -> tuple[Any, ...]:
    """The request that arguments say, validated.

    Raises:
        InvalidRequest: they do not fit.
    """
    spec, codec = known.spec, known.spec.request_codec
    if codec is None:
        return ()
    data = arguments.strip() or "{}"
    if known.wrapped:
        try:
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the arguments are no JSON object: {error}") from None
        if known.wrapped not in fields:
            if spec.parameter is not None and spec.default is not spec.parameter.empty:
                return ()
            raise InvalidRequest(f"give {known.wrapped!r}")
        data = bytes(fields[known.wrapped]).decode()
    return (spec.request_decoder()(data.encode()),)
