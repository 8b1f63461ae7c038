"""Reading a request: what its headers say.

Nothing here knows of a connection, a clock or a call: headers and bytes go in, values or
`InvalidRequest` come out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

from dynbus.bus.context import MAX_ID_LENGTH, Context
from dynbus.bus.errors import InvalidRequest
from dynbus.bus.protocol import headers
from dynbus.bus.protocol.names import TOKEN, split_number
from dynbus.bus.protocol.random_ids import random_id
from dynbus.bus.protocol.wire import MAX_PARTS, SECRET_BYTES, VERSION
from dynbus.bus.telemetry.trace_context import trace_fields

MAX_KEY_LENGTH: Final = 128
"""Characters of an idempotency key."""

MAX_HEADER_BYTES: Final = 128 * 1024
"""Bytes of a request's headers: metadata of 8192 characters takes 96 KiB at most."""

MAX_FRAMING: Final = 256
"""Characters that are read of a framing header."""

_VERSION_WORD = str(VERSION)
# A client's requests all carry the same incarnation.
_token = lru_cache(1024)(TOKEN.fullmatch)


class PlainCancel(NamedTuple):
    """A plain client gives up its calls with a request id."""

    request_id: str
    kills: bool


def read_framing(framing: str) -> tuple[bytes, int, str]:
    """The (secret, window in bytes, incarnation of the client) of a `Dynbus-Frames` header.

    Raises:
        InvalidRequest: it is not one of version 1.
    """
    words = framing[:MAX_FRAMING].split(" ")
    if (
        len(words) >= 4
        and words[0] == _VERSION_WORD
        and len(words[1]) == 2 * SECRET_BYTES
        # It becomes part of a subject.
        and _token(words[3])
    ):
        try:
            return bytes.fromhex(words[1]), int(words[2]), words[3]
        except ValueError:
            pass
    raise InvalidRequest(f"{headers.FRAMES}: {framing[:80]!r} is not of version {VERSION}")


def read_cancel(block: bytes) -> PlainCancel | None:
    """The cancel of a plain client in a header block; None for anything else."""
    if len(block) > MAX_HEADER_BYTES:
        return None
    fields = headers.decode(block)
    how, request_id = fields.get(headers.CANCEL), fields.get(headers.REQUEST_ID, "")
    if how not in ("stop", "kill") or not 0 < len(request_id) <= MAX_ID_LENGTH:
        return None
    return PlainCancel(request_id, how == "kill")


def read_fields(block: bytes) -> dict[str, str]:
    """The headers of a request.

    Raises:
        InvalidRequest: there are more of them than any client needs.
    """
    if len(block) > MAX_HEADER_BYTES:
        raise InvalidRequest(
            f"the headers of {len(block)} bytes exceed {MAX_HEADER_BYTES}: send less metadata"
        )
    return headers.decode(block) if block else {}


def read_reply(reply: str) -> tuple[str, int]:
    """The (reply base of the client, request number) of a framed request's reply subject.

    Raises:
        InvalidRequest: it does not end in a number.
    """
    numbered = split_number(reply)
    if numbered is None:
        raise InvalidRequest(f"{headers.FRAMES} needs a numbered reply, not {reply[:80]!r}")
    return numbered


def read_context(
    fields: dict[str, str],
    *,
    timeout: float | None,
    hop: str,
    draining: Callable[[], bool],
    now: float,
) -> Context:
    """The context in which a request with these headers runs.

    Args:
        timeout: seconds that the endpoint allows a call; the caller's deadline can only shorten
            them.
        now: when the request arrived, on the monotonic clock.

    Raises:
        InvalidRequest: the deadline or the count of items is no number, or the idempotency key
            cannot be kept whole.
    """
    deadline = None if timeout is None else now + timeout
    if (text := fields.get(headers.DEADLINE)) is not None:
        given = now + _whole_number(headers.DEADLINE, text) / 1000
        deadline = given if deadline is None else min(given, deadline)
    context = Context(
        _request_id(fields.get(headers.REQUEST_ID)),
        deadline=deadline,
        trace_headers=trace_fields(fields),
        hop=hop,
        draining=draining,
    )
    if headers.METADATA in fields:
        context.metadata = MappingProxyType(headers.decode_metadata(fields[headers.METADATA]))
    if headers.ATTEMPT in fields:
        context.attempt = _small_number(fields[headers.ATTEMPT], 1)
    if headers.PRIORITY in fields:
        context.priority = _small_number(fields[headers.PRIORITY], 0)
    if headers.CONTINUES in fields:
        context.delivered = _whole_number(headers.CONTINUES, fields[headers.CONTINUES])
    if headers.IDEMPOTENCY_KEY in fields:
        context.idempotency_key = _idempotency_key(fields[headers.IDEMPOTENCY_KEY])
    return context


def read_part(part: str) -> tuple[int, int]:
    """The (index from 1, count) of a `Dynbus-Part` header.

    Raises:
        InvalidRequest: it is not `index/count`, or names a part that cannot be.
    """
    first, _, second = part.partition("/")
    index, count = _small_number(first, 0), _small_number(second, 0)
    if not 1 <= index <= count <= MAX_PARTS:
        raise InvalidRequest(f"{headers.PART}: {part[:40]!r}")
    return index, count


def _whole_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidRequest(f"{name}: {text[:40]!r} is no number")
    return int(text)


def _request_id(text: str | None) -> str:
    """A request id as given, unless it could not be sent on as a header."""
    if text and len(text) <= MAX_ID_LENGTH and text.isascii() and text.isprintable():
        return text
    return random_id()


def _idempotency_key(text: str) -> str:
    """A key as given: cut or replaced it could be that of another effect."""
    if text and len(text) <= MAX_KEY_LENGTH and text.isascii() and text.isprintable():
        return text
    raise InvalidRequest(
        f"{headers.IDEMPOTENCY_KEY}: {text[:40]!r} of {len(text)} characters is no key: use "
        f"1 to {MAX_KEY_LENGTH} printable ASCII characters"
    )


def _small_number(text: str, default: int) -> int:
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 6 else default
