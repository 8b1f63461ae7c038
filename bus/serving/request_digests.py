"""Requests of which something was promised, in Bloom filters: of a fixed size, and never forgotten
in silence.

What peers may fill must not grow with what they send, and neither may one of them push out what
was promised to another. So nothing is stored of a request but some bits of a Bloom filter. It
may take a request for one of those in it, but never misses one: where it is asked, that is the
mistake which is safe. Filters that are old are dropped whole, and it is known since when.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from typing import Final

FILTER_BITS: Final = 1 << 22
"""Bits of one filter: half a MiB, which is taken when the first request comes."""
REQUESTS: Final = 1 << 18
"""Requests that one filter takes: 16 bits for each, so one in 1,700 others seems to be in it."""
KEPT_SECONDS: Final = 600.0
"""A request is known for so long at least, and for twice as long at most."""

_WORDS: Final = struct.Struct("<8I")


class _Filter:
    """The requests that were added within some time."""

    __slots__ = ("bits", "count", "until")

    def __init__(self, until: float) -> None:
        self.bits = bytearray(FILTER_BITS // 8)
        self.count = 0
        self.until = until

    def add(self, words: tuple[int, ...]) -> None:
        for word in words:
            self.bits[(word >> 3) & (FILTER_BITS // 8 - 1)] |= 1 << (word & 7)
        self.count += 1

    def has(self, words: tuple[int, ...]) -> bool:
        bits = self.bits
        return all(bits[(word >> 3) & (FILTER_BITS // 8 - 1)] >> (word & 7) & 1 for word in words)


class RequestDigests:
    """A set of requests, each a client's id, a number and a secret. Times are of one clock.

    Attributes:
        complete_since: every request that was added at this time or later is known.
    """

    __slots__ = ("_key", "_new", "_old", "complete_since")

    def __init__(self) -> None:
        # Nobody can choose requests that fill the same bits.
        self._key = secrets.token_bytes(16)
        self._new: _Filter | None = None
        self._old: _Filter | None = None
        self.complete_since = float("-inf")

    def __repr__(self) -> str:
        counts = [each.count for each in (self._new, self._old) if each is not None]
        return f"<RequestDigests [{sum(counts)} requests]>"

    def __bool__(self) -> bool:
        """True if any request may be in it."""
        return self._new is not None or self._old is not None

    def add(self, client_id: str, number: int, secret: bytes, now: float) -> bool:
        """Take in a request; False when that was too much, and it is not known from then on."""
        self.forget_old(now)
        words = self._digest(client_id, number, secret)
        if self._new is None:
            self._new = _Filter(now + KEPT_SECONDS)
        if self._new.has(words):
            return True
        if self._new.count >= REQUESTS:
            self.complete_since = now
            return False
        self._new.add(words)
        return True

    def has(self, client_id: str, number: int, secret: bytes) -> bool:
        """True if a request was added; seldom also for one that was not."""
        if not self:
            return False
        words = self._digest(client_id, number, secret)
        return any(each is not None and each.has(words) for each in (self._new, self._old))

    def forget_old(self, now: float) -> None:
        """Drop what was added longer ago than it must be known."""
        if self._old is not None and now >= self._old.until + KEPT_SECONDS:
            self.complete_since = max(self.complete_since, self._old.until)
            self._old = None
        if self._new is not None and now >= self._new.until:
            # No request was added to a filter after its `until`.
            self._old, self._new = self._new, None
            self.forget_old(now)

    def _digest(self, client_id: str, number: int, secret: bytes) -> tuple[int, ...]:
        text = b"%d %b %b" % (number, secret, client_id.encode("utf-8", "surrogatepass"))
        return _WORDS.unpack(hashlib.blake2b(text, digest_size=32, key=self._key).digest())
