"""Files and batches over HTTP, by OpenAI's interface."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs

import anyio
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dynbus import DynbusError, PayloadTooLarge
from dynbus.llm.batches.records import PURPOSE, page_of, read_batch_request
from dynbus.llm.openai.errors import BadRequest, BodyTimeout, status_of, unsupported
from dynbus.llm.tenants.limits import NO_LIMITS

from .exchange import HungUp, Receive, Scope, abort
from .shared import Caller, Shared
from .writer import Send, raw_headers

if TYPE_CHECKING:
    from dynbus.llm.batches.service import Batches

logger = logging.getLogger(__name__)

FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"

MAX_FILE: Final = "--max-file"
"""The option that bounds a file, for refusals."""
MAX_JSON: Final = 64 * 1024
"""Bytes of a request for a batch."""
MAX_FORM: Final = 64 * 1024
"""Bytes of a form beside its file."""
MAX_FIELD: Final = 1024
MAX_LIMIT: Final = 10_000


_ONE: Final = re.compile(r"/v1/(files|batches)/([^/]+)(/content|/cancel)?")


class _Place(NamedTuple):
    """A path, without the id in it; and the id, empty for none."""

    template: str
    name: str


def is_for_batches(path: str) -> bool:
    """True if a path is one of files or of batches."""
    return path in (FILES, BATCHES) or path.startswith((f"{FILES}/", f"{BATCHES}/"))


def _place_of(path: str) -> _Place:
    match = _ONE.fullmatch(path)
    if match is None:
        return _Place(path, "")
    return _Place(f"/v1/{match[1]}/{{id}}{match[3] or ''}", match[2])


class BatchExchanges:
    """Answers requests for files and batches.

    Args:
        batches: what is asked.
    """

    def __init__(self, shared: Shared, batches: Batches) -> None:
        self._shared = shared
        self._batches = batches
        self._operations: Mapping[
            str, Mapping[str, Callable[[_Request], Awaitable[dict[str, Any] | None]]]
        ] = {
            FILES: {"GET": self._files, "POST": self._upload},
            f"{FILES}/{{id}}": {"GET": self._file, "DELETE": self._delete},
            f"{FILES}/{{id}}/content": {"GET": self._content},
            BATCHES: {"GET": self._list, "POST": self._create},
            f"{BATCHES}/{{id}}": {"GET": self._batch},
            f"{BATCHES}/{{id}}/cancel": {"POST": self._cancel},
        }

    def methods(self, path: str) -> list[str]:
        """The methods that a path takes; empty for a path that is not there."""
        return [*self._operations.get(_place_of(path).template, ())]

    async def answer(
        self, path: str, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> dict[str, Any] | None:
        """The answer to a request whose method its path takes, as JSON; None where it is sent.

        Raises:
            DynbusError: it is refused.
        """
        shared, place = self._shared, _place_of(path)
        request = _Request(place.name, caller, scope, receive, send)
        status, code = 200, ""
        shared.take_place(caller)
        shared.metrics.in_flight += 1
        try:
            return await self._operations[place.template][scope["method"]](request)
        except HungUp:
            status = 499
            return None
        except DynbusError as error:
            status, code = status_of(error), error.code
            raise
        finally:
            shared.metrics.in_flight -= 1
            shared.places.give_back(caller.tenant)
            shared.metrics.count(place.template, "", status)
            asked = {"method": scope["method"], "path": place.template, "status": status}
            fields = {"request_id": caller.request_id}
            if caller.tenant:
                fields["tenant"] = caller.tenant
            if code:
                fields["error"] = code
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            logger.info("%s %s %s %s", *asked.values(), text, extra={**asked, **fields})

    # Files -------------------------------------------------------------------------------------

    async def _upload(self, request: _Request) -> dict[str, Any]:
        limit = self._shared.settings.max_file_bytes
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit + MAX_FORM:
            raise PayloadTooLarge(
                f"the file has about {length} bytes, and at most {limit} are taken ({MAX_FILE})",
                started=False,
            )
        form = Form(request.headers.get("content-type", ""))
        body = self._pieces(request)
        await form.read_to_file(body)
        file = await self._batches.upload(
            request.tenant, form.filename, form.file(body), limit=limit, bound=MAX_FILE
        )
        return file.as_json()

    async def _pieces(self, request: _Request) -> AsyncGenerator[bytes]:
        """The body of a request as it comes.

        Raises:
            BodyTimeout: nothing comes any more.
            HungUp: the client is gone.
        """
        timeout, more = self._shared.settings.body_timeout, True
        while more:
            message: MutableMapping[str, Any] = {}
            with anyio.move_on_after(timeout) as scope:
                message = await request.receive()
            if scope.cancelled_caught:
                raise BodyTimeout(f"nothing of the body arrived for {timeout:g} s")
            if message["type"] == "http.disconnect":
                raise HungUp
            more = message.get("more_body", False)
            yield message.get("body", b"")

    async def _files(self, request: _Request) -> dict[str, Any]:
        files = await self._batches.store.files(request.tenant)
        if purpose := request.query("purpose"):
            files = [file for file in files if file.purpose == purpose]
        page = page_of(
            files,
            after=request.query("after"),
            limit=request.limit(MAX_LIMIT, MAX_LIMIT),
            newest_first=request.query("order") != "asc",
        )
        return page.as_json()

    async def _file(self, request: _Request) -> dict[str, Any]:
        return (await self._batches.file(request.tenant, request.name)).as_json()

    async def _delete(self, request: _Request) -> dict[str, Any]:
        await self._batches.delete_file(request.tenant, request.name)
        return {"id": request.name, "object": "file", "deleted": True}

    async def _content(self, request: _Request) -> None:
        file = await self._batches.file(request.tenant, request.name)
        headers = {
            "content-type": "application/octet-stream",
            "content-length": str(file.size),
            "cache-control": "no-store",
            "x-content-type-options": "nosniff",
        }
        sent = [*raw_headers(headers), *request.caller.id_headers]
        await request.send({"type": "http.response.start", "status": 200, "headers": sent})
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(request.cancel_when_left, tasks.cancel_scope)
                async for data in self._batches.store.content(file):
                    with anyio.fail_after(self._shared.settings.write_timeout):
                        body = {"type": "http.response.body", "body": data, "more_body": True}
                        await request.send(body)
                await request.send({"type": "http.response.body", "body": b"", "more_body": False})
                tasks.cancel_scope.cancel()
        except* (DynbusError, TimeoutError) as failure:
            # Its length was told: what is not all of it must not look as if it were.
            logger.warning("the content of %s was not sent to its end: %s", file.id, failure)
            request.abort()

    # Batches -----------------------------------------------------------------------------------

    async def _create(self, request: _Request) -> dict[str, Any]:
        data = bytearray()
        async for piece in self._pieces(request):
            data += piece
            if len(data) > MAX_JSON:
                raise PayloadTooLarge(f"the body has more than {MAX_JSON} bytes", started=False)
        asked = read_batch_request(bytes(data))
        holder = request.caller.holder
        batch = await self._batches.create(
            request.tenant,
            asked,
            self._shared.limits_of(request.tenant) or NO_LIMITS,
            key=holder.key,
            key_limits=holder.limits or NO_LIMITS,
        )
        return batch.as_json()

    async def _list(self, request: _Request) -> dict[str, Any]:
        batches = await self._batches.store.batches(request.tenant)
        return page_of(
            batches, after=request.query("after"), limit=request.limit(20, 100)
        ).as_json()

    async def _batch(self, request: _Request) -> dict[str, Any]:
        return (await self._batches.batch(request.tenant, request.name)).as_json()

    async def _cancel(self, request: _Request) -> dict[str, Any]:
        return (await self._batches.cancel(request.tenant, request.name)).as_json()


class _Request:
    """A request, and how it is answered.

    Attributes:
        name: the id in its path; empty for none.
    """

    def __init__(
        self, name: str, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.name = name
        self.caller = caller
        self.receive = receive
        self.send = send
        self._scope = scope
        query: bytes = scope["query_string"]
        self._query = parse_qs(query.decode("latin-1"))

    @property
    def tenant(self) -> str:
        """The tenant that sends it; empty where there are no keys."""
        return self.caller.tenant

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers, their names in lower case."""
        return self.caller.headers

    def query(self, name: str) -> str:
        """A parameter of its query; empty where it has none."""
        return self._query.get(name, [""])[-1]

    def limit(self, default: int, most: int) -> int:
        """The entries of a page.

        Raises:
            BadRequest: it asks for none, or for too many.
        """
        text = self.query("limit")
        if not text:
            return default
        if not text.isdecimal() or len(text) > 6 or not 1 <= int(text) <= most:
            raise BadRequest(f"limit: give 1 to {most}", param="limit")
        return int(text)

    async def cancel_when_left(self, scope: anyio.CancelScope) -> None:
        """Have the answer end when nobody is left to read it."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    def abort(self) -> None:
        """Drop the connection."""
        abort(self._scope)


class Form:
    """A form with a file, read while it comes.

    Args:
        content_type: the header.

    Attributes:
        filename: of the file, once it has begun.

    Raises:
        BadRequest: it is no form.
    """

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise BadRequest("send the file as multipart/form-data", param="file")
        self.filename = ""
        self._fields: dict[str, bytearray] = {}
        self._came = self._of_file = 0
        self._name = ""
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._has_file = self._is_over = False
        self._data: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": partial(self._add, "header"),
                "on_header_value": partial(self._add, "value"),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._take,
                "on_end": self._end,
            },
        )

    async def read_to_file(self, body: AsyncGenerator[bytes]) -> None:
        """Read as far as the beginning of the file.

        Raises:
            BadRequest: it is no form with a file, or has what is not taken.
        """
        async for piece in body:
            self._feed(piece)
            if self._has_file:
                return
        raise BadRequest("file: there is none", param="file")

    async def file(self, body: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """The bytes of the file, as they come.

        Raises:
            BadRequest: the form is broken, or has what is not taken.
        """
        yield self._taken()
        async for piece in body:
            self._feed(piece)
            yield self._taken()
        if not self._is_over:
            raise BadRequest("the form ends in its middle", param="file")
        purpose = self._fields.get("purpose", bytearray()).decode("utf-8", "replace")
        if purpose != PURPOSE:
            raise unsupported("purpose", f"{purpose[:40]!r} is not kept here: give 'batch'")
        if any(name.startswith("expires_after") for name in self._fields):
            raise unsupported("expires_after", "files are kept for 30 days here")

    def _feed(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise BadRequest(f"the form cannot be read: {error}", param="file") from None
        self._came += len(piece)
        # Also heads, parts without data, and what follows the end.
        if self._came - self._of_file > MAX_FORM:
            raise BadRequest(
                f"the form has more than {MAX_FORM} bytes beside its file", param="file"
            )

    def _taken(self) -> bytes:
        data, self._data = b"".join(self._data), []
        return data

    # What the parser calls ---------------------------------------------------------------------

    def _begin(self) -> None:
        self._name, self._disposition = "", b""

    def _add(self, kind: str, data: bytes, start: int, end: int) -> None:
        (self._header if kind == "header" else self._value).extend(data[start:end])

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:64]
        if self._name == "file":
            if self._has_file:
                raise BadRequest("file: send one", param="file")
            self._has_file = True
            named = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = named.rpartition("/")[2][:255] or "batch.jsonl"

    def _take(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._data.append(data[start:end])
            self._of_file += end - start
            return
        field = self._fields.setdefault(self._name, bytearray())
        field.extend(data[start:end])
        if len(field) > MAX_FIELD or len(self._fields) > 16:
            raise BadRequest(
                f"the form has too much beside its file, in {self._name!r}", param=self._name
            )

    def _end(self) -> None:
        self._is_over = True
