"""Requests for embeddings, and their answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from dynbus import DynbusError
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.embeddings import EmbeddingsFormat, EmbeddingsRequest, read_embeddings
from dynbus.llm.openai.errors import ErrorAnswer, answer_of
from dynbus.llm.tenants.admission import BYTES_OF_TOKEN

from .exchange import Exchange
from .tracing import Operation


class EmbeddingsExchange(Exchange):
    """A request for embeddings, and its answer."""

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return answer_of(error, request_id)

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        return partial(self._embed, read_embeddings(data), data)

    async def _embed(self, request: EmbeddingsRequest, data: bytes) -> None:
        model, metrics = await self._ask_for(
            request.model, ModelType.Embedding, request.priority or 0, _operation(request)
        )
        format = EmbeddingsFormat(request, self._caller.request_id)
        begun = time.perf_counter()
        work = await model.prepare_embeddings(
            request, self._for_engines(data), format, self._caller.tenant or None
        )
        self._begin_work(work)
        usage = work.usage
        await self._reserve([usage.prompt if usage is not None else len(data) // BYTES_OF_TOKEN])
        prepared = self._timing.prepared = time.perf_counter()
        self._trace.prepared(usage.prompt if usage is not None else None, begun, prepared)
        metrics.preparing.observe(prepared - begun)
        answer = await model.embed(work)
        self._count_used()
        self._writer.write([answer])
        self._writer.end(None)


def _operation(request: EmbeddingsRequest) -> Operation:
    attributes = {
        "request.encoding_formats": [request.encoding_format] if request.encoding_format else None,
        "embeddings.dimension.count": request.dimensions,
    }
    given = {name: value for name, value in attributes.items() if value is not None}
    return Operation("embeddings", request.model, given)
