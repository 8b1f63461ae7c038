"""A stream that goes on elsewhere: what was accepted of it, and what is asked for next.

One object for each stream knows both, its `Continuation`; everybody else calls it:

- The call (`StreamInvocation`) shows it the items of each attempt, gives its reader what it lets
  through, and asks it what follows when an attempt is lost. Nothing: the stream was whole. One
  request: that of the next attempt. Several: the stream goes on in `Parts`, each a call with a
  continuation of its own, as a prompt does whose outputs one request cannot go on with.
- A handler or a client says by `resume=` how the next request is made: the same once more
  (`Replay`), or one for the rest (`Resuming`) by a function, which may give `ResumeParts`. A
  `ResumeRule` says of each request besides whether its stream goes on at all.
- A reader that waits for the whole drops what it has, and the request is sent once more
  (`Restarting`).
- A stream that another process began is a call of `EndpointClient.generate(after=)`: the items that
  were accepted there are accepted here, before anything is sent.

It waits for nothing and looks at no clock: `RetryPolicy` says whether another attempt follows,
`StreamInvocation` carries both out. For requests of tokens the rest is made by
`kvrouter/routing/token_rule.py`, and with types by `llm/continuing.py`.
"""

from __future__ import annotations

from array import array
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from dynbus.actors.declaring.resume import ResumeParts, ResumeRule
from dynbus.bus.errors import DynbusError, ResumeMismatch, StreamLost, describe_exception

RESUME_BYTES: Final = 4 << 20
"""Bytes of accepted items that are kept of one stream, so that it can go on with them."""

MOST_MARKS: Final = 1024
"""Digests on the way that a replay compares with, at most."""

_DIGEST: Final = 16
_SIZE: Final = 4


class NextRequest(NamedTuple):
    """The request of the next attempt.

    Attributes:
        data: the encoded request.
        request: the same for routers, decoded.
        part: what is known of the part of the stream that it goes on with, where it is one of
            several requests.
    """

    data: bytes
    request: Any
    part: Continuation | None = None


class Continuation(Protocol):
    """The state of one stream at its caller, from which it can go on elsewhere.

    Attributes:
        is_handed_on: whether its instance ends it early where it drains, since another goes on.
    """

    is_handed_on: ClassVar[bool]

    @property
    def accepted(self) -> int:
        """Items that the reader was shown, of all attempts."""
        ...

    def accept(self, items: Sequence[bytes]) -> Sequence[bytes]:
        """The part of the next items of the present attempt that the reader is shown.

        Raises:
            ResumeMismatch: they contradict what it was shown before.
        """
        ...

    def check_end(self) -> None:
        """The present attempt has ended well.

        Raises:
            ResumeMismatch: before all that the reader was shown came again.
        """
        ...

    def next_requests(self) -> Sequence[NextRequest]:
        """The requests that are sent next; nothing when nothing is left to come, and the stream
        ends well.

        Of one, the items that follow are those of the next attempt. Of several, each goes on with a
        part of the stream, and nothing follows here.

        Raises:
            DynbusError: the stream cannot go on; it says why.
        """
        ...


Resume = Callable[[bytes, Any], Continuation | None]
"""The rule by which streams of a handler or a client go on: makes the continuation of a call, of
its encoded request and the same decoded; None for one that does not go on. `Replay` is one, and
`resume_by` makes others.
"""

MakeRequests = Callable[[bytes, Sequence[bytes]], Sequence[NextRequest]]
"""Makes the next requests of the first one and all accepted items, both encoded."""


class Replay:
    """The same request once more: what comes again is compared, and not shown a second time.

    Of the accepted items it keeps a running hash, not the items.
    """

    is_handed_on: ClassVar = True

    __slots__ = (
        "_data",
        "_digest",
        "_marks",
        "_position",
        "_replayed",
        "_request",
        "_stride",
        "accepted",
    )

    def __init__(self, data: bytes, request: Any) -> None:
        self._data = data
        self._request = request
        self.accepted = 0
        # Of the accepted items, and of those of the present attempt while they come again.
        self._digest = self._replayed = b""
        self._position = 0
        # The digest after each `_stride` accepted items, so that a difference is found early.
        self._marks: list[bytes] = []
        self._stride = 1

    def __repr__(self) -> str:
        return f"<Replay [{self._position} of {self.accepted} items]>"

    def accept(self, items: Sequence[bytes]) -> Sequence[bytes]:
        ahead = self.accepted - self._position
        if ahead:
            self._compare(items[:ahead])
            items = items[ahead:]
        digest, position = self._digest, self.accepted
        for item in items:
            digest = _next_digest(digest, item)
            position += 1
            if not position % self._stride:
                self._mark(digest)
        self._digest = digest
        if not ahead or items:
            self.accepted = self._position = position
        return items

    def check_end(self) -> None:
        if self._position < self.accepted:
            raise ResumeMismatch(
                f"the stream began again and ended after {self._position} items, but "
                f"{self.accepted} had been delivered"
            )

    def next_requests(self) -> Sequence[NextRequest]:
        self._position = 0
        self._replayed = b""
        return (NextRequest(self._data, self._request),)

    def _compare(self, items: Sequence[bytes]) -> None:
        digest, position, stride, marks = self._replayed, self._position, self._stride, self._marks
        for item in items:
            digest = _next_digest(digest, item)
            position += 1
            known = self._digest if position == self.accepted else b""
            if not position % stride:
                known = marks[position // stride - 1]
            if known and known != digest:
                before = f" or one of the {stride - 1} before it" if stride > 1 else ""
                raise ResumeMismatch(
                    "the stream began again with other items than were delivered: of "
                    f"{self.accepted}, item {position}{before} differs; a handler that is replayed "
                    "gives the same items each time"
                )
        self._replayed, self._position = digest, position

    def _mark(self, digest: bytes) -> None:
        self._marks.append(digest)
        if len(self._marks) > MOST_MARKS:
            # From here on each second one.
            del self._marks[::2]
            self._stride *= 2


class Resuming:
    """Another request, made of the first one and the accepted items: only what is new comes.

    Args:
        make: called when an attempt is lost.
        accepted: items of the whole stream, where this is a part of one.
    """

    is_handed_on: ClassVar = True

    __slots__ = ("_data", "_items", "_make", "_sizes", "accepted")

    def __init__(self, make: MakeRequests, data: bytes, accepted: int = 0) -> None:
        self._make = make
        self._data = data
        self.accepted = accepted
        # One after the other, since an object for each would be larger than most of them; None
        # once there are too many.
        self._items: bytearray | None = bytearray()
        self._sizes = array("I")

    def __repr__(self) -> str:
        return f"<Resuming [{self.accepted} items]>"

    def accept(self, items: Sequence[bytes]) -> Sequence[bytes]:
        self.accepted += len(items)
        kept = self._items
        if kept is not None:
            for item in items:
                kept += item
                self._sizes.append(len(item))
            if len(kept) + _SIZE * len(self._sizes) > RESUME_BYTES:
                self._items = None
                self._sizes = array("I")
        return items

    def check_end(self) -> None:
        return

    def next_requests(self) -> Sequence[NextRequest]:
        if self._items is None:
            raise StreamLost(
                f"its {self.accepted} items are more than the {RESUME_BYTES >> 20} MiB that are "
                "kept to go on with"
            )
        items: list[bytes] = []
        begin = 0
        for size in self._sizes:
            items.append(bytes(self._items[begin : begin + size]))
            begin += size
        made = self._make(self._data, items)
        if len(made) < 2:
            return made
        return [one._replace(part=Resuming(self._make, one.data, self.accepted)) for one in made]


class Restarting:
    """The same request once more, for a reader that waits for the whole: what came is dropped.

    Args:
        drop: has the reader drop what it has; called before the request is sent again.
    """

    # All that was computed would be lost: an instance that drains may finish it.
    is_handed_on: ClassVar = False

    __slots__ = ("_data", "_drop", "_request", "accepted")

    def __init__(self, data: bytes, request: Any, drop: Callable[[], object]) -> None:
        self._data = data
        self._request = request
        self._drop = drop
        # Nothing of it was shown to the caller.
        self.accepted = 0

    def __repr__(self) -> str:
        return "<Restarting>"

    def accept(self, items: Sequence[bytes]) -> Sequence[bytes]:
        return items

    def check_end(self) -> None:
        return

    def next_requests(self) -> Sequence[NextRequest]:
        self._drop()
        return (NextRequest(self._data, self._request),)


def resume_by(
    function: Callable[[Any, list[Any]], Any],
    *,
    label: str,
    decode: Callable[[bytes], Any],
    decode_many: Callable[[Sequence[bytes]], list[Any]],
    encode: Callable[[Any], bytes],
) -> Resume:
    """The class of streams that go on by a function of the user's, of the decoded values.

    Args:
        function: of the request and the accepted items; None when nothing is left to come, and
            `ResumeParts` for several requests. Of a `ResumeRule` alone not each stream goes on.
        label: how errors name it.
        decode, encode: of requests.
        decode_many: of items.
    """

    def make(data: bytes, items: Sequence[bytes]) -> Sequence[NextRequest]:
        try:
            made = function(decode(data), decode_many(items))
            requests: Sequence[Any] = made.requests if isinstance(made, ResumeParts) else (made,)
            return [NextRequest(encode(one), one) for one in requests if one is not None]
        except DynbusError:
            raise
        except (Exception, GeneratorExit, CancelledError, SystemExit) as error:
            # It waits for nothing, so that these are its own, and end no task here. An exit is that
            # of the handler's author: one in the handler does not end the caller's program either.
            raise StreamLost(f"{label} raised {describe_exception(error)}") from error

    def begin(data: bytes, request: Any) -> Continuation | None:
        if isinstance(function, ResumeRule) and not function.applies(request):
            return None
        return Resuming(make, data)

    return begin


def _next_digest(digest: bytes, item: bytes) -> bytes:
    return blake2b(digest + item, digest_size=_DIGEST).digest()
