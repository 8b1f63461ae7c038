"""Embeddings of texts, and scores of pairs: each is a call of its own, and some of a request run at
a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from dynbus import (
    Cancelled,
    DynbusError,
    EndpointClient,
    InvalidRequest,
    InvalidResponse,
    call_options,
)
from dynbus.llm.answers import Usage
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.openai.embeddings import EmbeddingsFormat, EmbeddingsRequest
from dynbus.llm.openai.errors import mismatch_of
from dynbus.llm.openai.reading import read_usage
from dynbus.llm.text.text_model import TextModel
from dynbus.spi import random_id

from .preparing import ModelLimits, check_characters, check_length

MOST_AT_ONCE: Final = 16
"""Texts of one request that engines have at a time: what others ask for comes between."""

_decode: Final = msgspec.json.Decoder(Embedded).decode


T = TypeVar("T")


class VectorsFormat(Protocol[T]):
    """The format of an answer that is made of the vectors of texts."""

    @property
    def id(self) -> str:
        """The id of the answer."""
        ...

    def embedding(self, index: int, vector: NDArray[np.float32]) -> T:
        """The part of the answer that one vector is.

        Raises:
            ValueError: it can be none.
        """
        ...

    def whole(self, embeddings: list[T], usage: Usage) -> bytes:
        """The answer, of the parts in their order.

        Raises:
            ValueError: they do not go together.
        """
        ...


class Embeddings(Generic[T]):
    """The embeddings of a request's texts, or the scores of its pairs, of an engine that takes
    tokens.

    Args:
        requests: one for each text or pair.
        format: how the answer is told.
    """

    finish_reasons: Sequence[str] = ()

    def __init__(self, requests: Sequence[EmbedRequest], format: VectorsFormat[T]) -> None:
        self.answer_id = format.id
        self.instances: list[str] = []
        self._requests = requests
        self._format = format
        self._scope = anyio.CancelScope()
        self._cached = 0

    @property
    def prompt_lengths(self) -> list[int]:
        """The tokens of each text or pair."""
        return [len(one.token_ids) for one in self._requests]

    @property
    def usage(self) -> Usage:
        """The tokens of its texts."""
        return Usage(sum(len(one.token_ids) for one in self._requests), 0, self._cached)

    async def run(self, client: EndpointClient) -> bytes:
        """Have all texts embedded; the answer.

        Raises:
            DynbusError: one of them could not be embedded; the others are left.
            Cancelled: it was left.
        """
        embeddings: dict[int, T] = {}
        failed: list[DynbusError] = []
        places = iter(range(len(self._requests)))

        async def work() -> None:
            for place in places:
                try:
                    embeddings[place] = await self._embed(client, place)
                except DynbusError as error:
                    failed.append(error)
                    tasks.cancel_scope.cancel()

        with self._scope:
            async with anyio.create_task_group() as tasks:
                for _ in range(min(MOST_AT_ONCE, len(self._requests))):
                    tasks.start_soon(work)
        if failed:
            raise failed[0]
        if self._scope.cancelled_caught:
            raise Cancelled("the request was left")
        in_order = [embeddings[place] for place in range(len(self._requests))]
        with _invalid_if_no("embedding"):
            return self._format.whole(in_order, self.usage)

    def cancel(self, error: DynbusError | None = None) -> None:
        """Leave it: engines stop."""
        self._scope.cancel()

    async def _embed(self, client: EndpointClient, place: int) -> T:
        try:
            data = await _result(client, self._requests[place], self.instances)
        except InvalidRequest as error:
            raise mismatch_of(error) from error
        with _invalid_if_no("embedding"):
            embedded = _decode(data)
            part = self._format.embedding(place, embedded.vector())
        self._cached += embedded.cached_tokens
        return part


@contextmanager
def _invalid_if_no(what: str) -> Generator[None]:
    """Have what an engine gave be refused where it is not what it should be.

    Raises:
        InvalidResponse: it is not.
    """
    try:
        yield
    except ValueError as error:
        raise InvalidResponse(f"what the engine gave is no {what}: {error}") from None


class _Answer(msgspec.Struct, frozen=True):
    usage: Any = None


def _as_it_is(answer: bytes) -> bytes:
    return answer


class TextEmbeddings:
    """The embeddings or scores of an engine that takes the client's request, and gives the whole
    answer.

    Args:
        body: the request.
        convert: makes the answer to the client of that of the engine; it raises a `ValueError`
            where there can be none.
    """

    answer_id = ""
    finish_reasons: Sequence[str] = ()
    prompt_lengths: Sequence[int] = ()
    """The engine counts them."""

    def __init__(self, body: msgspec.Raw, convert: Callable[[bytes], bytes] = _as_it_is) -> None:
        self.instances: list[str] = []
        self.usage: Usage | None = None
        self._body = body
        self._convert = convert
        self._scope = anyio.CancelScope()

    async def run(self, client: EndpointClient) -> bytes:
        """Have the engine answer.

        Raises:
            DynbusError: it could not.
            Cancelled: it was left.
        """
        with self._scope:
            answer = await _result(client, self._body, self.instances)
            with _invalid_if_no("answer"):
                self.usage = read_usage(msgspec.json.decode(answer, type=_Answer).usage)
                return self._convert(answer)
        raise Cancelled("the request was left")

    def cancel(self, error: DynbusError | None = None) -> None:
        """Leave it: the engine stops."""
        self._scope.cancel()


async def _result(client: EndpointClient, request: Any, instances: list[str]) -> bytes:
    """The result of an endpoint, as its result or as the only item of a stream.

    The call has no effect, so that it may be repeated on another instance.

    Args:
        instances: the id of the instance is added, unless it is there.

    Raises:
        DynbusError: the call failed, or gave nothing.
    """
    with call_options(idempotency_key=random_id()):
        call = client.generate(request).raw()
    try:
        reply: Any = await call
        if isinstance(reply, bytes):
            return reply
        async for item in reply:
            data: bytes = item
            return data
    finally:
        await call.aclose()
        if call.instance_id and call.instance_id not in instances:
            instances.append(call.instance_id)
    raise InvalidResponse("the engine gave no embedding")


async def prepare_embeddings(
    text: TextModel,
    limits: ModelLimits,
    request: EmbeddingsRequest,
    format: EmbeddingsFormat,
    *,
    cache_salt: str | None,
) -> Embeddings[msgspec.Raw]:
    """A request with its texts as token ids.

    Args:
        cache_salt: see `EmbedRequest`.

    Raises:
        BadRequest: a text does not fit, or is too long.
        InvalidRequest: a text cannot be encoded.
    """
    special = request.add_special_tokens is not False
    requests: list[EmbedRequest] = []
    for one in request.texts():
        if isinstance(one, str):
            check_characters(len(one), limits, "input", request.model)
            token_ids = await text.encode(one, special=special)
        else:
            token_ids = one
        check_length(token_ids, 0, limits.context_length, "input", request.model)
        requests.append(
            EmbedRequest(
                token_ids,
                request.dimensions,
                limits.lora_name,
                cache_salt=cache_salt,
                priority=request.priority or 0,
            )
        )
    return Embeddings(requests, format)
