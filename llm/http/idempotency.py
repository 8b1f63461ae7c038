"""Requests with an `Idempotency-Key`: the same request again gets the answer that was given.

Plain objects without I/O or clock. What is kept is what was sent: status, headers and body, of a
stream all its events.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, NamedTuple

from dynbus.llm.openai.errors import BadRequest, IdempotencyConflict

HEADER: Final = "idempotency-key"
REPEATED: Final = (b"idempotent-replayed", b"true")
"""Says of an answer that it was given before."""

KEPT_SECONDS: Final = 600.0
MAX_ANSWERS: Final = 4096
MAX_BYTES: Final = 64 * 1024 * 1024
"""Of all answers together, those that are being given included."""
MAX_ANSWER_BYTES: Final = 1024 * 1024
"""Of one; a longer one is not kept."""
MESSAGE_BYTES: Final = 64
"""Bytes that a piece of an answer takes beside its own, about."""

_KEY: Final = re.compile(r"[!-~](?:[ -~]{0,253}[!-~])?")


def digest_of(*parts: bytes) -> bytes:
    """The digest that tells a request from another one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()


class _Known(NamedTuple):
    """An idempotency key and the tenant that it belongs to."""

    tenant: str
    key: str


class Recording:
    """One answer, from the request that it is given to until it is forgotten.

    Attributes:
        tenant: whose request it is.
        digest: of the request.
        messages: what was sent, as ASGI has it.
        size: bytes that it counts for.
        ended_at: when it was complete, on the monotonic clock; None until then.
        is_too_long: whether it is not to be kept.
    """

    __slots__ = ("_kept", "digest", "ended_at", "is_too_long", "messages", "size", "tenant")

    def __init__(self, kept: KeptAnswers, tenant: str, digest: bytes) -> None:
        self._kept = kept
        self.tenant = tenant
        self.digest = digest
        self.messages: list[MutableMapping[str, Any]] = []
        self.size = 0
        self.ended_at: float | None = None
        self.is_too_long = False

    def __repr__(self) -> str:
        state = "being given" if self.ended_at is None else "given"
        return f"<Recording [{state} | {self.size} bytes]>"

    @property
    def is_whole(self) -> bool:
        """True if its end was sent, and nothing of it is missing."""
        last: Mapping[str, Any] = self.messages[-1] if self.messages else {}
        return last.get("type") == "http.response.body" and not last.get("more_body", False)

    def add(self, message: MutableMapping[str, Any]) -> None:
        """Keep what is about to be sent."""
        if self.is_too_long:
            return
        size = MESSAGE_BYTES + len(message.get("body", b""))
        self.size += size
        # Middleware adds headers to what it is given.
        self.messages.append(dict(message))
        self._kept.make_room(self.tenant, size)
        if self.size > MAX_ANSWER_BYTES:
            self.drop()

    def drop(self) -> None:
        """Keep nothing of it."""
        self.is_too_long = True
        self._kept.free(self.tenant, self.size)
        self.messages = []
        self.size = 0


class KeptAnswers:
    """The answers of one front end, by tenant and key; bounded in number, bytes and time.

    Where there are too many, the tenant loses its oldest who has the most: one with no more than
    its share loses nothing to others.
    """

    def __init__(self) -> None:
        self._running: dict[_Known, Recording] = {}
        # Of each tenant that has any, in the order of their ends.
        self._given: dict[str, OrderedDict[str, Recording]] = {}
        self._bytes_of: Counter[str] = Counter()
        self._count = 0
        self._bytes = 0

    def __repr__(self) -> str:
        return (
            f"<KeptAnswers [{len(self._running)} being given, {self._count} given, "
            f"{self._bytes} bytes]>"
        )

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return self._bytes

    def __len__(self) -> int:
        return self._count

    def begin(self, tenant: str, key: str, digest: bytes, now: float) -> Recording:
        """The answer to a request: a new one to be recorded, or one that was given.

        Args:
            digest: of what tells it from another one, see `digest_of`.
            now: on the monotonic clock.

        Raises:
            BadRequest: the key is none (400), or was sent with another request (422).
            IdempotencyConflict: the first such request is still being answered.
        """
        if _KEY.fullmatch(key) is None:
            raise BadRequest(
                "Idempotency-Key has 1 to 255 printable ASCII characters",
                param="Idempotency-Key",
            )
        self._forget_old(now)
        known = _Known(tenant, key)
        given = self._given.get(tenant)
        recorded = self._running.get(known) or (None if given is None else given.get(key))
        if recorded is None:
            self._running[known] = recording = Recording(self, tenant, digest)
            return recording
        if recorded.digest != digest:
            raise BadRequest(
                "this Idempotency-Key was sent with another request: take a new key for each",
                param="Idempotency-Key",
                reason="idempotency_key_reused",
                status=422,
            )
        if recorded.ended_at is None:
            raise IdempotencyConflict(
                "the first request with this Idempotency-Key is still being answered: ask again",
                started=False,
            )
        return recorded

    def finish(
        self, tenant: str, key: str, now: float, *, well: bool, most: int = MAX_ANSWERS
    ) -> None:
        """A request was answered; its answer is kept where it ended well and is whole.

        Args:
            most: answers of this tenant that are kept, the latest ones.
        """
        known = _Known(tenant, key)
        recording = self._running.pop(known, None)
        if recording is None:
            return
        if not well or recording.is_too_long or not recording.is_whole:
            self.free(tenant, recording.size)
            return
        recording.ended_at = now
        self._given.setdefault(tenant, OrderedDict())[key] = recording
        self._count += 1
        while len(self._given.get(tenant, ())) > most:
            self._forget_first(tenant)
        if self._count > MAX_ANSWERS:
            self._forget_first(max(self._given, key=lambda one: len(self._given[one])))

    def make_room(self, tenant: str, size: int) -> None:
        """Count bytes more of a tenant, for which others go where there are too many."""
        self._bytes += size
        self._bytes_of[tenant] += size
        while self._bytes > MAX_BYTES:
            most = max(self._bytes_of, key=self._bytes_of.__getitem__)
            if most in self._given:
                self._forget_first(most)
                continue
            # All that it has is being given: the longest of that is not kept.
            own = [one for known, one in self._running.items() if known.tenant == most]
            max(own, key=lambda one: one.size).drop()

    def free(self, tenant: str, size: int) -> None:
        """Count bytes of a tenant less."""
        self._bytes -= size
        self._bytes_of[tenant] -= size
        if not self._bytes_of[tenant]:
            del self._bytes_of[tenant]

    def _forget_old(self, now: float) -> None:
        for tenant, given in list(self._given.items()):
            while given:
                ended_at = next(iter(given.values())).ended_at
                if ended_at is not None and now - ended_at < KEPT_SECONDS:
                    break
                self._forget_first(tenant)

    def _forget_first(self, tenant: str) -> None:
        given = self._given[tenant]
        _, recording = given.popitem(last=False)
        self._count -= 1
        if not given:
            del self._given[tenant]
        self.free(tenant, recording.size)
