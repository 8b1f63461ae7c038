"""`ResponseStore`: responses that clients go on from, in an object bucket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Self

import anyio
import msgspec

from dynbus import DynbusError, Runtime, Unavailable
from dynbus.llm.answers import AnswerFormat
from dynbus.llm.openai.errors import BadRequest, misfit
from dynbus.llm.pipeline.serving import Sink
from dynbus.llm.resumable.events import NumberedSink
from dynbus.llm.tenants.keys import tenant_token
from dynbus.spi import (
    Background,
    Grant,
    NoObject,
    NoStream,
    ObjectBucket,
    ObjectStore,
    monotonic,
    task_group,
    unix_time,
)

from .answer import ResponseFormat
from .api import ResponsesApi
from .requests import ITEM_REFERENCE
from .stored import (
    KEPT,
    Earlier,
    Item,
    Kept,
    StoredResponse,
    earlier_of,
    is_response_id,
    response_of,
    to_drop,
)

logger = logging.getLogger(__name__)

MAX_STORED: Final = 1024 * 1024 * 1024
"""Bytes of all responses."""

FULL: Final = 0.9
"""The part of it from which on there is no room."""

LEFT: Final = 0.75
"""The part that is taken once there is room again."""

SLACK: Final = 24 * 3600
"""Seconds for which the server keeps what is no longer told."""

STORE_TIMEOUT: Final = 2.0
"""Seconds that the end of an answer waits until it is stored."""

RETRY_DELAY: Final = 5.0
"""Seconds for which nothing is kept after the bus did not take it."""

READ_TIMEOUT: Final = 5.0

RECORD_BYTES: Final = 512
"""Bytes that the record of an object takes, about."""

MAX_READ: Final = 32 * 1024 * 1024
"""Bytes of kept responses that are read for one request: a short one may name very much."""

MAX_REFERRED: Final = 256
"""Responses whose items one request may name by their ids."""

SWEEP_INTERVAL: Final = 60.0
SWEEP_TIMEOUT: Final = 60.0

RESPONSES: Final = ObjectBucket(
    "dynbus_responses",
    max_bytes=MAX_STORED,
    max_age=KEPT + SLACK,
    description="dynbus: responses that clients go on from",
)


class _Named(msgspec.Struct, frozen=True):
    """An item of a request, as far as it names another one."""

    # Of any kind: what they are to be is for the interface to say.
    type: Any = None
    id: Any = None


class _Head(msgspec.Struct, frozen=True):
    """The parts of a request that name what is kept, or is to be."""

    input: str | list[_Named] = ""
    previous_response_id: str | None = None
    store: bool | None = None


_decode_head: Final = msgspec.json.Decoder(_Head).decode
_decode: Final = msgspec.json.Decoder(StoredResponse).decode


class _Room:
    """Room for the responses that are read for one request.

    Args:
        param: of the request, which names them.
        take: called with the bytes of each; see `ResponseStore.api`.
    """

    def __init__(self, param: str, take: Callable[[int], object]) -> None:
        self._param = param
        self._take = take
        self._left = MAX_READ

    def take(self, size: int) -> None:
        """Have room for one.

        Raises:
            BadRequest: there is none.
            DynbusError: its tenant has none.
        """
        self._left -= size
        if self._left < 0:
            raise misfit(
                self._param,
                f"the kept responses that it names have more than {MAX_READ} bytes; send the "
                "items of the conversation as input",
            )
        self._take(size)


class ResponseStore:
    """The kept responses of all tenants, while it is open. A tenant's are asked for by its name,
    and others are not there for it."""

    def __init__(self, runtime: Runtime) -> None:
        self._jetstream = runtime.bus.data.jetstream
        self._objects = ObjectStore(self._jetstream, RESPONSES)
        self._background = Background("keeping responses", runtime.bus.fail)
        self._is_ready = False
        # Whether something was kept since room was looked at.
        self._is_used = False
        self._is_full = asyncio.Event()
        self._retry_at = 0.0
        self._logged = ""

    def __repr__(self) -> str:
        return f"<ResponseStore {RESPONSES.name}>"

    async def __aenter__(self) -> Self:
        await self._background.open()
        self._background.start(self._keep_room, name="making room for responses")
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._background.close()

    # Requests ----------------------------------------------------------------------------------

    async def api(
        self,
        tenant: str,
        data: bytes,
        take: Callable[[int], object] = lambda _: None,
        *,
        may_keep: bool = True,
    ) -> ResponsesApi:
        """The interface that reads a request, with what this names of those before it.

        Args:
            take: called with the bytes of each response that was read for it; raises where the
                tenant has no room for them.
            may_keep: whether its own is kept where it says nothing else.

        Raises:
            BadRequest: it names what is not there.
            DynbusError: what it names cannot be read at present.
        """
        try:
            head = _decode_head(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # It is none, which the interface says.
            return ResponsesApi()
        earlier = Earlier()
        if head.previous_response_id is not None:
            earlier = await self._earlier(tenant, head.previous_response_id, take)
        if not isinstance(head.input, str):
            named = [one.id for one in head.input if one.type == ITEM_REFERENCE]
            if named := [one for one in named if isinstance(one, str)]:
                earlier = earlier._replace(referred=await self._referred(tenant, named, take))
        return ResponsesApi(earlier, keeps=may_keep and head.store is not False)

    async def _earlier(self, tenant: str, name: str, take: Callable[[int], object]) -> Earlier:
        room = _Room("previous_response_id", take)
        last = await self.get(tenant, name, room)
        if last is None:
            raise no_previous(f"there is no response {name[:80]!r}")
        chain: dict[str, StoredResponse] = {}

        async def read(one: str) -> None:
            stored = await self.get(tenant, one, room)
            if stored is not None:
                chain[one] = stored

        async with task_group() as tasks:
            for one in last.before:
                tasks.start_soon(read, one)
        for one in last.before:
            if one not in chain:
                raise no_previous(f"{name} goes on from {one}, which is not there any more")
        return earlier_of([*(chain[one] for one in last.before), last], unix_time())

    async def conversation_of(self, tenant: str, name: str) -> str:
        """The name of the conversation that a response is of.

        Raises:
            BadRequest: there is no such response.
            DynbusError: it cannot be read at present.
        """
        last = await self.get(tenant, name)
        if last is None:
            raise no_previous(f"there is no response {name[:80]!r}")
        first = await self.get(tenant, last.before[0]) if last.before else last
        known = "" if first is None else first.conversation
        return known or (last.before[0] if last.before else name)

    async def _referred(
        self, tenant: str, names: Sequence[str], take: Callable[[int], object]
    ) -> dict[str, Item]:
        """The items of some ids, as far as they are there."""
        items: dict[str, Item] = {}
        room, responses = _Room("input", take), {response_of(name) for name in names}
        if len(responses) > MAX_REFERRED:
            raise misfit("input", f"it names items of more than {MAX_REFERRED} responses")
        for response in responses:
            stored = await self.get(tenant, response, room)
            if stored is not None:
                items |= {item["id"]: item for item in stored.answer.output}
        return items

    def sink(self, sink: Sink, format: AnswerFormat, tenant: str) -> Sink:
        """The sink of an answer, which has it kept before its end is told where it is to be."""
        if not isinstance(format, ResponseFormat) or format.pending is None:
            return sink
        start = partial(self._background.start, name="keeping a response")
        keep, is_kept = partial(self._keep, tenant), partial(self._is_kept, tenant)
        keeping = _KeepingSink(sink, format, keep, is_kept, start)
        if isinstance(sink, NumberedSink):
            sink.settle = keeping.settle
        return keeping

    async def _keep(self, tenant: str, stored: StoredResponse) -> bool:
        """Keep a response; whether that is done."""
        if monotonic() < self._retry_at:
            # Each answer would wait at its end, as long as the bus is away.
            return False
        try:
            await self._put(_name_of(tenant, stored.answer.id), msgspec.json.encode(stored))
        except DynbusError as error:
            if isinstance(error, Unavailable):
                self._retry_at = monotonic() + RETRY_DELAY
            self._log(f"{type(error).__name__}: {error}")
            return False
        self._log("")
        return True

    async def _is_kept(self, tenant: str, stored: StoredResponse) -> bool:
        """True if a response is kept, which another front end may have done.

        Raises:
            DynbusError: nobody knows at present.
        """
        name = _name_of(tenant, stored.answer.id)
        try:
            await self._objects.info(name, timeout=READ_TIMEOUT)
        except (NoObject, NoStream):
            return False
        return True

    async def ensure(self) -> None:
        """Make the bucket where it is missing."""
        if not self._is_ready:
            await self._objects.ensure(timeout=STORE_TIMEOUT)
            self._is_ready = True

    async def _put(self, name: str, data: bytes) -> None:
        await self.ensure()
        try:
            await self._objects.put(name, data, make_room=self._want_room, timeout=STORE_TIMEOUT)
        except NoStream:
            # The server was started again without its disk.
            self._is_ready = False
            raise
        self._is_used = True

    def _log(self, problem: str) -> None:
        """Say once that responses cannot be kept, and once that they can be again."""
        if problem != self._logged:
            if problem:
                logger.warning("responses are not kept, and cannot be gone on from: %s", problem)
            else:
                logger.info("responses are kept again")
        self._logged = problem

    # Kept responses ----------------------------------------------------------------------------

    async def get(self, tenant: str, name: str, room: _Room | None = None) -> StoredResponse | None:
        """A response of a tenant; None where there is none of this id, or none any more.

        Args:
            room: for it and others.

        Raises:
            BadRequest: there is no room for it.
            DynbusError: it cannot be read at present.
        """
        if not is_response_id(name):
            # As a client has sent it.
            return None
        try:
            stored = await self._objects.get(_name_of(tenant, name), timeout=READ_TIMEOUT)
        except (NoObject, NoStream):
            return None
        if stored.info.modified + KEPT < unix_time():
            return None
        if room is not None:
            room.take(len(stored.data))
        return _decode(stored.data)

    async def delete(self, tenant: str, name: str) -> None:
        """Have a response of a tenant be gone.

        Raises:
            BadRequest: it has none of this id.
        """
        if await self.get(tenant, name) is None:
            raise no_response(name)
        await self._objects.delete(_name_of(tenant, name), forget=True, timeout=READ_TIMEOUT)

    # Room --------------------------------------------------------------------------------------

    async def _keep_room(self) -> None:
        while True:
            with anyio.move_on_after(SWEEP_INTERVAL):
                await self._is_full.wait()
            if not self._is_used and not self._is_full.is_set():
                continue
            self._is_used = False
            self._is_full.clear()
            try:
                await self.make_room()
            except DynbusError as error:
                logger.warning("no room was made for responses: %s", error)

    async def _want_room(self) -> None:
        """Have room made at once, which this response does not wait for."""
        self._is_full.set()

    async def make_room(self) -> None:
        """Drop responses where there is no room for more of them; see `to_drop`.

        Raises:
            DynbusError: the bus is away.
        """
        info = await self._jetstream.stream_info(RESPONSES.stream.name, timeout=READ_TIMEOUT)
        if info.size < FULL * MAX_STORED:
            return
        await self._objects.drop_abandoned(timeout=SWEEP_TIMEOUT)
        objects = await self._objects.list_objects(timeout=SWEEP_TIMEOUT)
        kept = [
            Kept(one.name, one.name.partition(".")[0], one.size + RECORD_BYTES, one.modified)
            for one in objects
        ]
        names = to_drop(kept, int(LEFT * MAX_STORED))
        for name in names:
            await self._objects.delete(name, forget=True, timeout=READ_TIMEOUT)
        logger.info("%d responses were dropped, as there was no room for more", len(names))


class _KeepingSink:
    """Has a response kept before its end is told: the sink of its completion.

    Args:
        keep: keeps a response; whether that is done.
        is_kept: says whether that was done elsewhere.
        start: has `settle` done, where `NumberedSink.settle` is for nobody to call.
    """

    def __init__(
        self,
        sink: Sink,
        format: ResponseFormat,
        keep: Callable[[StoredResponse], Awaitable[bool]],
        is_kept: Callable[[StoredResponse], Awaitable[bool]],
        start: Callable[[Callable[[], Awaitable[None]]], object],
    ) -> None:
        self._sink = sink
        self._format = format
        self._keep = keep
        self._is_kept = is_kept
        self._start = start
        # The end of the answer, as long as it is not told.
        self._last: bytes | None = None
        self._is_whole = False

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Take the next chunks, or a whole answer."""
        if self._format.made is None:
            return self._sink.write(chunks)
        *others, self._last = chunks
        return self._sink.write(others) if others else True

    def end(self, error: DynbusError | None) -> None:
        """There is no more."""
        if error is not None or self._last is None:
            self._sink.end(error)
            return
        self._is_whole = True
        if not isinstance(self._sink, NumberedSink) or self._sink.settle is None:
            self._start(partial(self.settle, is_own=True))

    async def settle(self, *, is_own: bool) -> None:
        """Keep the response and tell its end, where it is whole and that is not done.

        Args:
            is_own: whether it was made here. Of one that was made elsewhere it is known by now
                whether it is kept: it may have been deleted since.
        """
        made, last = self._format.made, self._last
        if not self._is_whole or made is None or last is None:
            return
        self._last = None
        is_kept = await (self._keep if is_own else self._is_kept)(made)
        self._sink.write([last if is_kept else self._format.unkept()])
        self._sink.end(None)


def no_response(name: str) -> BadRequest:
    """The refusal of a request for a response that is not there."""
    return BadRequest(
        f"there is no response {name[:80]!r}: it was made with store=false, was deleted, or its "
        "time is over",
        param="response_id",
        reason="response_not_found",
        status=404,
    )


def no_previous(why: str) -> BadRequest:
    return BadRequest(
        f"previous_response_id: {why}; send the items of the conversation as input",
        param="previous_response_id",
        reason="previous_response_not_found",
    )


def _name_of(tenant: str, name: str) -> str:
    return f"{tenant_token(tenant)}.{name}"


def response_grants() -> list[Grant]:
    """The uses that a front end makes of the bus, for `dynbus auth`, which keeps responses."""
    bucket = RESPONSES.stream
    published = (
        f"$O.{RESPONSES.name}.>",
        *bucket.to_follow,
        f"$JS.API.STREAM.PURGE.{bucket.name}",
    )
    return [Grant("keeps responses", published)]
