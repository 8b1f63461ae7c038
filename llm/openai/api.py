"""The interfaces under which a front end is asked: OpenAI's own two for completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from dynbus import DynbusError
from dynbus.llm.answers import AnswerFormat

from .answers import SSE, AnswerHead, ChatFormat, CompletionFormat
from .errors import ErrorAnswer, answer_of
from .places import Place
from .requests import ChatRequest, CompletionRequest

KEEP_ALIVE: Final = b": keep-alive\n"
"""A comment, which readers of events skip. It ends no event: some take an empty line for one."""


class MakeFormat(Protocol):
    """Makes the format of one answer."""

    def __call__(self, request_id: str, /, *, now: Callable[[], float] = ...) -> AnswerFormat:
        """The format of the answer to a request.

        Args:
            now: Unix seconds, which the answer tells where it says when it was made.
        """
        ...


class Asked(NamedTuple):
    """A request as a model takes it.

    Attributes:
        body: the request as a body of OpenAI's chat completions or completions, for engines that
            take text.
        format: makes how it is to be answered.
        shortens: whether a limit of tokens that the context has no room for is brought down to
            what it has; it is refused elsewhere.
        has_own_id: whether the id of the answer is another one than the request's, which a client
            may have sent twice.
        session: the conversation that it says it goes on with; empty where it says none.
        after: the answer of that which it goes on from; empty where no other request may go on from
            the same one.
        places: of parts of a chat in the client's request, see `places_of`.
    """

    request: ChatRequest | CompletionRequest
    body: bytes
    format: MakeFormat
    shortens: bool = False
    has_own_id: bool = False
    session: str = ""
    after: str = ""
    places: Sequence[Place] = ()


class Api(Protocol):
    """One interface: how its requests are read, and how they are refused.

    Attributes:
        keep_alive: what a stream is told while nothing comes of it.
    """

    keep_alive: bytes

    def read(self, data: bytes) -> Asked:
        """The request that a body holds.

        Raises:
            BadRequest: it is none, or asks for what is not done here.
        """
        ...

    def refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        """The answer for an error before anything else was answered."""
        ...


class CompletionsApi:
    """One of OpenAI's own interfaces for completions.

    Args:
        read: what reads a body.
    """

    keep_alive: bytes = KEEP_ALIVE

    def __init__(self, read: Callable[[bytes], ChatRequest | CompletionRequest]) -> None:
        self._read = read

    def read(self, data: bytes) -> Asked:
        """The request that a body holds."""
        request = self._read(data)
        return Asked(request, data, partial(format_of, request))

    def refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        """An error as OpenAI's clients expect it."""
        return answer_of(error, request_id)


def format_of(
    request: ChatRequest | CompletionRequest,
    request_id: str,
    *,
    frame: tuple[bytes, bytes] = SSE,
    now: Callable[[], float] = time.time,
) -> ChatFormat | CompletionFormat:
    """The format of an answer to a request in OpenAI's API.

    Args:
        frame: what stands around each chunk of a stream.
        now: Unix seconds.
    """
    is_chat = isinstance(request, ChatRequest)
    head = AnswerHead(
        f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        int(now()),
        request.model,
        frame,
        request.include_usage,
        request.continuous_usage,
    )
    return ChatFormat(head) if is_chat else CompletionFormat(head)


def salted(body: bytes, tenant: str) -> msgspec.Raw:
    """A body for engines that take text: its salt is the tenant's, and never the client's."""
    body = without(body, "cache_salt")
    return msgspec.Raw(_with_field(body, "cache_salt", tenant) if tenant else body)


def prioritized(asked: Asked, priority: int) -> Asked:
    """A request that states no priority, with one."""
    request = replace(asked.request, priority=priority)
    return asked._replace(request=request, body=with_priority(asked.body, priority))


def with_priority(body: bytes, priority: int) -> bytes:
    """A body that states no priority, with one."""
    return _with_field(without(body, "priority"), "priority", priority)


def asking_usage(body: bytes) -> msgspec.Raw:
    """A body of a stream that asks for its usage at the end, whether its client did or not."""
    if not _may_have(body, "stream_options"):
        return msgspec.Raw(_with_field(body, "stream_options", {"include_usage": True}))
    fields = _read_fields(body)
    given: Any = msgspec.json.decode(fields.get("stream_options", b"null"))
    options: dict[str, Any] = {**(given or {}), "include_usage": True}
    return msgspec.Raw(msgspec.json.encode({**fields, "stream_options": options}))


def without(body: bytes, name: str) -> bytes:
    """An object as JSON without one of its fields; as it is where it has none of this name."""
    if not _may_have(body, name):
        return body
    fields = _read_fields(body)
    fields.pop(name, None)
    return msgspec.json.encode(fields)


_read_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Reads the fields of an object, and what is in none of them: with images they are megabytes."""


def _may_have(body: bytes, name: str) -> bool:
    # A name may be written with escapes.
    return name.encode() in body or b"\\u" in body


def _with_field(body: bytes, name: str, value: Any) -> bytes:
    """An object as JSON that has no field of a name, with one."""
    fields = body.lstrip()[1:].lstrip()
    field = b'{"%s":%s' % (name.encode(), msgspec.json.encode(value))
    return field + (b"" if fields.startswith(b"}") else b",") + fields
