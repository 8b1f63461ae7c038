"""One request over HTTP and its answer: what all of them have in common, whatever is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Final, Literal, ParamSpec, TypeAlias, TypeVar

import anyio
import anyio.abc
import msgspec

from dynbus import (
    Cancelled,
    Context,
    DeadlineExceeded,
    Draining,
    DynbusError,
    NoInstances,
    Overloaded,
    PayloadTooLarge,
    PermissionDenied,
    Unavailable,
)
from dynbus.kvrouter import requests as routed
from dynbus.llm.answers import Usage
from dynbus.llm.generation import Session
from dynbus.llm.models.card import ModelType
from dynbus.llm.openai.api import salted
from dynbus.llm.openai.errors import (
    BodyTimeout,
    ErrorAnswer,
    RateLimited,
    UnknownEncoding,
    status_of,
)
from dynbus.llm.pipeline.open_model import OpenModel
from dynbus.llm.pipeline.serving import RequestTiming
from dynbus.llm.resumable.running import RunningStream
from dynbus.llm.tenants.admission import Admission
from dynbus.llm.tenants.usage import Payer, Tally
from dynbus.spi import describe_exception, monotonic

from . import idempotency
from .content import Content
from .idempotency import MAX_ANSWERS, Recording, digest_of
from .metrics import ModelMetrics
from .shared import Caller, Shared, routed_session
from .tracing import Operation, Work
from .writer import AnswerWriter, Send, TellsErrors, raw_headers

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

ABORT: Final = "dynbus.abort"
"""The extension of a scope that drops the connection; of `LimitedProtocol`."""
KNOWN: Final = "dynbus.known"
"""The extension that says that who sends on the connection has a key; see `Strangers`."""
WRITE: Final = "dynbus.write"
"""The extension that writes a piece of an answer at once; see `AnswerWriter`."""


LONG_BODY: Final = 16 * 1024
"""Bytes from which on a body is read in a thread, one at a time and those of tenants in turn: read
on the event loop, many that come at once would be one long turn of it."""


_ENCODINGS: Final = {"content-encoding": "identity", "transfer-encoding": "chunked"}
"""The headers that say how a body is encoded, and what of it is understood."""


_RECORDED: Final = (
    "prompt_tokens",
    "completion_tokens",
    "instances",
    "prepared_ms",
    "held_ms",
    "sent_ms",
    "first_token_ms",
    "end_ms",
    "inter_token_ms",
    "error",
)
"""The fields of a request's log that are in the flight."""

Station: TypeAlias = Literal["places", "limits", "body", "model", ""]
"""The part of a front end that lets a request go on or not: its places, the limits of tenants, the
room for bodies, or the wait for a model; empty behind them all."""

_NOT_ADMITTED: Final = (
    DeadlineExceeded,
    Draining,
    NoInstances,
    Overloaded,
    PermissionDenied,
    Unavailable,
)
"""The errors of requests that might have been served otherwise, or at another time."""

LONG_HOLD: Final = 0.001
"""Seconds from which on it is told that a request has waited for its model."""

_REFUSALS: Final = frozenset((400, 404, 413, 422, 429))
"""The statuses of what engines refuse: where nothing came before, nothing was used."""


def abort(scope: Scope) -> None:
    """Drop the connection of a request."""
    extensions: Mapping[str, Any] = scope.get("extensions") or {}
    drop: Callable[[], object] | None = extensions.get(ABORT)
    if drop is not None:
        drop()


class HungUp(Exception):
    """Raised when the client has left before its request was there."""


class Exchange(ABC):
    """One request and its answer.

    A subclass says in `_read` what its body asks for, and in what that returns how it is answered:
    through `_writer`, with a model that `_ask_for` notes.
    """

    def __init__(
        self, shared: Shared, path: str, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._shared = shared
        self._path = path
        self._scope = scope
        self._receive = receive
        self._send = send
        self._caller = caller
        self._timing = RequestTiming(time.perf_counter())
        self._trace = shared.tracing.begin(scope["method"], path, self._caller.headers)
        # The model that it asks for, which need not be one; and once it is ready.
        self._asked = self._model = ""
        self._recording: Recording | None = None
        self._admission: Admission | None = None
        self._session: Session | None = None
        self._tally: Tally | None = None
        self._is_refused = False
        self._station: Station = "places"
        # Seconds in which its model was waited for.
        self._model_wait = 0.0
        # Tokens of its prompts, as far as they are known before an engine counts them.
        self._prompt = 0
        # What a stream is told while nothing comes of it.
        self._keep_alive = b""
        self._writer = self._make_writer(None)
        self._work: Work | None = None
        self._context: Context | None = None
        self._metrics: ModelMetrics | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        # How many of them have not ended.
        self._working = 0
        self._content: Content | None = None
        # Bytes of the room for bodies that it has, and whether it waits for them.
        self._room = 0
        self._waits_for_room = False
        # Bytes that were read of kept responses and take no room yet.
        self._kept = 0

    @abstractmethod
    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        """Read a body; returns the function that answers it.

        Raises:
            BadRequest: it is no such request, or asks for what is not done here.
        """

    @abstractmethod
    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        """The answer to an error that came before any other answer."""

    async def run(self) -> None:
        """Answer it, whatever happens."""
        shared, timing = self._shared, self._timing
        has_place = False
        shared.metrics.in_flight += 1
        try:
            shared.take_place(self._caller)
            has_place = True
            self._admission = shared.admission(self._caller)
            if self._admission is not None:
                self._station = "limits"
                await self._admission.enter()
                self._writer.add_headers(self._admission.headers)
            self._station = "body"
            data = await self._body()
            self._station = ""
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._start(self._answer, data)
                # It may be long, and its answer take an hour.
                del data
                try:
                    while (await self._receive())["type"] != "http.disconnect":
                        pass
                except asyncio.CancelledError:
                    self._stop()
                finally:
                    self._tasks = None
                    # To cancel nothing takes 20 us.
                    if self._working:
                        tasks.cancel_scope.cancel()
        except asyncio.CancelledError:
            # Its body is not there yet.
            self._stop()
        except HungUp:
            pass
        except DynbusError as error:
            self._writer.end(error)
        finally:
            shared.metrics.in_flight -= 1
            if has_place:
                shared.places.give_back(self._caller.tenant)
            self._free_body()
            shared.keep_alive.remove(self._writer)
            if not self._writer.has_ended and self._context is not None:
                # Not a stop, which handlers may take their time for: nobody is left to read.
                self._context.kill()
            if self._work is not None:
                self._work.cancel()
            if not self._writer.has_ended:
                # Nobody reads it; it is what logs and metrics say.
                self._writer.has_ended = True
                self._writer.error = Cancelled("the client left")
            if self._recording is not None:
                self._end_recording()
            if self._admission is not None:
                self._admission.leave()
            self._settle()
            timing.last = time.perf_counter() if timing.first is None else timing.last
            self._tell()
            # Its traceback holds all of the request, and this: garbage that only a collection
            # would find. So it is with the writer. Collections took an eighth of all answers' time.
            self._writer.error = None
            self._writer.release()

    async def _answer_again(self, data: bytes) -> bool:
        """Answer as before where this very request was answered; otherwise keep what is answered
        now, if its client has a key for that.

        Returns:
            Whether it was answered.

        Raises:
            BadRequest: the key is none, or was sent with another request.
            IdempotencyConflict: the first such request is still being answered.
        """
        key = self._caller.headers.get(idempotency.HEADER)
        if key is None or self._scope["method"] != "POST":
            return False
        # A resumable stream has other events.
        parts = self._path.encode(), b"%d" % self._caller.wants_resumable, data
        is_long = len(data) > LONG_BODY
        digest = await self._aside(digest_of, *parts) if is_long else digest_of(*parts)
        answer = self._shared.kept_answers.begin(self._caller.tenant, key, digest, monotonic())
        if answer.ended_at is not None:
            self._writer.repeat(answer.messages, idempotency.REPEATED)
            return True
        self._recording = answer
        self._writer = self._make_writer(None)
        return False

    async def _aside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what takes a while in a thread, when it is the tenant's turn."""
        call = partial(function, *args, **kwargs)
        return await self._shared.reading.run(call, self._caller.tenant)

    async def _send_recorded(self, message: MutableMapping[str, Any]) -> None:
        # Who is told the answer again is told all of it at once.
        if self._recording is not None and message.get("body") != self._keep_alive:
            self._recording.add(message)
        await self._send(message)

    def _end_recording(self) -> None:
        """Keep the answer for who asks again, or have the key free for another one."""
        well = self._writer.error is None and self._writer.status == 200
        tenant, key = self._caller.tenant, self._caller.headers[idempotency.HEADER]
        most = self._admission.kept_answers if self._admission is not None else None
        self._shared.kept_answers.finish(
            tenant, key, monotonic(), well=well, most=MAX_ANSWERS if most is None else most
        )

    def _settle(self) -> None:
        """Have counted what its tenant has used, once nothing more is made for it here."""
        error = self._writer.error
        self._is_refused = error is not None and status_of(error) in _REFUSALS
        if isinstance(self._work, RunningStream):
            # Its engine works on without its client.
            self._work.when_done(self._settle_now)
        else:
            self._settle_now()

    def _settle_now(self) -> None:
        if self._admission is not None:
            self._admission.settle(self._used())
        work, usage = self._work, self._shared.usage
        if self._tally is not None and usage is not None:
            # The front end that goes on with a stream counts what is not counted yet.
            is_taken = isinstance(work, RunningStream) and work.is_taken
            usage.end(self._tally, None if is_taken else self._used())

    def _count_used(self) -> None:
        """Have all that it has come to written as used, before its client is told the end."""
        if self._tally is not None and self._shared.usage is not None:
            self._shared.usage.count(self._tally, self._used())

    def _used(self) -> Usage:
        """The tokens that it has come to; where nobody counted, those that its prompts were taken
        to have, and the pieces of its answer."""
        work, timing = self._work, self._timing
        if work is None or not (timing.count or (work.instances and not self._is_refused)):
            # No engine had it, or it was refused there.
            return Usage(0, 0)
        return work.usage or Usage(self._prompt, timing.count)

    def _begin_work(self, work: Work) -> None:
        """Have engines' work for it counted for its tenant, and cancelled with it."""
        self._work = work
        if self._shared.usage is not None:
            self._tally = self._tally or Tally(self._payer)
            self._shared.usage.begin(self._tally, work)

    @property
    def _payer(self) -> Payer:
        return Payer(self._caller.tenant, self._caller.holder.key, self._model)

    def _stop(self) -> None:
        """Answer that the server stops, which cancels requests that have had their grace.

        For who raises that instead of taking it, it writes an answer of its own.
        """
        self._end(Draining("the front end stops; ask again"))
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()

    async def _body(self) -> bytes:
        """The body of the request.

        Raises:
            PayloadTooLarge, BodyTimeout, UnknownEncoding: it is not taken.
            Overloaded: the long bodies of its tenant leave no room for it.
            HungUp: the client is gone.
        """
        for name, known in _ENCODINGS.items():
            given = self._caller.headers.get(name, known)
            if given.strip().lower() not in ("", known):
                raise UnknownEncoding(
                    f"a body with {name.title()}: {given[:80]} is not understood; send it as it is",
                    started=False,
                )
        limit = self._shared.settings.max_body_bytes
        length = self._caller.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(int(length))
        expected = int(length) if length.isdigit() else limit
        timeout = self._shared.settings.body_timeout
        pieces: list[bytes] = []
        size, more = 0, True
        try:
            # Nearly every body is there already: anyio's scope takes 10 us, and this one 4.
            async with asyncio.timeout(timeout) as clock:
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise HungUp
                    piece: bytes = message.get("body", b"")
                    size += len(piece)
                    if size > limit:
                        raise self._too_large(size)
                    pieces.append(piece)
                    more = message.get("more_body", False)
                    if size > LONG_BODY and not self._room:
                        await self._take_room(max(expected, size))
                        clock.reschedule(asyncio.get_running_loop().time() + timeout)
        except TimeoutError:
            if self._waits_for_room:
                raise Overloaded(
                    f"other long bodies of yours were read for {timeout:g} s; ask again later",
                    retry_after=1.0,
                    started=False,
                ) from None
            raise BodyTimeout(f"the body did not arrive within {timeout:g} s") from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _take_room(self, size: int) -> None:
        """Wait until the bodies of its tenant leave room for this one: nothing is read of the
        connection meanwhile."""
        self._waits_for_room = True
        await self._shared.bodies.reserve(self._caller.tenant, size)
        self._waits_for_room, self._room = False, size

    def _take_kept(self, size: int) -> None:
        """Have what was read of kept responses count as its body does.

        Raises:
            Overloaded: the bodies of its tenant leave no room for it, which is not waited for: it
                has some already, that others may wait for.
        """
        self._kept += size
        more = self._kept if self._kept > LONG_BODY else 0
        if not more:
            return
        if not self._shared.bodies.try_reserve(self._caller.tenant, more):
            raise Overloaded(
                "other long requests of yours leave no room for the responses that this one goes "
                "on from; ask again later",
                retry_after=1.0,
                started=False,
            )
        self._kept, self._room = 0, self._room + more

    def _free_body(self) -> None:
        """Have the room of its body for others: it is no longer kept."""
        size, self._room = self._room, 0
        if size:
            self._shared.bodies.give_back(self._caller.tenant, size)

    def _too_large(self, size: int) -> PayloadTooLarge:
        limit = self._shared.settings.max_body_bytes
        return PayloadTooLarge(
            f"the body has {size} bytes or more, and at most {limit} are taken (--max-body)",
            started=False,
        )

    def _start(self, work: Callable[[T], Awaitable[None]], subject: T) -> None:
        """Have a task work while its client is waited for to leave; none once it has left."""
        if self._tasks is not None:
            self._working += 1
            self._tasks.start_soon(self._work_on, work, subject)

    async def _work_on(self, work: Callable[[T], Awaitable[None]], subject: T) -> None:
        try:
            await work(subject)
        finally:
            self._working -= 1

    async def _answer(self, data: bytes) -> None:
        """Answer a body, also where that fails."""
        try:
            if await self._answer_again(data):
                return
            is_long = len(data) > LONG_BODY
            answer = await self._aside(self._read, data) if is_long else self._read(data)
            await answer()
        except DynbusError as error:
            self._end(error)
        except Exception as error:
            logger.exception("a request to %s failed", self._path)
            self._end(DynbusError(f"the front end failed: {describe_exception(error)}"))
        finally:
            self._free_body()

    async def _ask_for(
        self,
        model: str,
        wanted: ModelType,
        priority: int | None = None,
        operation: Operation | None = None,
    ) -> tuple[OpenModel, ModelMetrics]:
        """The model that is asked, once it is ready, and its figures: the wait for it and its
        calls have the request's id, deadline, tenant and trace.

        Args:
            wanted: what it is asked for.
            priority: that the request states; None for none.
            operation: for the trace.

        Raises:
            DynbusError: it cannot be asked; see `Models.get`.
        """
        shared = self._shared
        self._asked = model
        if self._admission is not None:
            self._station = "limits"
            self._admission.check(model, priority)
        self._context = context = self._enter_context(self._caller.request_id, priority or 0)
        self._station, began = "model", time.perf_counter()
        try:
            opened = await shared.models.get(model, wanted, shared.models_of(self._caller))
        finally:
            self._model_wait = time.perf_counter() - began
        self._station = ""
        if operation is not None:
            self._trace.model_asked(operation)
        context.set_trace_headers(self._trace.fields)
        shared.resumable.make_way(self._timing)
        self._model = model
        self._metrics = shared.metrics.of(model)
        return opened, self._metrics

    @property
    def _default_priority(self) -> int:
        """See `Admission.default_priority`."""
        return 0 if self._admission is None else self._admission.default_priority

    async def _reserve(
        self, prompts: Sequence[int], most: int | None = None, outputs: int = 0
    ) -> None:
        """Take of the tenant's limits what a request may come to; see `Admission.reserve`."""
        self._prompt = sum(prompts)
        if self._admission is not None:
            self._station = "limits"
            await self._admission.reserve(prompts, most, outputs)
            self._station = ""
            self._writer.add_headers(self._admission.token_headers)

    @property
    def _metadata(self) -> Mapping[str, str]:
        """The metadata that reaches the engines' handlers."""
        metadata, session = self._caller.metadata, self._session
        if session is None:
            return metadata
        name = routed_session(self._caller.tenant, session.name)
        return {**metadata, routed.SESSION_KEY: name}

    def _enter_context(self, request_id: str, priority: int) -> Context:
        """The context of all that this task does from here on: it has a request's id, its time, its
        tenant and its trace."""
        context = Context(
            request_id,
            deadline=monotonic() + self._shared.settings.request_timeout,
            metadata=self._metadata,
            priority=priority,
            trace_headers=self._trace.fields,
        )
        context.enter()
        return context

    def _for_engines(self, body: bytes) -> msgspec.Raw:
        """A body for engines that take text; see `salted`."""
        return salted(body, self._caller.tenant)

    def _end(self, error: DynbusError) -> None:
        if self._work is not None:
            self._work.cancel(error)
        if self._writer.status and self._goes_on_elsewhere():
            self._cut(error)
        else:
            self._writer.end(error)

    def _goes_on_elsewhere(self) -> bool:
        """True if its client can go on reading at another front end."""
        return False

    def _cut(self, error: DynbusError | None = None) -> None:
        """Drop the connection without an end of the answer: its client goes on elsewhere."""
        if self._writer.has_ended:
            return
        self._writer.has_ended = True
        self._writer.error = error or Cancelled("the stream goes on at another front end")
        abort(self._scope)

    def _make_writer(self, stream: TellsErrors | None) -> AnswerWriter:
        fields = self._trace.fields
        headers = self._caller.id_headers
        if "traceparent" in fields:
            headers.append((b"traceparent", fields["traceparent"].encode()))
        if self._admission is not None:
            headers += raw_headers(self._admission.headers)
        extensions: Mapping[str, Any] = self._scope.get("extensions") or {}
        # What is written at once passes `send` by, and would not be kept.
        is_recorded = self._recording is not None
        return AnswerWriter(
            self._send_recorded if is_recorded else self._send,
            headers,
            self._caller.request_id,
            refusal=self._refusal,
            stream=stream,
            finish_sending=self._finish_sending,
            timeout=self._shared.settings.write_timeout,
            keep_alive=self._keep_alive,
            write_piece=None if is_recorded else extensions.get(WRITE),
        )

    def _finish_sending(self, send_rest: Callable[[], Awaitable[bool]]) -> None:
        self._shared.metrics.blocked += 1
        self._start(self._send_rest, send_rest)

    async def _send_rest(self, send_rest: Callable[[], Awaitable[bool]]) -> None:
        """Write what waits for a client that does not read, unless it does so for too long."""
        if await send_rest():
            return
        logger.info("request %s: its client does not read", self._caller.request_id)
        abort(self._scope)

    def _tell(self) -> None:
        """Tell metrics, trace and log how it went."""
        shared, timing, writer = self._shared, self._timing, self._writer
        status = writer.final_status
        usage = self._work.usage if self._work is not None else None
        now = time.perf_counter()
        if self._metrics is not None:
            self._metrics.duration.observe(now - timing.began)
            if timing.first is not None:
                self._metrics.time_to_first_token.observe(timing.first - timing.began)
        shared.metrics.count(self._path, self._model, status)
        if usage is not None:
            shared.metrics.count_tokens(self._model, self._caller.tenant, usage)
        self._trace.ended(status, writer.error, timing, self._work, self._content)
        is_logged = logger.isEnabledFor(logging.INFO)
        is_recorded = shared.models.is_recorded
        if not is_logged and not is_recorded:
            return
        fields = self._log_fields(now)
        if is_recorded:
            self._record(status, fields)
        if is_logged:
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            asked = {"method": self._scope["method"], "path": self._path, "status": status}
            logger.info("%s %s %s %s", *asked.values(), text, extra={**asked, **fields})

    def _record(self, status: int, fields: Mapping[str, str | int | float]) -> None:
        """Have it in the flight, without names and texts."""
        known = {name: fields[name] for name in _RECORDED if name in fields}
        caller, error = self._caller, self._writer.error
        if error is not None and (why := self._why_not_admitted(error)):
            known["why"] = why
        if isinstance(error, Overloaded) and error.retry_after:
            known["retry_after"] = round(error.retry_after, 3)
        model = self._model or self._asked
        self._shared.models.record(
            model, self._path, caller.request_id, caller.tenant, status=status, **known
        )

    def _why_not_admitted(self, error: DynbusError) -> str:
        """The limit or the part that did not admit it; empty where it ended for another reason."""
        if isinstance(error, RateLimited) and error.limit:
            return error.limit
        if self._station:
            return self._station if isinstance(error, _NOT_ADMITTED) else ""
        if isinstance(error, Overloaded) and self._timing.first is None:
            return "instance" if error.hop else "router"
        return ""

    def _log_names(self) -> dict[str, str]:
        """The further names of its request in the log."""
        return {}

    def _log_fields(self, now: float) -> dict[str, str | int | float]:
        """The logged fields of a request: its text only where that is asked for."""
        timing, writer, caller = self._timing, self._writer, self._caller
        fields: dict[str, str | int | float] = {
            "request_id": caller.request_id,
            **self._log_names(),
        }
        if caller.tenant:
            fields["tenant"] = caller.tenant
        if self._model:
            fields["model"] = self._model
        if self._work is not None:
            usage = self._work.usage
            if usage is not None:
                fields["prompt_tokens"] = usage.prompt
                fields["completion_tokens"] = usage.completion
            instances = self._work.instances
            if instances:
                fields["instances"] = ",".join(instances)
        began = timing.began
        if self._model_wait >= LONG_HOLD:
            fields["held_ms"] = round(self._model_wait * 1000, 1)
        for name, at in (
            ("prepared", timing.prepared),
            ("sent", timing.sent),
            ("first_token", timing.first),
            ("end", now),
        ):
            if at is not None:
                fields[f"{name}_ms"] = round((at - began) * 1000, 1)
        mean_gap = timing.mean_gap
        if mean_gap is not None:
            fields["inter_token_ms"] = round(mean_gap * 1000, 2)
        if writer.error is not None:
            fields["error"] = writer.error.code
        if self._content is not None:
            fields["input"] = self._content.input_messages
            fields["output"] = self._content.output_messages
        return fields
