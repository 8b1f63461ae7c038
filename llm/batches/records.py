"""Files and batches as they are kept and told, and what may become of a batch.

Plain values without I/O or clock; times are Unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from dynbus.llm.openai.errors import BadRequest, unsupported
from dynbus.llm.openai.fields import UNREADABLE
from dynbus.llm.tenants.limits import NO_LIMITS, Limits, models_of, quotas_of
from dynbus.llm.tenants.usage import Tokens

from .lines import LineError

PURPOSE: Final = "batch"
OUTPUT: Final = "batch_output"

ENDPOINTS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
"""The endpoints of which batches are made."""

KEPT: Final = 30 * 24 * 3600
"""Seconds after which a file is gone."""
MIN_WINDOW: Final = 1
MAX_WINDOW: Final = 7 * 24 * 3600
MAX_METADATA: Final = 16

_WINDOW: Final = re.compile(r"([1-9]\d{0,6})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class StoredPart(NamedTuple):
    """A part of a file: its number, its bytes, and its lines."""

    number: int
    size: int
    lines: int


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is there whole.

    Attributes:
        tenant: whose it is; empty where there are no keys.
    """

    id: str
    tenant: str
    filename: str
    purpose: str
    created_at: int
    expires_at: int
    parts: list[StoredPart]

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(part.size for part in self.parts)

    @property
    def lines(self) -> list[int]:
        """The lines of each part."""
        return [part.lines for part in self.parts]

    def as_json(self) -> dict[str, Any]:
        """The file as OpenAI's API tells it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class Status(StrEnum):
    """The status of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset((Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED))


class Counts(msgspec.Struct, frozen=True):
    """The requests of a batch; those that expired or were cancelled have failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


Written = Literal["output", "error"]
"""The kinds of files that batches write."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Its methods give the batch as it is after what they say has happened; where that
    cannot be any more, the batch as it is.

    Attributes:
        limits: those of its tenant that hold for it, as they were when it was made.
        key: the id of the key that made it, where that has limits of its own; else empty.
        key_limits: these.
        usage: of the lines in its output file, once that is there.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    limits: Limits = NO_LIMITS
    key: str = ""
    key_limits: Limits = NO_LIMITS
    status: Status = Status.VALIDATING
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    counts: Counts = Counts()
    usage: Tokens | None = None

    @property
    def models(self) -> tuple[str, ...] | None:
        """The models that its lines may ask; None for all."""
        return models_of(quotas_of(self.tenant, self.limits, self.key, self.key_limits))

    @property
    def has_ended(self) -> bool:
        """True if nothing becomes of it any more."""
        return self.status in ENDED

    def written(self, kind: Written) -> str:
        """The id of a file that it writes."""
        return f"file-{self.id.removeprefix('batch_')}-{kind}"

    def refused(self, errors: Sequence[LineError], now: int) -> Batch:
        """Its file is not valid."""
        if self.has_ended:
            return self
        return replace(self, status=Status.FAILED, errors=list(errors), failed_at=now)

    def begun(self, total: int, now: int) -> Batch:
        """Its file is valid, and its lines are asked."""
        counts = Counts(total, self.counts.completed, self.counts.failed)
        if self.status is Status.VALIDATING:
            return replace(self, status=Status.IN_PROGRESS, in_progress_at=now, counts=counts)
        if self.status is Status.CANCELLING:
            return replace(self, counts=counts)
        return self

    def counted(self, completed: int, failed: int) -> Batch:
        """So many of its lines have ended, of all that there were."""
        known = self.counts
        if self.has_ended or completed + failed <= known.completed + known.failed:
            return self
        return replace(self, counts=Counts(known.total, completed, failed))

    def finalizing(self, now: int) -> Batch:
        """All of its lines have ended, and its files are put together."""
        if self.status is not Status.IN_PROGRESS:
            return self
        return replace(self, status=Status.FINALIZING, finalizing_at=now)

    def ended(
        self,
        output: str | None,
        errors: str | None,
        usage: Tokens,
        *,
        expired: bool,
        lost: int = 0,
        now: int,
    ) -> Batch:
        """Its files are there.

        Args:
            expired: whether lines of it were not done in time.
            lost: lines for whose answers there was no room.
        """
        if self.has_ended:
            return self
        done = replace(self, output_file_id=output, error_file_id=errors, usage=usage)
        if lost:
            why = f"there was no room for the answers of {lost} lines: delete files, and ask again"
            done = replace(done, errors=[LineError(code="storage_full", message=why)])
        if self.status is Status.CANCELLING:
            return replace(done, status=Status.CANCELLED, cancelled_at=now)
        if expired:
            return replace(done, status=Status.EXPIRED, expired_at=now)
        return replace(done, status=Status.COMPLETED, completed_at=now)

    def cancelling(self, now: int) -> Batch:
        """Somebody cancels it.

        Raises:
            BadRequest: it has ended, or is about to.
        """
        if self.status in (Status.CANCELLING, Status.CANCELLED):
            return self
        if self.status not in (Status.VALIDATING, Status.IN_PROGRESS):
            raise BadRequest(
                f"the batch {self.id} is {self.status}, and cannot be cancelled any more",
                status=409,
                reason="batch_not_cancellable",
            )
        return replace(self, status=Status.CANCELLING, cancelling_at=now)

    def as_json(self) -> dict[str, Any]:
        """The batch as OpenAI's API tells it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        for own in ("tenant", "limits", "key", "key_limits"):
            del fields[own]
        errors = fields.pop("errors")
        counts = fields.pop("counts")
        del fields["usage"]
        return {
            "id": fields.pop("id"),
            "object": "batch",
            **fields,
            "errors": {"object": "list", "data": errors} if errors else None,
            "request_counts": counts,
            "usage": None if self.usage is None else _usage_json(self.usage),
        }


def _usage_json(used: Tokens) -> dict[str, Any]:
    """The usage of a batch as OpenAI's API tells it."""
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": used.completion,
        # Those that a model thinks are not told apart here.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt + used.completion,
    }


class BatchRequest(msgspec.Struct, frozen=True):
    """A request for a batch. Fields that nobody here knows are passed over."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: msgspec.Raw | None = None


def read_batch_request(data: bytes) -> BatchRequest:
    """The request that a body holds.

    Raises:
        BadRequest: it is none, or asks for what is not done here.
    """
    try:
        request = msgspec.json.decode(data, type=BatchRequest)
    except UNREADABLE as error:
        raise BadRequest(f"the body is no request for a batch: {error}") from None
    check_endpoint(request.endpoint)
    if request.output_expires_after not in (None, b"null"):
        raise unsupported("output_expires_after", "files are kept for 30 days here")
    metadata: Mapping[str, str] = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(name) > 64 or len(value) > 512 for name, value in metadata.items()
    ):
        raise BadRequest(
            f"metadata: give {MAX_METADATA} pairs at most, names of 64 and texts of 512 characters",
            param="metadata",
        )
    seconds_of_window(request.completion_window)
    return request


def check_endpoint(endpoint: str) -> None:
    """Check that batches are made of an endpoint.

    Raises:
        BadRequest: they are not.
    """
    if endpoint not in ENDPOINTS:
        raise unsupported(
            "endpoint", f"{endpoint[:80]!r} takes no batches here: give {', '.join(ENDPOINTS)}"
        )


def seconds_of_window(text: str) -> int:
    """The seconds of a completion window such as `24h`.

    Raises:
        BadRequest: it is none, or too long.
    """
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match is not None else 0
    if not MIN_WINDOW <= seconds <= MAX_WINDOW:
        raise BadRequest(
            f"completion_window: {text[:20]!r} is none: give 24h, or up to 7d",
            param="completion_window",
        )
    return seconds


T = TypeVar("T", StoredFile, Batch)


class Page(NamedTuple):
    """A page of a list: its entries, and whether more follow."""

    entries: Sequence[StoredFile | Batch]
    has_more: bool

    def as_json(self) -> dict[str, Any]:
        """The page as OpenAI's API tells it."""
        return {
            "object": "list",
            "data": [one.as_json() for one in self.entries],
            "first_id": self.entries[0].id if self.entries else None,
            "last_id": self.entries[-1].id if self.entries else None,
            "has_more": self.has_more,
        }


def page_of(
    entries: Sequence[T], *, after: str = "", limit: int = 20, newest_first: bool = True
) -> Page:
    """A page of what a tenant has.

    Raises:
        BadRequest: there is nothing of the id after which it is to begin.
    """
    ordered = sorted(entries, key=lambda one: (one.created_at, one.id), reverse=newest_first)
    begin = 0
    if after:
        places = [place for place, one in enumerate(ordered) if one.id == after]
        if not places:
            raise BadRequest(f"after: there is no {after[:80]!r}", param="after")
        begin = places[0] + 1
    return Page(ordered[begin : begin + limit], len(ordered) > begin + limit)
