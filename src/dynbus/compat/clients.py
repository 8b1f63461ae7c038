"""Clients as programs of Dynamo use them: each call is a stream of items that have `data()`."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Self, cast

import anyio
import msgspec

from dynbus import Call, EndpointClient, InvalidResponse, JsonObject, Stream
from dynbus.spi import Discovery, monotonic

from .handlers import Context

LOOK_INTERVAL: Final = 0.05
"""Seconds between two looks at which instances serve an endpoint."""


class Annotated:
    """One item of an answer."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __repr__(self) -> str:
        return f"Annotated(data={self._data!r})"

    def data(self) -> Any:
        """The item: dicts, lists and plain values."""
        return self._data

    def is_error(self) -> bool:
        """False: the errors of a call are raised by the stream."""
        return False

    def event(self) -> str | None:
        """None: dynbus has no events beside the items."""
        return None

    def comments(self) -> list[str] | None:
        """None, likewise."""
        return None

    def id(self) -> str | None:
        """None, likewise."""
        return None


class Responses:
    """The items of an answer, in order and once."""

    def __init__(self, items: AsyncGenerator[Any, None], annotated: bool) -> None:
        self._items = items
        self._annotated = annotated

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        item = await anext(self._items)
        return Annotated(item) if self._annotated else item

    async def aclose(self) -> None:
        """Leave the answer; the far side stops."""
        await self._items.aclose()


class Answer(Responses):
    """The only item of an endpoint that is no stream, whose fields may be read from here as well:
    `(await client.generate(request)).text`."""

    def __init__(self, item: Any, annotated: bool) -> None:
        super().__init__(_only(item), annotated)
        self._item = item

    def __getattr__(self, name: str) -> Any:
        # Asked for by copying too, before there is an item.
        item = self.__dict__.get("_item")
        if name.startswith("_") or not isinstance(item, dict):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(JsonObject(cast("dict[str, Any]", item)), name)

    def __getitem__(self, key: Any) -> Any:
        return self._item[key]


class Client:
    """Calls the instances of one endpoint.

    A call that an instance gives back before its first item goes to another: see
    `DistributedRuntime`.
    """

    def __init__(self, client: EndpointClient, discovery: Discovery) -> None:
        self._client = client
        self._discovery = discovery

    def __repr__(self) -> str:
        return f"<Client of {self._client.endpoint}>"

    def instance_ids(self) -> list[str]:
        """The instances that are known now; their ids are texts here, and numbers in Dynamo."""
        endpoint = self._client.endpoint
        known = self._discovery.view.instances(endpoint.namespace, endpoint.component, monotonic())
        return [one.id for one in known if endpoint.endpoint in one.record.endpoints]

    async def wait_for_instances(self) -> list[str]:
        """The instances, once there is one."""
        await self._client.wait_for_instances(None)
        # Others of the component may be known that do not serve this endpoint: nothing tells of it.
        while not (ids := self.instance_ids()):  # noqa: ASYNC110
            await anyio.sleep(LOOK_INTERVAL)
        return ids

    async def generate(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call an instance, one after the other in turn.

        Args:
            request: a JSON value, or a model of pydantic.
            annotated: whether items are `Annotated`; otherwise they are the values themselves.
            context: which can stop the call; unless given, that of the running handler.

        Raises:
            DynbusError: there is no instance; or what a call that is no stream ended with.
        """
        return await _responses(self._client.generate, request, annotated, context)

    async def round_robin(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """The same as `generate`."""
        return await _responses(self._client.round_robin, request, annotated, context)

    async def random(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> Responses:
        """Call any instance; see `generate`."""
        return await _responses(self._client.random, request, annotated, context)

    async def direct(
        self,
        request: Any,
        instance_id: str,
        annotated: bool = True,
        context: Context | None = None,
    ) -> Responses:
        """Call this very instance; see `generate`."""

        def call(request: Any) -> Call:
            return self._client.direct(request, instance_id)

        return await _responses(call, request, annotated, context)


async def _responses(
    make: Callable[[Any], Call], request: Any, annotated: bool, context: Context | None
) -> Responses:
    if context is None:
        call = make(request)
    else:
        # A call belongs to the context that it is made in.
        call = contextvars.copy_context().run(_within, context, make, request)
    answer = await call.raw()
    if isinstance(answer, Stream):
        return Responses(_items_of(cast("Stream[bytes]", answer)), annotated)
    return Answer(_decoded(answer), annotated)


def _within(context: Context, make: Callable[[Any], Call], request: Any) -> Call:
    context.call_context.enter()
    return make(request)


async def _items_of(stream: Stream[bytes]) -> AsyncGenerator[Any, None]:
    try:
        async for item in stream:
            yield _decoded(item)
    finally:
        await stream.aclose()


async def _only(item: Any) -> AsyncGenerator[Any, None]:
    yield item


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidResponse(f"an item is not JSON: {error}") from None
