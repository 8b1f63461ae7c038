"""The watch over a simulation: its trace, what the library met on its way, and calls in time."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections import Counter
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from dynbus.actors.calling.options import current_options
from dynbus.actors.middleware.passing import Middleware, MiddlewareCall, Proceed
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.wire import Cancel, Failed, Resume, Unknown, decode_batch
from dynbus.bus.transport import Message

LATE_AFTER: Final = 2.0
"""Seconds beyond its deadline after which the end of a call is late."""
LOGGERS: Final = ("dynbus", "asyncio")

_ATTEMPT: Final = f"\r\n{headers.ATTEMPT}:".encode()
_CONTINUES: Final = f"\r\n{headers.CONTINUES}:".encode()
_TOLD: Final = (Cancel, Failed, Resume, Unknown)


class Trace:
    """Everything that reached the server: a digest of it, and counts of what tells of faults.

    Attributes:
        messages: their number.
        counts: frames that repair or end something, by their kind, and requests that were sent
            again.
    """

    def __init__(self) -> None:
        self.messages = 0
        self.counts: Counter[str] = Counter()
        self._digest = hashlib.blake2b(digest_size=16)

    def __repr__(self) -> str:
        return f"<Trace [{self.messages} messages]>"

    @property
    def digest(self) -> str:
        """The digest of all messages so far, their times and their order, as hexadecimal digits."""
        return self._digest.hexdigest()

    def note(self, now: float, message: Message) -> None:
        """A message, a request to JetStream or its answer reaches the server."""
        self.messages += 1
        subject, reply, block, data = msgspec.structs.astuple(message)
        head = struct.pack("<dIII", now, len(subject), len(block), len(data))
        self._digest.update(b"".join((head, subject.encode(), reply.encode(), block, data)))
        if block:
            if _ATTEMPT in block:
                self.counts["moved stream" if _CONTINUES in block else "repeated request"] += 1
        elif subject.endswith(".f") or "._ctl." in subject:
            batch = decode_batch(data)
            for frame in batch.frames if batch is not None else ():
                if isinstance(frame, _TOLD):
                    self.counts[_name_of(frame)] += 1


def _name_of(frame: Cancel | Failed | Resume | Unknown) -> str:
    if isinstance(frame, Failed):
        return f"failed: {frame.code}"
    return type(frame).__name__.lower()


class LogWatch(logging.Handler):
    """The log of the library from warnings on, shown nowhere.

    Attributes:
        lines: in their order.
        errors: those at ERROR and above, with the exception.
        counts: of each message, without what stands in its places.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        # With the exception, if there is one.
        line = f"{_virtual_time():.3f} {record.levelname} {self.format(record)}"
        self.lines.append(line)
        self.counts[f"log: {record.msg}"] += 1
        if record.levelno >= logging.ERROR:
            self.errors.append(line)


@contextmanager
def watched_log() -> Generator[LogWatch]:
    """The log of the block."""
    watch = LogWatch()
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(one.handlers, one.propagate, one.level) for one in loggers]
    for one in loggers:
        one.handlers, one.propagate = [watch], False
        one.setLevel(logging.WARNING)
    try:
        yield watch
    finally:
        for one, (handlers, propagate, level) in zip(loggers, before, strict=True):
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)


class CallsInTime(Middleware):
    """The watch over a client's calls: each is to end by its deadline.

    Args:
        timeout: seconds for a call whose options say nothing else; None for no deadline.

    Attributes:
        late: those that ended too late, in words.
    """

    def __init__(self, timeout: float | None, late: list[str]) -> None:
        self.late = late
        self._timeout = timeout

    async def around(self, call: MiddlewareCall, proceed: Proceed) -> Any:
        deadline = self._deadline()
        try:
            return await proceed()
        finally:
            self._ended(call, deadline)

    async def items(self, call: MiddlewareCall, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
        deadline = self._deadline()
        while True:
            asked = _virtual_time()
            try:
                item = await anext(items)
            except StopAsyncIteration:
                return
            finally:
                # A reader may come back late for what is there.
                if _virtual_time() - asked > LATE_AFTER:
                    self._ended(call, deadline)
            yield item

    def _deadline(self) -> float | None:
        timeout = current_options().get("timeout", self._timeout)
        return None if timeout is None else _virtual_time() + timeout

    def _ended(self, call: MiddlewareCall, deadline: float | None) -> None:
        now = _virtual_time()
        if deadline is not None and now > deadline + LATE_AFTER:
            self.late.append(f"{call.endpoint} ended {now - deadline:.2f} s after its deadline")


def _virtual_time() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0
