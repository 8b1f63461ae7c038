"""Requests for scores of texts, and their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.api import with_priority
from dynbus.llm.openai.scores import (
    RerankFormat,
    RerankRequest,
    ScoreFormat,
    ScoreRequest,
    ScoresFormat,
    read_rerank,
    read_score,
)
from dynbus.llm.pipeline.open_model import OpenModel

from .embeddings import Preparing, VectorsExchange
from .tracing import Operation


class _ScoresExchange(VectorsExchange):
    def _answering(
        self, request: ScoreRequest | RerankRequest, format: ScoresFormat, name: str, data: bytes
    ) -> Callable[[], Awaitable[None]]:
        if request.priority is None and (priority := self._default_priority):
            request, data = replace(request, priority=priority), with_priority(data, priority)
        asked = request

        def prepare(model: OpenModel, body: msgspec.Raw, salt: str | None) -> Preparing:
            return model.prepare_scores(asked, body, format, salt)

        return partial(
            self._answer_with,
            prepare,
            ModelType.Score | ModelType.Embedding,
            Operation(name, request.model),
            request.priority,
            data,
        )


class ScoreExchange(_ScoresExchange):
    """A request for the scores of pairs of texts, and its answer."""

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        request = read_score(data)
        format = ScoreFormat(request, self._caller.request_id)
        return self._answering(request, format, "score", data)


class RerankExchange(_ScoresExchange):
    """A request to rank documents by a query, and its answer."""

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        request = read_rerank(data)
        format = RerankFormat(request, self._caller.request_id)
        return self._answering(request, format, "rerank", data)
