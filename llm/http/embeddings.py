"""Requests for embeddings, and their answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from dynbus import DynbusError
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.api import with_priority
from dynbus.llm.openai.embeddings import EmbeddingsFormat, EmbeddingsRequest, read_embeddings
from dynbus.llm.openai.errors import ErrorAnswer, answer_of
from dynbus.llm.pipeline.embedding import Embeddings, TextEmbeddings
from dynbus.llm.pipeline.open_model import OpenModel
from dynbus.llm.tenants.admission import BYTES_OF_TOKEN

from .exchange import Exchange
from .tracing import Operation

Preparing = Awaitable[Embeddings[Any] | TextEmbeddings]


class VectorsExchange(Exchange):
    """A request whose texts become vectors, of which the answer is made when all are there."""

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return answer_of(error, request_id)

    async def _answer_with(
        self,
        prepare: Callable[[OpenModel, msgspec.Raw, str | None], Preparing],
        wanted: ModelType,
        operation: Operation,
        priority: int | None,
        data: bytes,
    ) -> None:
        """Have a model answer.

        Args:
            prepare: the request as engines take it, of the model, its body for engines that take
                text, and the salt of its blocks.
            wanted: what the model has to be there for.
        """
        model, metrics = await self._ask_for(operation.model, wanted, priority, operation)
        begun = time.perf_counter()
        work = await prepare(model, self._for_engines(data), self._caller.tenant or None)
        self._begin_work(work)
        usage = work.usage
        await self._reserve(work.prompt_lengths or [len(data) // BYTES_OF_TOKEN])
        prepared = self._timing.prepared = time.perf_counter()
        self._trace.prepared(usage.prompt if usage is not None else None, begun, prepared)
        metrics.preparing.observe(prepared - begun)
        answer = await model.embed(work)
        self._count_used()
        self._writer.write([answer])
        self._writer.end(None)


class EmbeddingsExchange(VectorsExchange):
    """A request for embeddings, and its answer."""

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        request = read_embeddings(data)
        if request.priority is None and (priority := self._default_priority):
            request, data = replace(request, priority=priority), with_priority(data, priority)
        format = EmbeddingsFormat(request, self._caller.request_id)

        def prepare(model: OpenModel, body: msgspec.Raw, salt: str | None) -> Preparing:
            return model.prepare_embeddings(request, body, format, salt)

        return partial(
            self._answer_with,
            prepare,
            ModelType.Embedding,
            _operation(request),
            request.priority,
            data,
        )


def _operation(request: EmbeddingsRequest) -> Operation:
    attributes = {
        "request.encoding_formats": [request.encoding_format] if request.encoding_format else None,
        "embeddings.dimension.count": request.dimensions,
    }
    given = {name: value for name, value in attributes.items() if value is not None}
    return Operation("embeddings", request.model, given)
