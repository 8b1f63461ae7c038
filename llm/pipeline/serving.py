"""Carrying requests out: their streams are read by one relay, and none has a task of its own.

`Completion` is one request that runs. What one message of the bus brings for many of them becomes
text and is written in one callback.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, Protocol

import msgspec

from dynbus import (
    Arrival,
    Call,
    Cancelled,
    DynbusError,
    EndpointClient,
    InvalidRequest,
    InvalidResponse,
    Relay,
    StreamLost,
)
from dynbus.llm.answers import AnswerFormat, OutputFormat, Usage
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.llm.openai.errors import mismatch_of
from dynbus.llm.openai.merging import MergedAnswer, as_chunk
from dynbus.llm.openai.reading import read_answer, read_usage, usage_in
from dynbus.spi import RelayedStream, describe_exception

from .preparing import Prepared

logger = logging.getLogger(__name__)

LONG_PROMPT: Final = 16_384
"""Tokens from which on a prompt is worked on in stretches, with a turn of the loop for others
between them: each takes a millisecond or more."""

_decode: Final = msgspec.json.Decoder(Generated).decode


class Sink(Protocol):
    """The receiver of an answer. Its methods are called on the event loop and return at once."""

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Take the next chunks, or a whole answer.

        Returns:
            Whether more may follow at once; if not, `Completion.resume` is called later.
        """
        ...

    def end(self, error: DynbusError | None) -> None:
        """There is no more; called once, as the last."""
        ...


class RequestTiming:
    """The times at which a request's tokens came. Times are of `time.perf_counter`.

    Attributes:
        began: when the request arrived.
        prepared: when its prompt was token ids; None before.
        sent: when an engine was found for it and it was sent there; None before.
        first: when its first tokens came; None before.
        last: when its latest tokens came.
        count: how many tokens came, or pieces of an engine that takes text.
        gap_count: how many of them came after the first ones.
        observe: called with the seconds of each token after the first, and how many took these.
    """

    __slots__ = ("began", "count", "first", "gap_count", "last", "observe", "prepared", "sent")

    def __init__(self, began: float) -> None:
        self.began = began
        self.prepared: float | None = None
        self.sent: float | None = None
        self.first: float | None = None
        self.last = began
        self.count = 0
        self.gap_count = 0
        self.observe: Callable[[float, int], object] | None = None

    def tokens(self, count: int, now: float) -> None:
        """So many tokens have come."""
        self.count += count
        if self.first is None:
            self.first = now
        else:
            self.gap_count += count
            if self.observe is not None:
                self.observe((now - self.last) / count, count)
        self.last = now

    @property
    def waits(self) -> bool:
        """True if nothing has come yet that would end its waiting."""
        return self.first is None and self.last == self.began

    @property
    def mean_gap(self) -> float | None:
        """The mean time between two tokens, in seconds; None before the second."""
        if self.first is None or not self.gap_count:
            return None
        return (self.last - self.first) / self.gap_count


class Taker(Protocol):
    """The receiver of what engines make. Its methods are called on the event loop and return at
    once."""

    def receive(self, part: int, arrival: Arrival[Part, bytes], now: float) -> None:
        """Take what has arrived of one stream."""
        ...

    def end(self, error: DynbusError | None) -> None:
        """There is no more, since what has arrived cannot be taken."""
        ...


class Part(NamedTuple):
    """The purpose of a stream of the relay: one prompt of a completion.

    Attributes:
        taker: what takes the stream.
    """

    taker: Taker
    number: int
    completion: Completion


class Completion(ABC):
    """A request that runs.

    Args:
        format: how its answer is told.
        streams: whether it is told piece by piece.

    Attributes:
        timing: when its tokens came.
        taker: what takes its streams; None for itself.
        when_made: called when all of its answer is made, before the end is told.
        prompt_bytes: of the text of its prompt, where its engine alone counts the tokens; 0 where
            they are counted here.
        why_not_elsewhere: why another process could not go on with it; empty where one could.
    """

    why_not_elsewhere: ClassVar[str] = ""

    # The fields of completions are read for each token of each of very many streams.
    __slots__ = (
        "_format",
        "_is_over",
        "_is_unstarted",
        "_left",
        "_sink",
        "_streams",
        "prompt_bytes",
        "taker",
        "timing",
        "when_made",
    )

    def __init__(
        self, format: AnswerFormat, sink: Sink, timing: RequestTiming, *, streams: bool
    ) -> None:
        self.timing = timing
        self._format = format
        # Whether nothing of its stream was told yet.
        self._is_unstarted = streams
        self._sink = sink
        self._streams: list[RelayedStream[Part]] = []
        # The ids of the engines of streams that it has left.
        self._left: list[str] = []
        self._is_over = False
        self.taker: Taker | None = None
        self.when_made: Callable[[], object] | None = None
        self.prompt_bytes = 0

    @property
    def answer_id(self) -> str:
        """Of its answer; empty where the engine gives it one."""
        return self._format.id

    @property
    def usage(self) -> Usage | None:
        """The tokens so far; None where the engine counts them."""
        return None

    @property
    def prompt_lengths(self) -> list[int]:
        """The tokens of each prompt; empty where the engine counts them."""
        return []

    @property
    def finish_reasons(self) -> list[str]:
        """Of the outputs that have ended; empty where they are not read here."""
        return []

    @property
    def instances(self) -> list[str]:
        """The ids of the engines that work for it."""
        return [*self._left, *(one for stream in self._streams for one in stream.instance_ids)]

    async def begin(self, relay: Relay[Part, bytes], client: EndpointClient) -> None:
        """Send it to engines.

        Raises:
            DynbusError: it could not be sent; what was sent is cancelled.
        """
        try:
            await self._send(relay, client)
        except BaseException as error:
            # The hearer of it may still have to tell the sink.
            self._leave_streams()
            if isinstance(error, InvalidRequest):
                raise self.client_error(error) from error
            raise

    @abstractmethod
    async def _send(self, relay: Relay[Part, bytes], client: EndpointClient) -> None:
        """Open a stream for each of its prompts."""

    @abstractmethod
    def receive(self, part: int, arrival: Arrival[Part, bytes], now: float) -> None:
        """Take what has arrived of one of its streams."""

    def resume(self) -> None:
        """The sink takes more again."""
        for stream in self._streams:
            stream.resume()

    def cancel(self, error: DynbusError | None = None) -> None:
        """Leave it: engines stop, and the sink is told nothing more."""
        self._is_over = True
        self.when_made = None
        self._leave_streams(error)

    def _leave_streams(self, error: DynbusError | None = None) -> None:
        # They hold it: only a collection would find what holds each other.
        streams, self._streams = self._streams, []
        for stream in streams:
            self._left += stream.instance_ids
            stream.cancel(error)

    def end(self, error: DynbusError | None) -> None:
        """Leave it, and tell the sink that it has ended, with an error if there is one."""
        if not self._is_over:
            if error is not None:
                error = self.client_error(error)
            self.cancel(error)
            self._sink.end(error)

    @staticmethod
    def client_error(error: DynbusError) -> DynbusError:
        """An error of its call, for who asked."""
        return mismatch_of(error) if not error.hop else error

    async def open(self, relay: Relay[Part, bytes], call: Call, number: int) -> None:
        """Open a stream of one of its prompts.

        Raises:
            DynbusError: the request could not be sent.
        """
        stream = await relay.open(call, Part(self.taker or self, number, self))
        self._streams.append(stream)
        if self._is_over:
            stream.cancel()

    def _tell_made(self) -> None:
        if self.when_made is not None:
            self.when_made()

    def _write(self, chunks: Sequence[bytes]) -> None:
        if not chunks:
            return
        if self._is_unstarted:
            self._is_unstarted = False
            start = self._format.start(self.usage)
            if start:
                chunks = [start, *chunks]
        if not self._sink.write(chunks):
            for stream in self._streams:
                stream.pause()


class TokenCompletion(Completion):
    """A request whose engine takes and gives tokens.

    Args:
        prepared: what is asked of engines, and what their tokens come to.
    """

    __slots__ = ("_came", "_requests", "_transcript")

    def __init__(self, prepared: Prepared, sink: Sink, timing: RequestTiming) -> None:
        transcript = prepared.transcript
        super().__init__(transcript.format, sink, timing, streams=transcript.is_streamed)
        self._transcript = transcript
        self._requests: Sequence[GenerateRequest] = prepared.requests
        self._came: Mapping[int, Sequence[bytes]] = {}

    @staticmethod
    def client_error(error: DynbusError) -> DynbusError:
        return mismatch_of(error)

    @property
    def usage(self) -> Usage | None:
        return self._transcript.usage

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(request.token_ids) for request in self._requests]

    @property
    def finish_reasons(self) -> list[str]:
        return self._transcript.finish_reasons

    def go_on_after(self, items: Mapping[int, Sequence[bytes]]) -> None:
        """Have `begin` ask for what is left after these items, which were taken already.

        Args:
            items: what an engine has made of each prompt, by its number.
        """
        self._came = items

    async def _send(self, relay: Relay[Part, bytes], client: EndpointClient) -> None:
        for number, request in enumerate(self._requests):
            if self._transcript.is_prompt_finished(number):
                continue
            call = client.generate(request, after=self._came.get(number, ())).raw()
            if len(request.token_ids) > LONG_PROMPT:
                # It was encoded, and will be hashed: the streams of others come between.
                await asyncio.sleep(0)
            await self.open(relay, call, number)
        self._requests, self._came = (), {}

    def receive(self, part: int, arrival: Arrival[Part, bytes], now: float) -> None:
        if self._is_over:
            return
        transcript = self._transcript
        chunks: list[bytes] = []
        error = arrival.error
        tokens, open_outputs = transcript.tokens, transcript.open_outputs
        try:
            for data in arrival.items:
                item = _decode(data)
                if item.finish_reason == "cancelled":
                    raise Cancelled("the engine cancelled the request")
                transcript.add(part, item, chunks)
            if arrival.ended and error is None:
                transcript.end_prompt(part, chunks)
        except msgspec.MsgspecError as misfit:
            self._fail(chunks, InvalidResponse(f"an item of the engine does not fit: {misfit}"))
            return
        except DynbusError as failure:
            self._fail(chunks, failure)
            return
        if transcript.tokens != tokens:
            self.timing.tokens(transcript.tokens - tokens, now)
        if transcript.open_outputs != open_outputs:
            if not transcript.open_outputs:
                self._finish(chunks)
                return
            if not arrival.ended and transcript.is_prompt_finished(part):
                # Its stop strings were found; the engine knows nothing of them.
                arrival.stream.cancel()
        self._write(chunks)
        if error is not None:
            self.end(error)

    def _finish(self, chunks: list[bytes]) -> None:
        end = self._transcript.finish()
        if end:
            chunks.append(end)
        self._tell_made()
        self._write(chunks)
        self.end(None)

    def _fail(self, chunks: list[bytes], error: DynbusError) -> None:
        self._write(chunks)
        self.end(error)


class TextCompletion(Completion):
    """A request whose engine takes and gives text: OpenAI's requests, and chunks or whole answers.

    They pass as they are where the answer is told in the engine's own format.

    Args:
        request: as JSON.
        routed_as: what a router looks at in place of it; None where none goes by its tokens.
        restarts: whether a whole answer begins again elsewhere where its engine is lost.
        tells_usage: whether a chunk that has the usage alone is for the client too.
        prompt_bytes: see `Completion`; those of the request unless given.
    """

    __slots__ = (
        "_frame",
        "_merged",
        "_outputs",
        "_request",
        "_restarts",
        "_routed_as",
        "_tells_usage",
        "_usage",
    )

    why_not_elsewhere = "its engine takes text"

    def __init__(
        self,
        request: msgspec.Raw,
        sink: Sink,
        timing: RequestTiming,
        *,
        streams: bool,
        format: AnswerFormat,
        routed_as: object = None,
        restarts: bool = False,
        tells_usage: bool = True,
        prompt_bytes: int | None = None,
    ) -> None:
        super().__init__(format, sink, timing, streams=streams)
        self.prompt_bytes = len(request) if prompt_bytes is None else prompt_bytes
        self._restarts = restarts and not streams
        self._tells_usage = tells_usage
        self._request = request
        self._routed_as = routed_as
        self._frame = format.frame
        self._merged = None if streams else MergedAnswer()
        self._outputs: dict[int, OutputFormat] = {}
        self._usage: Usage | None = None

    @property
    def answer_id(self) -> str:
        return self._format.id if self._frame is None else ""

    @property
    def usage(self) -> Usage | None:
        return self._usage

    async def _send(self, relay: Relay[Part, bytes], client: EndpointClient) -> None:
        restart = self._restart if self._restarts else None
        call = client.generate(self._request, routed_as=self._routed_as, restart=restart).raw()
        await self.open(relay, call, 0)

    def _restart(self) -> None:
        self._merged = MergedAnswer()

    def receive(self, part: int, arrival: Arrival[Part, bytes], now: float) -> None:
        if self._is_over:
            return
        if arrival.items:
            self.timing.tokens(len(arrival.items), now)
        try:
            if self._merged is None:
                translate = self._framed if self._frame is not None else self._translated
                self._write([chunk for item in arrival.items if (chunk := translate(item))])
            else:
                for item in arrival.items:
                    self._merged.add(item)
        except DynbusError as error:
            error.hop = error.hop or arrival.stream.hop
            self.end(error)
            return
        if not arrival.ended:
            return
        ending = arrival.error
        if ending is None:
            self._finish()
        elif isinstance(ending, StreamLost) and not self._restarts:
            ending = StreamLost(
                f"{ending.message}; the engine takes text, and only a stream of tokens can be "
                "continued: ask again",
                hop=ending.hop,
                request_id=ending.request_id,
            )
        self.end(ending)

    def _finish(self) -> None:
        if self._merged is None:
            # The engine's own chunk has told it where chunks pass as they are.
            end = self._format.end(self._usage if self._frame is None else None)
            chunks = [end] if end else []
        elif self._frame is not None:
            self._usage = read_usage(self._merged.usage)
            chunks = [self._merged.encode()]
        else:
            read = read_answer(self._merged.encode())
            self._usage = read.usage
            chunks = [self._format.whole(read.outputs, read.usage)]
        self._tell_made()
        self._write(chunks)

    def _framed(self, item: bytes) -> bytes:
        """A chunk as it is."""
        assert self._frame is not None
        if not item.startswith(b"{"):
            raise InvalidResponse("an item of the engine is no chunk of a completion")
        item = as_chunk(item)
        usage, is_all = usage_in(item)
        self._usage = usage or self._usage
        if is_all and not self._tells_usage:
            return b""
        if b"\n" in item:
            # An event of a stream over HTTP ends with its line.
            item = msgspec.json.format(item, indent=-1)
        before, after = self._frame
        return before + item + after

    def _translated(self, item: bytes) -> bytes:
        """A chunk in the format of the answer."""
        read = read_answer(item)
        self._usage = read.usage or self._usage
        chunks = b""
        for output in read.outputs:
            known = self._outputs.get(output.index)
            if known is None:
                known = self._outputs[output.index] = self._format.output(output.index)
            chunks += known.piece(output, self._usage)
        return chunks


def deliver(arrivals: list[Arrival[Part, bytes]]) -> None:
    """Give completions what has arrived of their streams: for the relay that reads them."""
    now = time.perf_counter()
    for arrival in arrivals:
        part = arrival.stream.key
        try:
            part.taker.receive(part.number, arrival, now)
        except Exception as error:
            # The other arrivals are of others, whatever an engine has sent here.
            logger.exception("what an engine sent cannot be read")
            part.taker.end(
                InvalidResponse(f"an item of the engine does not fit: {describe_exception(error)}")
            )
