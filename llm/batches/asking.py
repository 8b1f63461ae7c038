"""Lines of batches, asked of models as a front end asks for what is interactive."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from dynbus import DynbusError, InvalidResponse, call_options
from dynbus.llm.answers import Usage
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.api import Api, Asked, CompletionsApi, salted, without
from dynbus.llm.openai.embeddings import EmbeddingsFormat, read_embeddings
from dynbus.llm.openai.errors import BadRequest, ModelNotFound, RateLimited, answer_of, status_of
from dynbus.llm.openai.requests import ChatRequest, read_chat, read_completion
from dynbus.llm.pipeline.models import Models
from dynbus.llm.pipeline.open_model import Inquiry
from dynbus.llm.pipeline.serving import RequestTiming
from dynbus.llm.pipeline.waiting import WaitingChunks
from dynbus.llm.responses.api import ResponsesApi
from dynbus.llm.tenants.admission import BYTES_OF_TOKEN, Admission
from dynbus.llm.tenants.usage import Tokens, UsageEntry
from dynbus.spi import describe_exception, random_id

from .lines import Answer

logger = logging.getLogger(__name__)

APIS: Final[Mapping[str, Api]] = {
    "/v1/chat/completions": CompletionsApi(read_chat),
    "/v1/completions": CompletionsApi(read_completion),
    "/v1/responses": ResponsesApi(),
}
"""OpenAI's endpoints that engines with tokens answer, by path."""

EMBEDDINGS: Final = "/v1/embeddings"

LOWEST: Final = -9999
"""The priority of requests of batches: no client can ask for a lower one."""

REQUEST_TIMEOUT: Final = 3600.0
"""Seconds for one request, as for an interactive one; what takes longer is tried again."""

_FOR_NOW: Final = frozenset((408, 429, 499, 502, 503, 504))
"""Statuses of what may go well another time, though the request stays the same."""


class TryAgain(DynbusError):
    """Raised for a line whose model cannot answer now, and may later."""

    code = "TryAgain"
    retryable = True


class LineAsker:
    """Asks models."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def __repr__(self) -> str:
        return f"<LineAsker {self._models!r}>"

    async def ask(
        self, endpoint: str, body: bytes, name: str, tenant: str, admission: Admission | None
    ) -> Answer:
        """The answer to a request; a refusal of it is one, too.

        Args:
            name: of the request.
            admission: counts what it uses of its tenant's limits; None for one without.

        Raises:
            TryAgain: nobody can answer it now: an engine was lost, or none is there.
        """
        cost = _Cost()
        try:
            with call_options(timeout=REQUEST_TIMEOUT, priority=LOWEST):
                if endpoint == EMBEDDINGS:
                    return await self._embed(body, name, tenant, admission, cost)
                asked = APIS[endpoint], body, name, tenant, admission, cost
                return await self._complete(*asked)
        except DynbusError as error:
            if self._may_go_well(error, body, admission):
                # What the try that answers it uses is what it costs.
                cost.used = Usage(0, 0)
                raise TryAgain(f"{error.code}: {error}") from error
            return _refused(endpoint, error, name)
        except Exception as error:
            # Every other try would end so, too.
            logger.exception("the line %s failed", name)
            return _refused(
                endpoint, DynbusError(f"the line failed: {describe_exception(error)}"), name
            )
        finally:
            if admission is not None:
                admission.settle(cost.used)

    def _may_go_well(self, error: DynbusError, body: bytes, admission: Admission | None) -> bool:
        if isinstance(error, RateLimited) and error.is_budget:
            return admission is not None and admission.may_get_more
        if isinstance(error, ModelNotFound):
            # Its engines were lost a while ago, and may be started again.
            return msgspec.json.decode(body, type=_Named).model in self._models.registered
        return not isinstance(error, BadRequest) and status_of(error) in _FOR_NOW

    async def _complete(
        self,
        api: Api,
        body: bytes,
        name: str,
        tenant: str,
        admission: Admission | None,
        cost: _Cost,
    ) -> Answer:
        # That of batches is lower than any.
        asked: Asked = api.read(without(body, "priority"))
        request = replace(asked.request, priority=LOWEST)
        is_chat = isinstance(request, ChatRequest)
        wanted = ModelType.Chat if is_chat else ModelType.Completions
        # Which others there are is not for every tenant.
        model = await self._models.get(request.model, wanted | ModelType.Backend, ())
        waiting = WaitingChunks()
        inquiry = Inquiry(
            request,
            salted(asked.body, tenant),
            asked.format(name),
            tenant or None,
            asked.shortens,
            random_id,
            places=asked.places,
        )
        timing = RequestTiming(time.perf_counter())
        completion = await model.prepare(inquiry, waiting, timing)
        if admission is not None:
            lengths = completion.prompt_lengths or [completion.prompt_bytes // BYTES_OF_TOKEN]
            await admission.reserve(lengths, request.limit, request.choices)
        try:
            await model.begin(completion)
            answer = await waiting.take(completion)
        except BaseException:
            completion.cancel()
            raise
        finally:
            if timing.count or completion.usage is not None:
                pieces = Usage(completion.prompt_bytes // BYTES_OF_TOKEN, timing.count)
                cost.used = completion.usage or pieces
        if answer is None:
            raise InvalidResponse("the engine gave no answer")
        return _answered(answer, name, request.model, cost.used)

    async def _embed(
        self, body: bytes, name: str, tenant: str, admission: Admission | None, cost: _Cost
    ) -> Answer:
        data = without(body, "priority")
        request = replace(read_embeddings(data), priority=LOWEST)
        model = await self._models.get(request.model, ModelType.Embedding, ())
        prepared = await model.prepare_embeddings(
            request, salted(data, tenant), EmbeddingsFormat(request, name), tenant or None
        )
        length = len(data) // BYTES_OF_TOKEN
        if admission is not None:
            await admission.reserve(prepared.prompt_lengths or [length], None, 0)
        answer = await model.embed(prepared)
        cost.used = prepared.usage or Usage(length, 0)
        return _answered(answer, name, request.model, cost.used)


def _answered(body: bytes, name: str, model: str, used: Usage) -> Answer:
    entry = UsageEntry(model, "", "", 1, *Tokens.of(used))
    return Answer(200, name, msgspec.Raw(body), entry)


def _refused(endpoint: str, error: DynbusError, name: str) -> Answer:
    api = APIS.get(endpoint)
    refusal = answer_of(error, name) if api is None else api.refusal(error, name)
    return Answer(refusal.status, name, msgspec.Raw(refusal.body))


@dataclass(slots=True)
class _Cost:
    """The tokens that a line has come to, whatever becomes of it."""

    used: Usage = Usage(0, 0)


class _Named(msgspec.Struct):
    model: str
