"""Writing an answer without a task: what a server takes at once is written by the caller.

`send` of an ASGI server is a coroutine that waits only when the client does not read. It is run
until it would wait; the rest of it, and whatever comes meanwhile, is left to a task. So the chunks
of an engine's step are written for all streams in one callback, and a client that does not read
holds up nobody but itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, Final, Protocol

import anyio

from dynbus import DynbusError
from dynbus.llm.openai.errors import ErrorAnswer, status_of

Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]
Headers = Sequence[tuple[bytes, bytes]]

JSON: Final = (b"content-type", b"application/json")
EVENTS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI has them."""
    return [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]


class TellsErrors(Protocol):
    """The format of a stream that fails: `AnswerFormat` is one."""

    def error(self, error: DynbusError, request_id: str) -> bytes:
        """The bytes that end a stream that fails after its start."""
        ...


class _Rest:
    """The rest of a coroutine that has run until it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waits_for
        except BaseException as error:
            # The awaiting task is cancelled, and so is the coroutine where it waits.
            self._coroutine.throw(error)
            raise
        return (yield from self._coroutine.__await__())


class AnswerWriter:
    """Writes one answer: a stream of events, or a whole one. It is the sink of a completion.

    Args:
        refusal: how an error is answered before anything else was.
        stream: how the answer is told where it is a stream, which begins with the first chunk, so
            that an early error is an answer of its own; None for a whole answer.
        headers: of every answer, beside those of its content.
        finish_sending: starts a task for what could not be written at once; what it is given
            returns whether all was written.
        timeout: seconds that a client may not read.
        keep_alive: what is told where nothing else is for a while; see `KeepAlive`.
        write_piece: writes a piece of an answer that has begun, and returns True; or returns False
            where that is for `send` to do. `send` is a coroutine that does more, which costs each
            token of each stream as much as all else here. None where there is no such way.

    Attributes:
        status: of the answer; 0 before it begins.
        error: that it ended with.
        has_ended: whether there is no more to write.
        has_told: whether a piece was written since this was made false.
        is_blocked: whether the client does not read.
        when_writable: called when the client reads again.
    """

    # Its fields are read for each token of each of very many streams.
    __slots__ = (
        "_finish_sending",
        "_headers",
        "_keep_alive",
        "_refusal",
        "_request_id",
        "_rest",
        "_send",
        "_stream",
        "_timeout",
        "_waiting",
        "_whole",
        "_write_piece",
        "error",
        "has_ended",
        "has_told",
        "status",
        "when_writable",
    )

    def __init__(
        self,
        send: Send,
        headers: Headers,
        request_id: str,
        *,
        refusal: Callable[[DynbusError, str], ErrorAnswer],
        stream: TellsErrors | None,
        finish_sending: Callable[[Callable[[], Coroutine[Any, Any, bool]]], object],
        timeout: float,
        keep_alive: bytes,
        write_piece: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._send = send
        self._write_piece = write_piece
        self._headers = headers
        self._request_id = request_id
        self._refusal = refusal
        self._stream = stream
        self._finish_sending = finish_sending
        self._timeout = timeout
        self._keep_alive = keep_alive
        self._whole: Sequence[bytes] = ()
        self._waiting: deque[MutableMapping[str, Any]] = deque()
        self._rest: _Rest | None = None
        self.status = 0
        self.error: DynbusError | None = None
        self.has_ended = False
        self.has_told = False
        self.when_writable: Callable[[], object] | None = None

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Have more headers in an answer that has not begun."""
        self._headers = [*self._headers, *raw_headers(headers)]

    @property
    def is_blocked(self) -> bool:
        """True if the client does not read."""
        return self._rest is not None

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Write chunks, or keep the whole answer for its end; whether more may follow at once."""
        if self._stream is None:
            self._whole = chunks
            return True
        if self.has_ended:
            return True
        if not self.status:
            self._start(200, EVENTS)
        self.has_told = True
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        # Each token of each stream comes here.
        write_piece = self._write_piece
        if write_piece is not None and self._rest is None and write_piece(body):
            return True
        message = {"type": "http.response.body", "body": body, "more_body": True}
        if self._rest is not None:
            self._waiting.append(message)
            return False
        return self._run(self._send(message))

    def keep_alive(self) -> None:
        """Tell that more will come, where nothing was told since the last time."""
        if not self.has_told and self._rest is None and self._stream is not None:
            self.write([self._keep_alive])
        self.has_told = False

    def end(self, error: DynbusError | None) -> None:
        """End the answer, with an error if there is one; more calls change nothing."""
        if self.has_ended:
            return
        self.has_ended = True
        self.error = error
        if error is not None and not self.status:
            refusal = self._refusal(error, self._request_id)
            self._answer(refusal.status, refusal.body, refusal.headers)
        elif self._stream is None:
            self._answer(200, b"".join(self._whole), {})
        elif error is not None:
            self._finish(self._stream.error(error, self._request_id))
        else:
            if not self.status:
                self._start(200, EVENTS)
            self._finish(b"")

    def repeat(
        self, messages: Sequence[MutableMapping[str, Any]], said: tuple[bytes, bytes]
    ) -> None:
        """Write an answer that was given before, with a header that says so."""
        start, *rest = messages
        self.has_ended = True
        self.status = start["status"]
        self._put({**start, "headers": [*start["headers"], said]})
        for message in rest:
            self._put(message)

    def release(self) -> None:
        """Let go of who made it and of what it writes, once: there is no more to write.

        They hold it, and only a collection would find what holds each other.
        """
        self.when_writable = None
        del self._finish_sending, self._refusal

    @property
    def final_status(self) -> int:
        """The status for logs: of an answer that failed after its beginning, the error's."""
        return self.status if self.error is None else status_of(self.error)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        length = (b"content-length", b"%d" % len(body))
        self._start(status, (JSON, length, *raw_headers(headers)))
        self._finish(body)

    def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        self._put(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self._headers],
            }
        )

    def _finish(self, body: bytes) -> None:
        self._put({"type": "http.response.body", "body": body, "more_body": False})

    def _put(self, message: MutableMapping[str, Any]) -> None:
        if self._rest is not None:
            self._waiting.append(message)
        else:
            self._run(self._send(message))

    def _run(self, sending: Coroutine[Any, Any, None]) -> bool:
        """Run what sends until it waits; whether it did not."""
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return True
        self._rest = _Rest(sending, waits_for)
        self._finish_sending(self._send_rest)
        return False

    async def _send_rest(self) -> bool:
        assert self._rest is not None
        sending: Awaitable[None] = self._rest
        while True:
            with anyio.move_on_after(self._timeout) as scope:
                await sending
            if scope.cancelled_caught:
                return False
            if not self._waiting:
                break
            sending = self._send(self._waiting.popleft())
        self._rest = None
        if self.when_writable is not None and not self.has_ended:
            self.when_writable()
        return True


class KeepAlive:
    """Tells each of a front end's streams that is silent, for its client to see that it lives.

    One task looks at all streams: the tokens of a stream cost no look at a clock.

    Args:
        interval: seconds for which a stream is silent at most.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._writers: set[AnswerWriter] = set()

    def __repr__(self) -> str:
        return f"<KeepAlive [{len(self._writers)} streams, every {self._interval:g} s]>"

    def add(self, writer: AnswerWriter) -> None:
        """Tell a stream, from the beginning of its answer on, which this may be."""
        self._writers.add(writer)

    def remove(self, writer: AnswerWriter) -> None:
        """Tell it nothing more; one that is not there is none the less gone."""
        self._writers.discard(writer)

    async def run(self) -> None:
        """Look at them, without end."""
        while True:
            # What was told right after a look is seen at the next one, and missed at the one after.
            await anyio.sleep(self._interval / 2)
            for writer in [*self._writers]:
                writer.keep_alive()
