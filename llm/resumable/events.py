"""The events of a stream with their numbers: `id: REQUEST.N`, from 1 on; what is the same each time
that they are made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final, Protocol

from dynbus import DynbusError
from dynbus.llm.answers import AnswerFormat
from dynbus.llm.openai.errors import BadRequest
from dynbus.llm.pipeline.serving import Sink

RESUMED: Final = b": the stream goes on\n"
"""The beginning of a resumed stream: a comment, which clients skip."""

GIVEN_UP: Final = b": the stream cannot be resumed elsewhere any more\n"
"""The comment from which on the events have no ids."""

_NUMBER: Final = re.compile(r"[0-9]{1,9}")


def number_of(event_id: str, request_id: str) -> int:
    """The number of events that a reader of this one has seen; 0 for an empty id.

    Raises:
        BadRequest: it is no event of that stream.
    """
    if not event_id:
        return 0
    stream, _, number = event_id.rpartition(".")
    if stream != request_id or _NUMBER.fullmatch(number) is None:
        raise BadRequest(
            f"Last-Event-ID: {event_id[:200]!r} is no event of the stream {request_id}: give the "
            "id of the last event that was read, or none",
            param="Last-Event-ID",
        )
    return int(number)


def numbered_ids(seed: str) -> Callable[[], str]:
    """Gives an id at each call, of 32 hexadecimal digits: the same ones for the same seed."""
    numbers = count()
    return lambda: hashlib.blake2s(f"{seed}.{next(numbers)}".encode(), digest_size=16).hexdigest()


class EventNumbers:
    """Gives the events of one stream their ids.

    Args:
        after: how many of the first events are left out.

    Attributes:
        count: how many events there were, those that are left out counted in.
        has_stopped: whether no more events have ids.
    """

    def __init__(self, request_id: str, after: int = 0) -> None:
        self.count = 0
        self._id = f"id: {request_id}.".encode()
        self._after = after
        self.has_stopped = False

    def stop(self) -> None:
        """Give no more ids: what follows can be read here alone."""
        self.has_stopped = True

    def number(self, chunk: bytes) -> bytes:
        """One or more whole events, as they are told; empty for none that are."""
        if self.has_stopped:
            return chunk
        events: list[bytes] = []
        # A line of data has no line end in it, so an empty line ends an event.
        for event in chunk.split(b"\n\n")[:-1]:
            self.count += 1
            if self.count > self._after:
                events.append(b"%b%d\n%b\n\n" % (self._id, self.count, event))
        return b"".join(events)


class Settle(Protocol):
    """Does what is to be done before the end of a stream is told."""

    async def __call__(self, *, is_own: bool) -> None:
        """Do it.

        Args:
            is_own: whether the stream is gone on with here; it is only read otherwise.
        """
        ...


class NumberedSink:
    """Numbers an answer on its way to who reads it, who may leave: the sink of a completion.

    What it is given between `hold` and `release` is told with the latter.

    Attributes:
        to: who reads; None for nobody.
        is_over: whether there is no more.
        settle: does what is to be done before the end is told, and tells it then; does nothing
            before there is an end. None for nothing.
    """

    settle: Settle | None = None

    def __init__(self, numbers: EventNumbers, to: Sink | None) -> None:
        self.numbers = numbers
        self.to = to
        self.is_over = False
        self._held: list[Callable[[], object]] | None = None

    def hold(self) -> None:
        """Tell nothing from here on."""
        self._held = []

    def release(self) -> None:
        """Tell what was held, and what follows at once."""
        held, self._held = self._held, None
        for tell in held or ():
            tell()

    def write(self, chunks: Sequence[bytes]) -> bool:
        """Take the next chunks; whether more may follow at once.

        Others may read the stream elsewhere, so it waits for no reader while that is so; a slow one
        has as much in front of it as a log may hold.
        """
        if self._held is not None:
            self._held.append(partial(self.write, chunks))
            return True
        numbered_chunks = [numbered for chunk in chunks if (numbered := self.numbers.number(chunk))]
        if not numbered_chunks or self.to is None:
            return True
        return self.to.write(numbered_chunks) or not self.numbers.has_stopped

    def end(self, error: DynbusError | None) -> None:
        """There is no more."""
        if self._held is not None:
            self._held.append(partial(self.end, error))
            return
        self.is_over = True
        if self.to is not None:
            self.to.end(error)

    def give_up(self) -> None:
        """Say that the stream can be read here alone from now on."""
        self.numbers.stop()
        if self.to is not None:
            self.to.write([GIVEN_UP])


class NumberedErrors:
    """Tells the error that ends a stream as an event with a number.

    Args:
        request_id: of the stream, the same for each reader.
    """

    def __init__(self, format: AnswerFormat, numbers: EventNumbers, request_id: str) -> None:
        self._format = format
        self._numbers = numbers
        self._request_id = request_id

    def error(self, error: DynbusError, request_id: str) -> bytes:
        """The bytes that end a stream that fails after its start."""
        return self._numbers.number(self._format.error(error, self._request_id))
