"""Reading what a stream holds from any of its replicas.

Every replica answers these requests, so they need neither the leader of the stream nor that of
the cluster, and are answered while one is being elected.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import anyio
import msgspec

from dynbus.bus.errors import DynbusError, PermissionDenied, Unavailable
from dynbus.bus.protocol import headers as header_block
from dynbus.bus.transport import Message, NoStream, StoredMessage

from .answers import is_answer, written
from .api_requests import FIRST_REPEAT, ServerLink, api_of, unix_seconds

PAGE: Final = 1000
"""Messages that are asked for at a time."""
PAGE_BYTES: Final = 4 * 1024 * 1024
"""Bytes after which the server ends a page, with the message that exceeds them."""

_END = "204"
_NOT_FOUND = "404"
_OF_THE_ANSWER = frozenset(
    f"Nats-{name}"
    for name in ("Stream", "Subject", "Sequence", "Time-Stamp", "Num-Pending", "Last-Sequence")
)


class _Page:
    """The messages of one answer, and whether it is complete.

    Args:
        is_single: whether one message is all of it.
    """

    def __init__(self, *, is_single: bool = False) -> None:
        self._is_single = is_single
        self.messages: list[StoredMessage] = []
        self.heard = asyncio.Event()
        self.pending: int | None = None
        self.error: DynbusError | None = None

    @property
    def is_complete(self) -> bool:
        return self.pending is not None or self.error is not None

    def add(self, message: Message) -> None:
        """Take one message of the answer."""
        status = header_block.status(message.headers)
        fields = header_block.decode(message.headers)
        if status == header_block.NO_RESPONDERS:
            self.error = NoStream("no replica of the stream answers")
        elif status in (_END, _NOT_FOUND):
            pending = fields.get("Nats-Num-Pending", "0")
            self.pending = int(pending) if pending.isdecimal() else 0
        elif status:
            self.error = Unavailable(f"reading the stream: the server says {status}")
        else:
            try:
                # Its own comes beside that of this answer.
                of_server = is_answer(message.headers, message.data, of_readers=1)
                self.messages.append(_stored(fields, message.data, of_server=of_server))
                if self._is_single:
                    self.pending = 0
            except (LookupError, ValueError) as error:
                self.error = Unavailable(f"reading the stream: an answer cannot be read: {error!r}")
        self.heard.set()


def _stored(fields: Mapping[str, str], data: bytes, *, of_server: bool) -> StoredMessage:
    own = {name: value for name, value in fields.items() if name not in _OF_THE_ANSWER}
    return StoredMessage(
        fields["Nats-Subject"],
        int(fields["Nats-Sequence"]),
        unix_seconds(fields["Nats-Time-Stamp"]),
        *written(own, data, is_answer=of_server),
    )


async def read_stream(
    connection: ServerLink, stream: str, subject: str, timeout: float, region: str = ""
) -> list[StoredMessage]:
    """The messages of a subject in the stream, oldest first.

    Raises:
        NoStream: no replica of the stream answers.
        PermissionDenied: the server does not let us ask.
        Unavailable: it is not complete within `timeout` seconds.
    """
    messages: list[StoredMessage] = []
    sequence = 1
    with _answered(stream, timeout):
        while True:
            page = await _read_page(connection, stream, _from(sequence, subject), region)
            messages += page.messages
            if not page.pending or not page.messages:
                return messages
            sequence = page.messages[-1].sequence + 1


async def read_page(
    connection: ServerLink,
    stream: str,
    subject: str,
    start: int,
    timeout: float,
    region: str = "",
) -> list[StoredMessage]:
    """The first of these messages from a sequence on; none where there are no more.

    Raises:
        NoStream, PermissionDenied, Unavailable: as of `read_stream`.
    """
    with _answered(stream, timeout):
        return (await _read_page(connection, stream, _from(start, subject), region)).messages


async def read_last(
    connection: ServerLink,
    stream: str,
    subjects: Sequence[str],
    timeout: float,
    region: str = "",
) -> list[StoredMessage]:
    """The last message of each of some subjects that the stream has, oldest first.

    Raises:
        NoStream, PermissionDenied, Unavailable: as of `read_stream`; the server finds more than
            1,024.
    """
    with _answered(stream, timeout):
        return (await _read_page(connection, stream, {"multi_last": subjects}, region)).messages


async def read_one(
    connection: ServerLink, stream: str, subject: str, timeout: float, region: str = ""
) -> StoredMessage | None:
    """The last message of one subject, asked for at a subject that names it; None for none.

    Raises:
        NoStream, PermissionDenied, Unavailable: as of `read_stream`.
    """
    call = f"{api_of(region)}.DIRECT.GET.{stream}.{subject}"
    with _answered(stream, timeout):
        # It takes no question beside its subject.
        messages = (await _ask(connection, call, b"", is_single=True)).messages
    return messages[0] if messages else None


def _from(sequence: int, subject: str) -> dict[str, Any]:
    """The question for the messages of a subject from a sequence on."""
    return {
        "seq": sequence,
        "batch": PAGE,
        "max_bytes": PAGE_BYTES,
        "next_by_subj": subject or ">",
    }


@contextmanager
def _answered(stream: str, timeout: float) -> Generator[None]:
    try:
        with anyio.fail_after(timeout):
            yield
    except TimeoutError:
        raise Unavailable(f"no replica of {stream} answered within {timeout} s") from None


async def _read_page(
    connection: ServerLink, stream: str, request: Mapping[str, Any], region: str
) -> _Page:
    call = f"{api_of(region)}.DIRECT.GET.{stream}"
    return await _ask(connection, call, msgspec.json.encode(request))


async def _ask(connection: ServerLink, call: str, data: bytes, *, is_single: bool = False) -> _Page:
    """One answer that is complete; the caller bounds the wait."""
    pause = FIRST_REPEAT
    while True:
        await connection.wait_connected()
        # A new inbox per try: what another replica still sends cannot be mixed in.
        inbox = f"{connection.inbox}c.{secrets.token_hex(8)}"
        page = _Page(is_single=is_single)
        subscription = connection.subscribe(inbox, page.add, reads_stream=True)
        try:
            connection.publish(call, data, reply=inbox)
            while not page.is_complete:
                with anyio.move_on_after(pause) as waiting:
                    await page.heard.wait()
                if waiting.cancelled_caught:
                    break
                page.heard.clear()
        finally:
            subscription.unsubscribe()
        if refusal := connection.refusal_of(call):
            raise PermissionDenied(refusal)
        if page.error is not None:
            raise page.error
        if page.is_complete:
            return page
        pause *= 2
