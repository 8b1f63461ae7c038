"""What is answered by an engine: from the request's bytes to the answer's, under each interface."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from dynbus.bus.errors import DynbusError
from dynbus.llm.answers import AnswerFormat
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.api import Api, Asked
from dynbus.llm.openai.errors import ErrorAnswer
from dynbus.llm.openai.requests import ChatRequest
from dynbus.llm.pipeline.open_model import Inquiry
from dynbus.llm.pipeline.serving import Sink

from .content import Content, ContentSink, RecordedFormat
from .exchange import Exchange, Receive, Scope
from .shared import Caller, Shared
from .tracing import completion_operation
from .writer import Send


class CompletionExchange(Exchange):
    """A request for a completion, and its answer."""

    def __init__(
        self,
        api: Api,
        shared: Shared,
        path: str,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._api = api
        super().__init__(shared, path, caller, scope, receive, send)

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return self._api.refusal(error, request_id)

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        asked = self._api.read(data)
        format = asked.format(self._caller.request_id)
        if self._shared.settings.log_content:
            self._content = Content(asked.request)
            if format.frame is None:
                format = RecordedFormat(format, self._content)
        self._writer = self._make_writer(format if asked.request.streams else None)
        return partial(self._complete, asked, format)

    async def _complete(self, asked: Asked, format: AnswerFormat) -> None:
        caller, timing, request = self._caller, self._timing, asked.request
        wanted = ModelType.Chat if isinstance(request, ChatRequest) else ModelType.Completions
        model = await self._shared.models.get(request.model, wanted | ModelType.Backend)
        self._trace.model_asked(completion_operation(request))
        metrics = self._ask_for(request.model, request.priority or 0)
        timing.observe = metrics.inter_token_latency.observe
        body = self._for_engines(asked.body)
        inquiry = Inquiry(request, body, format, caller.tenant or None, asked.shortens)
        begun = time.perf_counter()
        sink: Sink = self._writer
        if self._content is not None and format.frame is not None:
            sink = ContentSink(sink, self._content)
        completion = await model.prepare(inquiry, sink, timing)
        self._work = completion
        prepared = timing.prepared = time.perf_counter()
        usage = completion.usage
        self._trace.prepared(usage.prompt if usage is not None else None, begun, prepared)
        metrics.preparing.observe(prepared - begun)
        self._writer.when_writable = completion.resume
        await model.begin(completion)
        timing.sent = time.perf_counter()
        metrics.queue.observe(timing.sent - prepared)
        self._trace.sent(completion.instances, prepared, timing.sent)
