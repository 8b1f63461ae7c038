"""Requests that an engine answers, from the request's bytes to the answer's, by each interface."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from dynbus import DynbusError
from dynbus.llm.answers import AnswerFormat
from dynbus.llm.generation import Session
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.api import Api, Asked, prioritized
from dynbus.llm.openai.errors import ErrorAnswer
from dynbus.llm.openai.requests import ChatRequest
from dynbus.llm.pipeline.open_model import Inquiry, OpenModel
from dynbus.llm.pipeline.serving import Completion, Sink
from dynbus.llm.responses.api import ResponsesApi
from dynbus.llm.resumable.events import (
    EventNumbers,
    NumberedErrors,
    NumberedSink,
    numbered_ids,
)
from dynbus.llm.resumable.records import Begun, log_key
from dynbus.llm.resumable.running import AnswerClock, RunningStream
from dynbus.llm.tenants.admission import BYTES_OF_TOKEN
from dynbus.spi import random_id, unix_time

from .content import Content, ContentSink, RecordedFormat
from .exchange import LONG_BODY, Exchange, Receive, Scope
from .shared import RESUMABLE, RESUMABLE_REASON, Caller, Shared
from .tracing import completion_operation
from .writer import Send


@dataclass(frozen=True, slots=True)
class _Wish:
    """The needs of a resumable stream.

    Attributes:
        seed: of the ids of its tool calls, and of its answer where that is kept.
        keeps: whether it is.
    """

    body: bytes
    clock: AnswerClock
    numbers: EventNumbers
    seed: str
    keeps: bool


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
        self._keep_alive = api.keep_alive
        self._wish: _Wish | None = None

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return self._api.refusal(error, request_id)

    def _wishes(self, asked: Asked, data: bytes) -> _Wish | None:
        """The needs of a resumable answer; None where nobody asks for one."""
        if not self._caller.wants_resumable or not asked.request.streams:
            return None
        clock, numbers = AnswerClock(unix_time()), EventNumbers(self._caller.request_id)
        return _Wish(data, clock, numbers, random_id(), asked.has_own_id)

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        asked = self._api.read(data)
        self._wish = wish = self._wishes(asked, data)
        if wish is not None:
            answer_id = wish.seed if asked.has_own_id else self._caller.request_id
            format = asked.format(answer_id, now=wish.clock)
        else:
            format = asked.format(random_id() if asked.has_own_id else self._caller.request_id)
        if self._shared.settings.log_content:
            self._content = Content(asked.request)
        if wish is not None:
            errors = NumberedErrors(format, wish.numbers, self._caller.request_id)
            self._writer = self._make_writer(errors)
        else:
            self._writer = self._make_writer(format if asked.request.streams else None)
            if self._caller.wants_resumable:
                self._writer.add_headers(_refused("the answer is no stream"))
        return partial(self._complete, asked, format)

    async def _complete(self, asked: Asked, format: AnswerFormat) -> None:
        if asked.request.priority is None and (priority := self._default_priority):
            asked = prioritized(asked, priority)
        caller, timing, request = self._caller, self._timing, asked.request
        session = caller.session(asked.session, self._shared.settings.session_seconds)
        if session is not None and (asked.has_own_id or asked.after):
            # Others may go on from the same response, and from this one.
            session = Session(session.name, session.seconds, format.id, asked.after)
        self._session = session
        wanted = ModelType.Chat if isinstance(request, ChatRequest) else ModelType.Completions
        model, metrics = await self._ask_for(
            request.model,
            wanted | ModelType.Backend,
            request.priority,
            completion_operation(request),
        )
        timing.observe = metrics.inter_token_latency.observe
        body = self._for_engines(asked.body)
        wish = self._wish
        new_id = random_id if wish is None else numbered_ids(wish.seed)
        counts = self._shared.usage is not None
        numbered = None if wish is None else NumberedSink(wish.numbers, self._writer)
        sink: Sink = numbered or self._writer
        if self._shared.responses is not None:
            sink = self._shared.responses.sink(sink, format, caller.tenant)
        if self._content is not None:
            if format.frame is not None:
                sink = ContentSink(sink, self._content)
            else:
                format = RecordedFormat(format, self._content)
        inquiry = Inquiry(
            request,
            body,
            format,
            caller.tenant or None,
            asked.shortens,
            new_id,
            counts,
            self._session,
            asked.places,
        )
        begun = time.perf_counter()
        completion = await model.prepare(inquiry, sink, timing)
        self._begin_work(completion)
        completion.when_made = self._count_used
        lengths = completion.prompt_lengths or [completion.prompt_bytes // BYTES_OF_TOKEN]
        await self._reserve(lengths, request.limit, request.choices)
        # What is left of it is as long as the context at most.
        self._free_body()
        prepared = timing.prepared = time.perf_counter()
        usage = completion.usage
        self._trace.prepared(usage.prompt if usage is not None else None, begun, prepared)
        metrics.preparing.observe(prepared - begun)
        self._writer.when_writable = completion.resume
        stream: RunningStream | None = None
        if wish is not None and numbered is not None:
            stream = await self._begin_stream(wish, model, completion, numbered)
        if request.streams:
            # Its headers are known from here on.
            self._shared.keep_alive.add(self._writer)
        if stream is None:
            await model.begin(completion)
        else:
            await stream.sent.wait()
        timing.sent = time.perf_counter()
        metrics.queue.observe(timing.sent - prepared)
        self._trace.sent(completion.instances, prepared, timing.sent)

    def _goes_on_elsewhere(self) -> bool:
        return isinstance(self._work, RunningStream) and self._work.is_logged

    def _end_recording(self) -> None:
        if isinstance(self._work, RunningStream):
            # Its engine works on without its client: the same request is not to run beside it.
            self._work.when_done(super()._end_recording)
        else:
            super()._end_recording()

    async def _begin_stream(
        self, wish: _Wish, model: OpenModel, completion: Completion, sink: NumberedSink
    ) -> RunningStream | None:
        """Have a request carried out whether its client stays or not; None where that cannot be,
        which the answer says."""
        streams, caller, context = self._shared.resumable, self._caller, self._context
        assert context is not None
        try:
            if completion.why_not_elsewhere:
                raise DynbusError(completion.why_not_elsewhere)
            if self._admission is not None:
                await self._admission.begin_stream()
            key = log_key(caller.tenant, caller.request_id)
            if self._tally is not None and self._shared.usage is not None:
                self._shared.usage.mark(self._tally, key)
            begun = Begun(
                streams.store.me,
                self._path,
                wish.body,
                caller.request_id,
                wish.clock.at,
                self._shared.settings.request_timeout,
                wish.seed,
                wish.keeps,
            )
            log = await streams.begin(key, begun, caller.tenant)
        except DynbusError as error:
            wish.numbers.stop()
            # Nobody runs it, who would do that.
            sink.settle = None
            self._writer.add_headers(_refused(str(error)))
            return None
        stream = RunningStream(
            streams.store,
            key,
            caller.tenant,
            log,
            completion,
            sink,
            wish.clock,
            model.begin,
            context,
            streams.count,
            self._cut,
            streams.left,
        )
        self._writer.add_headers({RESUMABLE: "1"})
        streams.start(stream)
        # It is the stream's from now on.
        self._work, self._context = stream, None
        return stream


def _refused(why: str) -> dict[str, str]:
    # A header has no line ends, and nothing beyond ASCII everywhere.
    printable = "".join(sign if " " <= sign <= "~" else " " for sign in why)
    return {RESUMABLE: "0", RESUMABLE_REASON: printable[:200]}


class ResponsesExchange(CompletionExchange):
    """A request for a response, which may go on from one that is kept."""

    def __init__(
        self, shared: Shared, path: str, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        super().__init__(ResponsesApi(), shared, path, caller, scope, receive, send)

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        return partial(self._look_up, data)

    async def _look_up(self, data: bytes) -> None:
        """Answer it with what it names of those before it."""
        self._api = api = await self._shared.response_api(
            self._caller.tenant, data, self._take_kept
        )
        read, is_long = super()._read, api.goes_on or len(data) > LONG_BODY
        answer = await self._aside(read, data) if is_long else read(data)
        await answer()
