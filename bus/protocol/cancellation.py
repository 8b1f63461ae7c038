"""Cancels that operators send to a namespace: what they say, what is answered, what is kept.

Plain values without I/O or clock.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, cast

import msgspec

MAX_IDS: Final = 256
"""Requests that one message may cancel."""
KEPT: Final = 16384
"""Cancelled requests that are remembered of a namespace, each of at most 128 bytes."""
REQUEST_SECONDS: Final = 60.0
"""Seconds for which a request that arrives is taken for one that was cancelled: it was on its way,
waited in front of a blocked loop, or is another attempt. After that the id may be used again.
"""
JOB_SECONDS: Final = 24 * 3600.0
"""Seconds for which a job that was queued before, or within `REQUEST_SECONDS` after, is not
begun.
"""

OPERATOR: Final = "an operator cancelled the requests of this id"

_ID = re.compile(r"[ -~]{1,128}")


class BadCancel(Exception):
    """Raised when a message is no cancel; its text says why."""


def read_ids(data: bytes) -> list[str]:
    """The requests that a message cancels, each once.

    A message is JSON: an id, an array of ids, or an object with `request_id` or `request_ids`. What
    is no JSON is an id as it is.

    Raises:
        BadCancel: it is none of these, or names no request, or too many.
    """
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        raise BadCancel("a cancel is text: a request id, or JSON") from None
    try:
        given: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        if text[:1] in ('"', "[", "{"):
            raise BadCancel(f"this is no JSON: {text[:80]}") from None
        given = text
    if isinstance(given, dict):
        named = cast("dict[str, Any]", given)
        if not named.keys() & {"request_id", "request_ids"}:
            raise BadCancel("an object needs request_id, or request_ids")
        given = named.get("request_ids", [named.get("request_id")])
        if not isinstance(given, str | list):
            raise BadCancel("request_ids is an array of request ids")
    elif not isinstance(given, str | list):
        # A number is an id too, as it was written.
        given = text
    ids = [given] if isinstance(given, str) else cast("list[Any]", given)
    if not 1 <= len(ids) <= MAX_IDS:
        raise BadCancel(f"a cancel names 1 to {MAX_IDS} requests, not {len(ids)}")
    for one in ids:
        if not isinstance(one, str) or _ID.fullmatch(one) is None:
            raise BadCancel(
                f"{str(one)[:80]!r} is no request id: it has 1 to 128 printable ASCII characters"
            )
    return list(dict.fromkeys(ids))


class EndedCall(NamedTuple):
    """A call of a cancelled request that ran or waited, and was ended.

    Attributes:
        instance: `namespace.component@id` where it was served; empty where it was made.
    """

    request_id: str
    instance: str = ""


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """The calls of one request that a process has ended.

    Attributes:
        served: how many calls, by `namespace.component@id` of their instance.
        made: calls that the process itself was making.
    """

    served: dict[str, int] = {}
    made: int = 0


class CancelAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of a process to a cancel.

    Attributes:
        process: host name and process id, for people.
        client: its client id, which no other process has.
        found: by request id; requests of which it has nothing are left out.
        error: why the message is no cancel.
    """

    process: str
    client: str
    found: dict[str, Ended] = {}
    error: str = ""


def by_request(calls: Iterable[EndedCall]) -> dict[str, Ended]:
    """The calls that were ended, request by request."""
    served: dict[str, dict[str, int]] = {}
    made: dict[str, int] = {}
    for one in calls:
        if one.instance:
            of = served.setdefault(one.request_id, {})
            of[one.instance] = of.get(one.instance, 0) + 1
        else:
            made[one.request_id] = made.get(one.request_id, 0) + 1
    return {key: Ended(served.get(key, {}), made.get(key, 0)) for key in served | made}


class Tombstones:
    """The requests of a namespace that were cancelled lately: whatever of them comes is not begun.
    Times are of one clock that does not go back.

    One thread adds, any other may ask. The oldest goes where there are too many.

    Attributes:
        has_any: whether any ever was, for code that would ask with every call.
    """

    __slots__ = ("_cancelled", "has_any")

    def __init__(self) -> None:
        # In the order of their cancels. Of a plain dict the first one is found behind the places of
        # all that were dropped, which takes longer with each.
        self._cancelled: OrderedDict[str, float] = OrderedDict()
        self.has_any = False

    def __repr__(self) -> str:
        return f"<Tombstones [{len(self._cancelled)} requests]>"

    def __len__(self) -> int:
        return len(self._cancelled)

    def add(self, request_id: str, now: float) -> None:
        """Remember a cancel."""
        self.has_any = True
        cancelled = self._cancelled
        cancelled.pop(request_id, None)
        cancelled[request_id] = now
        while True:
            first = next(iter(cancelled))
            if len(cancelled) <= KEPT and now - cancelled[first] < JOB_SECONDS:
                return
            del cancelled[first]

    def has_request(self, request_id: str, now: float) -> bool:
        """True if a request that begins now was cancelled a moment ago."""
        cancelled_at = self._cancelled.get(request_id)
        return cancelled_at is not None and now - cancelled_at < REQUEST_SECONDS

    def has_job(self, names: Iterable[str], queued_at: float) -> bool:
        """True if a job was cancelled.

        Args:
            names: its id, and that of the request that it is of.
            queued_at: when it was put.
        """
        cancelled_at = (self._cancelled.get(name) for name in names)
        return any(one is not None and queued_at - one < REQUEST_SECONDS for one in cancelled_at)
