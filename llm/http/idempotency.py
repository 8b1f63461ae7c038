"""Requests with an `Idempotency-Key`: the same request again gets the answer that was given.

Plain objects without I/O or clock. What is kept is what was sent: status, headers and body, of a
stream all its events.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
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
"""What a piece of an answer takes beside its bytes, about."""

_KEY: Final = re.compile(r"[!-~](?:[ -~]{0,253}[!-~])?")


def digest_of(*parts: bytes) -> bytes:
    """What tells a request from another one."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()


class _Known(NamedTuple):
    """Whose key it is, and what it is."""

    tenant: str
    key: str


class Recording:
    """One answer, from the request that it is given to until it is forgotten.

    Attributes:
        digest: of the request.
        messages: what was sent, as ASGI has it.
        size: bytes that it counts for.
        ended_at: when it was complete, on the monotonic clock; None until then.
        is_too_long: whether it is not to be kept.
    """

    __slots__ = ("_kept", "digest", "ended_at", "is_too_long", "messages", "size")

    def __init__(self, kept: KeptAnswers, digest: bytes) -> None:
        self._kept = kept
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
        """Whether its end was sent, and nothing of it is missing."""
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
        has_room = self._kept.make_room(size)
        if self.size > MAX_ANSWER_BYTES or not has_room:
            self.is_too_long = True
            self._kept.free(self.size)
            self.messages = []
            self.size = 0


class KeptAnswers:
    """The answers of one front end, by tenant and key; bounded in number, bytes and time."""

    def __init__(self) -> None:
        self._running: dict[_Known, Recording] = {}
        # In the order of their ends.
        self._given: OrderedDict[_Known, Recording] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return (
            f"<KeptAnswers [{len(self._running)} being given, {len(self._given)} given, "
            f"{self._bytes} bytes]>"
        )

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._given)

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
        found = self._running.get(known) or self._given.get(known)
        if found is None:
            self._running[known] = recording = Recording(self, digest)
            return recording
        if found.digest != digest:
            raise BadRequest(
                "this Idempotency-Key was sent with another request: take a new key for each",
                param="Idempotency-Key",
                reason="idempotency_key_reused",
                status=422,
            )
        if found.ended_at is None:
            raise IdempotencyConflict(
                "the first request with this Idempotency-Key is still being answered: ask again",
                started=False,
            )
        return found

    def end(self, tenant: str, key: str, now: float, *, well: bool) -> None:
        """A request was answered; its answer is kept where it ended well and is whole."""
        known = _Known(tenant, key)
        recording = self._running.pop(known, None)
        if recording is None:
            return
        if not well or recording.is_too_long or not recording.is_whole:
            self.free(recording.size)
            return
        recording.ended_at = now
        self._given[known] = recording
        if len(self._given) > MAX_ANSWERS:
            self._forget_first()

    def make_room(self, size: int) -> bool:
        """Count bytes more, for which the oldest answers go; False where that is not enough."""
        self._bytes += size
        while self._bytes > MAX_BYTES and self._given:
            self._forget_first()
        return self._bytes <= MAX_BYTES

    def free(self, size: int) -> None:
        """Count bytes less."""
        self._bytes -= size

    def _forget_old(self, now: float) -> None:
        while self._given:
            ended_at = next(iter(self._given.values())).ended_at
            if ended_at is not None and now - ended_at < KEPT_SECONDS:
                return
            self._forget_first()

    def _forget_first(self) -> None:
        _, recording = self._given.popitem(last=False)
        self.free(recording.size)
