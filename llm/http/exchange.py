"""One request over HTTP and its answer: what all of them have in common, whatever is asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import anyio
import anyio.abc
import msgspec

from dynbus.bus.clock import monotonic
from dynbus.bus.context import Context, enter_context
from dynbus.bus.errors import (
    Cancelled,
    Draining,
    DynbusError,
    PayloadTooLarge,
    describe_exception,
)
from dynbus.llm.answers import AnswerFormat
from dynbus.llm.openai.errors import BodyTimeout, ErrorAnswer
from dynbus.llm.pipeline.serving import RequestTiming

from .content import Content
from .metrics import ModelMetrics
from .shared import Caller, Shared
from .tracing import Work
from .writer import AnswerWriter, Send

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

ABORT: Final = "dynbus.abort"
"""The extension of a scope that drops the connection; of `LimitedProtocol`."""
WRITE: Final = "dynbus.write"
"""The extension that writes a piece of an answer at once; see `AnswerWriter`."""


LONG_BODY: Final = 1024 * 1024
"""Bytes from which on a body is read in a thread."""


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
        self._trace = shared.tracing.begin("POST", path, self._caller.headers)
        self._model = ""
        self._writer = self._make_writer(None)
        self._work: Work | None = None
        self._context: Context | None = None
        self._metrics: ModelMetrics | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._content: Content | None = None

    @abstractmethod
    def _read(self, data: bytes) -> Callable[[], Awaitable[None]]:
        """What answers a body.

        Raises:
            BadRequest: it is no such request, or asks for what is not done here.
        """

    @abstractmethod
    def _refusal(self, error: DynbusError, request_id: str) -> ErrorAnswer:
        """How an error is answered before anything else was."""

    async def run(self) -> None:
        """Answer it, whatever happens."""
        shared, timing = self._shared, self._timing
        shared.metrics.in_flight += 1
        try:
            shared.check_room()
            data = await self._body()
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._answer, data)
                try:
                    while (await self._receive())["type"] != "http.disconnect":
                        pass
                except asyncio.CancelledError:
                    self._stop()
                finally:
                    self._tasks.cancel_scope.cancel()
        except asyncio.CancelledError:
            # Its body is not there yet.
            self._stop()
        except HungUp:
            pass
        except DynbusError as error:
            self._writer.end(error)
        finally:
            shared.metrics.in_flight -= 1
            if not self._writer.has_ended and self._context is not None:
                # Not a stop, which handlers may take their time for: nobody is left to read.
                self._context.kill()
            if self._work is not None:
                self._work.cancel()
            if not self._writer.has_ended:
                # Nobody reads it; it is what logs and metrics say.
                self._writer.has_ended = True
                self._writer.error = Cancelled("the client left")
            timing.last = time.perf_counter() if timing.first is None else timing.last
            self._tell()

    def _stop(self) -> None:
        """Answer that the server stops, which cancels whoever has had its grace.

        For who raises that instead of taking it, it writes an answer of its own.
        """
        self._end(Draining("the front end stops; ask again"))
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()

    async def _body(self) -> bytes:
        """The body of the request.

        Raises:
            PayloadTooLarge, BodyTimeout: it is not taken.
            HungUp: the client is gone.
        """
        limit = self._shared.settings.max_body_bytes
        length = self._caller.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise self._too_large(int(length))
        pieces: list[bytes] = []
        size, more = 0, True
        try:
            # Nearly every body is there already: anyio's scope takes 10 us, and this one 4.
            async with asyncio.timeout(self._shared.settings.body_timeout):
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
        except TimeoutError:
            raise BodyTimeout(
                f"the body did not arrive within {self._shared.settings.body_timeout:g} s"
            ) from None
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _too_large(self, size: int) -> PayloadTooLarge:
        limit = self._shared.settings.max_body_bytes
        return PayloadTooLarge(
            f"the body has {size} bytes or more, and at most {limit} are taken", started=False
        )

    async def _answer(self, data: bytes) -> None:
        """Answer a body, also where that fails."""
        try:
            # What is long takes a while, in which others have their turns.
            is_long = len(data) > LONG_BODY
            answer = await asyncio.to_thread(self._read, data) if is_long else self._read(data)
            await answer()
        except DynbusError as error:
            self._end(error)
        except Exception as error:
            logger.exception("a request to %s failed", self._path)
            self._end(DynbusError(f"the front end failed: {describe_exception(error)}"))

    def _ask_for(self, model: str, priority: int) -> ModelMetrics:
        """Note which model is asked, which is served, and make the calls for it inherit deadline,
        tenant and trace."""
        shared, caller = self._shared, self._caller
        self._model = model
        self._metrics = shared.metrics.of(model)
        self._context = Context(
            caller.request_id,
            deadline=monotonic() + shared.settings.request_timeout,
            metadata=caller.metadata,
            priority=priority,
            trace_headers=self._trace.fields,
        )
        enter_context(self._context)
        return self._metrics

    def _for_engines(self, body: bytes) -> msgspec.Raw:
        """A body for engines that take text: its salt is the tenant's, and never the client's."""
        tenant = self._caller.tenant
        if b"cache_salt" not in body and b"\\u" not in body and not tenant:
            return msgspec.Raw(body)
        fields: dict[str, Any] = msgspec.json.decode(body)
        fields.pop("cache_salt", None)
        if tenant:
            fields["cache_salt"] = tenant
        return msgspec.Raw(msgspec.json.encode(fields))

    def _end(self, error: DynbusError) -> None:
        if self._work is not None:
            self._work.cancel(error)
        self._writer.end(error)

    def _make_writer(self, stream: AnswerFormat | None) -> AnswerWriter:
        fields = self._trace.fields
        headers = self._caller.id_headers
        if "traceparent" in fields:
            headers.append((b"traceparent", fields["traceparent"].encode()))
        extensions: Mapping[str, Any] = self._scope.get("extensions") or {}
        return AnswerWriter(
            self._send,
            headers,
            self._caller.request_id,
            refusal=self._refusal,
            stream=stream,
            finish_sending=self._finish_sending,
            timeout=self._shared.settings.write_timeout,
            write_piece=extensions.get(WRITE),
        )

    def _finish_sending(self, send_rest: Callable[[], Awaitable[bool]]) -> None:
        self._shared.metrics.blocked += 1
        if self._tasks is not None:
            self._tasks.start_soon(self._send_rest, send_rest)

    async def _send_rest(self, send_rest: Callable[[], Awaitable[bool]]) -> None:
        """Write what waits for a client that does not read, unless it does so for too long."""
        if await send_rest():
            return
        logger.info("request %s: its client does not read", self._caller.request_id)
        extensions: Mapping[str, Any] = self._scope.get("extensions") or {}
        abort: Callable[[], object] | None = extensions.get(ABORT)
        if abort is not None:
            abort()

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
            shared.metrics.count_tokens(self._model, usage.prompt, usage.completion, usage.cached)
        self._trace.ended(status, writer.error, timing, self._work, self._content)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", self._log_line(status, now))

    def _log_line(self, status: int, now: float) -> str:
        """What is logged of a request: what it says only where that is asked for."""
        timing, writer, caller = self._timing, self._writer, self._caller
        words = [f"POST {self._path} {status}", f"request_id={caller.request_id}"]
        if caller.tenant:
            words.append(f"tenant={caller.tenant}")
        if self._model:
            words.append(f"model={self._model}")
        if self._work is not None:
            usage = self._work.usage
            if usage is not None:
                words.append(f"prompt_tokens={usage.prompt}")
                words.append(f"completion_tokens={usage.completion}")
            if self._work.instances:
                words.append(f"instances={','.join(self._work.instances)}")
        began = timing.began
        for name, at in (
            ("prepared", timing.prepared),
            ("sent", timing.sent),
            ("first_token", timing.first),
            ("end", now),
        ):
            if at is not None:
                words.append(f"{name}_ms={(at - began) * 1000:.1f}")
        mean_gap = timing.mean_gap
        if mean_gap is not None:
            words.append(f"inter_token_ms={mean_gap * 1000:.2f}")
        if writer.error is not None:
            words.append(f"error={writer.error.code}")
        if self._content is not None:
            words.append(f"input={self._content.input_messages}")
            words.append(f"output={self._content.output_messages}")
        return " ".join(words)
