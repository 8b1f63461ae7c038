"""`GET /v1/streams/REQUEST`: a stream is resumed, at whichever front end."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

import anyio
import msgspec

from dynbus import Context, DynbusError, Unavailable
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.api import Api, prioritized
from dynbus.llm.openai.errors import (
    BadRequest,
    ErrorAnswer,
    ModelNotFound,
    StreamGone,
    StreamNotFound,
    answer_of,
)
from dynbus.llm.openai.requests import ChatRequest
from dynbus.llm.pipeline.open_model import Inquiry, OpenModel
from dynbus.llm.pipeline.serving import RequestTiming, Sink, TokenCompletion
from dynbus.llm.resumable.events import (
    RESUMED,
    EventNumbers,
    NumberedErrors,
    NumberedSink,
    number_of,
    numbered_ids,
)
from dynbus.llm.resumable.records import (
    ASK_INTERVAL,
    Begun,
    Next,
    Owned,
    OwnerWatch,
    Piece,
    StreamLog,
    log_key,
    next_step,
)
from dynbus.llm.resumable.running import AnswerClock, RunningStream, stored_arrival, take_stored
from dynbus.llm.tenants.recording import UsageRecorder
from dynbus.llm.tenants.usage import Tally, Tokens
from dynbus.spi import StoredMessage, WrongLastSequence, monotonic

from .exchange import Exchange, Receive, Scope
from .shared import Caller, Shared
from .writer import Send

STREAMS: Final = "/v1/streams/"
"""The beginning of the paths of streams; the rest is the id of the request."""

LABEL: Final = "/v1/streams/{request}"
"""The label under which all of them are counted."""

RESPONSES: Final = "/v1/responses"

LAST_EVENT_ID: Final = "last-event-id"

SILENCE: Final = 10.0
"""Seconds without a record after which a log is not waited for any more, as long as it has not told
all that it held: a reader of JetStream that has to begin anew takes as long at most."""

WATCH_INTERVAL: Final = 0.1
"""Seconds between two looks at what follows from a log of which nothing new has come: whether its
owner has to be asked, or has answered."""


class _Held:
    """Events that are made before it is known whether they are told: a sink.

    Attributes:
        error: that it ended with.
    """

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._ended = False
        self.error: DynbusError | None = None

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Keep chunks."""
        self._chunks += chunks
        return True

    def end(self, error: DynbusError | None) -> None:
        """Keep the end."""
        self._ended, self.error = True, error

    def release(self, sink: NumberedSink, to: Sink) -> None:
        """Tell all of it, and what follows at once."""
        sink.to = to
        to.write([RESUMED, *self._chunks])
        if self._ended:
            to.end(self.error)


class _Rebuilt:
    """The answer as it comes out of the log.

    Attributes:
        items: what came of each prompt.
    """

    def __init__(
        self,
        begun: Begun,
        model: OpenModel,
        completion: TokenCompletion,
        sink: NumberedSink,
        clock: AnswerClock,
        priority: int,
    ) -> None:
        self.begun = begun
        self.model = model
        self.completion = completion
        self.sink = sink
        self.clock = clock
        self.priority = priority
        self.items: dict[int, list[bytes]] = {}

    def add(self, piece: Piece) -> None:
        """Take what came next."""
        self.clock.at = piece.at
        self.items.setdefault(piece.part, []).extend(piece.items)
        take_stored(self.completion, piece.part, stored_arrival(piece), time.perf_counter())


class StreamExchange(Exchange):
    """Somebody goes on reading a stream.

    Args:
        apis: the interfaces, by path.
        stream: the id of its request.
    """

    def __init__(
        self,
        apis: Mapping[str, Api],
        stream: str,
        shared: Shared,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        super().__init__(shared, LABEL, caller, scope, receive, send)
        self._apis = apis
        self._stream = stream
        self._key = log_key(caller.tenant, stream)
        self._log = StreamLog(caller.tenant)
        self._watch = OwnerWatch()
        self._wrote_at = monotonic()
        # Each with whether its record was written since this exchange began to read.
        self._messages: deque[tuple[StoredMessage, bool]] = deque()
        self._news = asyncio.Event()
        self._is_caught_up = False
        self._held: _Held | None = _Held()
        self._after = 0

    def _log_names(self) -> dict[str, str]:
        # As it is in the path: the client chooses it.
        return {"stream": quote(self._stream[:128])}

    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        return answer_of(error, request_id)

    def _goes_on_elsewhere(self) -> bool:
        return not isinstance(self._work, RunningStream) or self._work.is_logged

    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        self._after = number_of(self._caller.headers.get(LAST_EVENT_ID, ""), self._stream)
        return self._go_on

    async def _go_on(self) -> None:
        store = self._shared.resumable.store
        await store.make_ready()
        try:
            async with store.reading(self._key, self._arrived, self._caught_up, self._lost):
                rebuilt = await self._follow()
                if rebuilt is not None:
                    # At once: the end of reading takes a while, in which others ask who goes on.
                    self._own(rebuilt)
        finally:
            store.forget(self._watch)

    # Reading the log --------------------------------------------------------------------------

    def _arrived(self, message: StoredMessage) -> None:
        self._messages.append((message, self._is_caught_up))
        self._news.set()

    def _caught_up(self) -> None:
        self._is_caught_up = True
        self._news.set()

    def _lost(self) -> None:
        self._log.over = "the server of its log was started again"
        self._news.set()

    async def _follow(self) -> _Rebuilt | None:
        """Tell what the log holds while its owner lives; the answer as far as it came where it is
        for this front end to go on with it."""
        rebuilt: _Rebuilt | None = None
        while True:
            self._news.clear()
            rebuilt = await self._receive_messages(rebuilt)
            if not self._is_caught_up and not self._log.over:
                await self._catch_up()
                continue
            step = next_step(
                self._log,
                is_complete=rebuilt is not None and rebuilt.sink.is_over,
                owner_lives=self._watch.lives,
                now=self._shared.resumable.store.server_time(),
            )
            if step is Next.UNKNOWN:
                raise StreamNotFound(
                    f"there is no stream {self._stream[:200]!r} of this key", started=False
                )
            if step is Next.GONE or rebuilt is None:
                why = self._log.over or "its time is over"
                raise StreamGone(f"the stream cannot be resumed: {why}", started=False)
            self._check_number(rebuilt)
            if step is Next.TAKE and await self._takes_over(rebuilt):
                self._release(rebuilt)
                return rebuilt
            if step is not Next.ASK:
                self._release(rebuilt)
            if step is Next.WHOLE:
                return None
            self._ask()
            with anyio.move_on_after(WATCH_INTERVAL):
                await self._news.wait()

    async def _catch_up(self) -> None:
        """Wait for more of what the log held at the beginning.

        Raises:
            Unavailable: the bus does not tell it.
        """
        with anyio.move_on_after(SILENCE):
            await self._news.wait()
        if not self._news.is_set():
            raise Unavailable(
                f"the bus has told nothing of the log of the stream for {SILENCE:g} s: ask again",
                started=False,
            )

    async def _receive_messages(self, rebuilt: _Rebuilt | None) -> _Rebuilt | None:
        """Take the messages that have come."""
        while self._messages:
            message, is_new = self._messages.popleft()
            owner = self._log.owner
            pieces = self._log.read(message.data, message.sequence, message.time)
            if self._log.owner != owner:
                self._watch_anew()
            elif is_new:
                self._watch.wrote()
            self._wrote_at = monotonic()
            begun = self._log.begun
            if rebuilt is None and begun is not None and not self._log.over:
                rebuilt = await self._rebuild(begun)
            for piece in pieces:
                if rebuilt is not None:
                    rebuilt.add(piece)
            if rebuilt is not None and rebuilt.sink.settle is not None:
                await rebuilt.sink.settle(is_own=False)
            # The streams of others come between.
            await asyncio.sleep(0)
        return rebuilt

    async def _rebuild(self, begun: Begun) -> _Rebuilt:
        """The answer before anything has come of it."""
        responses, api = self._shared.responses, self._apis[begun.path]
        if begun.path == RESPONSES:
            # As it was begun: a front end of 0.1.0, or with --forget-responses, keeps none.
            api = await self._shared.response_api(
                self._caller.tenant, begun.body, self._take_kept, may_keep=begun.keeps
            )
        asked = api.read(begun.body)
        if asked.request.priority is None and (priority := self._default_priority):
            asked = prioritized(asked, priority)
        clock = AnswerClock(begun.created)
        numbers = EventNumbers(begun.request_id, self._after)
        answer_id = begun.seed if begun.keeps else begun.request_id
        format = asked.format(answer_id, now=clock)
        sink = NumberedSink(numbers, self._held)
        to = sink if responses is None else responses.sink(sink, format, self._caller.tenant)
        self._keep_alive = api.keep_alive
        self._writer = self._make_writer(NumberedErrors(format, numbers, begun.request_id))
        request = asked.request
        wanted = ModelType.Chat if isinstance(request, ChatRequest) else ModelType.Completions
        # An operator cancels the stream, and not one reading of it.
        self._enter_context(begun.request_id, request.priority or 0)
        try:
            model = await self._shared.models.get(request.model, wanted | ModelType.Backend)
        except ModelNotFound:
            # This front end never saw it, and there it was when the stream was begun.
            raise Unavailable(
                f"the model {request.model} of the stream has no instance at present: ask again",
                started=False,
            ) from None
        self._model = request.model
        self._metrics = self._shared.metrics.of(request.model)
        inquiry = Inquiry(
            request,
            msgspec.Raw(b"{}"),
            format,
            self._caller.tenant or None,
            asked.shortens,
            numbered_ids(begun.seed),
        )
        completion = await model.prepare(inquiry, to, RequestTiming(time.perf_counter()))
        self._free_body()
        if not isinstance(completion, TokenCompletion):
            raise StreamGone("the stream cannot be resumed: its model takes text now")
        return _Rebuilt(begun, model, completion, sink, clock, request.priority or 0)

    def _check_number(self, rebuilt: _Rebuilt) -> None:
        count = rebuilt.sink.numbers.count
        if self._held is not None and self._held.error is not None:
            # It is an event of its own, which is numbered when it is told.
            count += 1
        if self._held is not None and self._after > count:
            raise BadRequest(
                f"Last-Event-ID: the stream has {count} events so far, and not {self._after}",
                param="Last-Event-ID",
            )

    def _release(self, rebuilt: _Rebuilt) -> None:
        """Begin to tell it, once it is known that it is told."""
        held, self._held = self._held, None
        if held is None:
            return
        self._shared.resumable.count("followed")
        self._shared.keep_alive.add(self._writer)
        held.release(rebuilt.sink, self._writer)

    # Its owner --------------------------------------------------------------------------------

    def _ask(self) -> None:
        now, log = monotonic(), self._log
        if log.owner and self._watch.due(now, is_silent=now - self._wrote_at >= ASK_INTERVAL):
            self._shared.resumable.store.ask(self._key, log.owner, self._watch)

    def _watch_anew(self) -> None:
        """Know nothing yet of its present owner."""
        self._shared.resumable.store.forget(self._watch)
        self._watch = OwnerWatch()

    async def _takes_over(self, rebuilt: _Rebuilt) -> bool:
        streams, usage = self._shared.resumable, self._shared.usage
        if usage is not None:
            counted = await self._counted_before(usage, rebuilt)
            self._tally = Tally(self._payer, counted)
            # The front end that goes on with it after this one has to know.
            usage.mark(self._tally, self._key)
        try:
            await streams.claim(self._key, self._log, Owned(streams.store.me))
        except WrongLastSequence:
            if usage is not None and self._tally is not None:
                usage.end(self._tally, None)
                self._tally = None
            # Its owner lives, or another front end was faster: what that wrote comes.
            self._watch_anew()
            return False
        streams.count("taken_over")
        return True

    async def _counted_before(self, usage: UsageRecorder, rebuilt: _Rebuilt) -> Tokens:
        """The tokens of the stream that front ends before this one have counted."""
        owner = self._log.owner
        # One that has handed it on has counted all of it.
        known = await usage.counted_of(self._caller.tenant, owner, self._key) if owner else None
        used = rebuilt.completion.usage
        return known or (Tokens() if used is None else Tokens.of(used))

    def _own(self, rebuilt: _Rebuilt) -> None:
        """Go on with it from here."""
        streams = self._shared.resumable
        begun, completion = rebuilt.begun, rebuilt.completion
        completion.go_on_after(rebuilt.items)
        if self._admission is not None and (usage := completion.usage) is not None:
            self._admission.go_on(usage)
        context = Context(
            begun.request_id,
            deadline=monotonic() + self._log.begun_at + begun.seconds - streams.store.server_time(),
            metadata=self._caller.metadata,
            priority=rebuilt.priority,
            trace_headers=self._trace.fields,
        )
        stream = RunningStream(
            streams.store,
            self._key,
            self._caller.tenant,
            self._log,
            completion,
            rebuilt.sink,
            rebuilt.clock,
            rebuilt.model.begin,
            context,
            streams.count,
            self._cut,
            streams.left,
        )
        self._begin_work(stream)
        completion.when_made = self._count_used
        self._writer.when_writable = completion.resume
        streams.start(stream)
