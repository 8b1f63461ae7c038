"""Requests on routers' tapes, as happenings of a flight: `dynbus dashboard` and `dynbus top` read
them by an entry point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from dynbus.kvrouter.routing import tape

from .replay import TapeEntry, read_record

MOST_OPEN: Final = 65_536
"""Requests of a router that are followed at a time; its tape lacks records where there are more."""

Happened: TypeAlias = tuple[float, str, str, str, Mapping[str, str | int | float | bool]]
"""Unix seconds, a word, whom it happened to, the digest of a request's id, and details."""


@dataclass(slots=True)
class _Request:
    """A request that waits or runs.

    Attributes:
        request: digest of its id.
        asked: seconds of the router's clock.
        one_in: requests of which it alone is on record.
    """

    request: str
    attempt: int
    prompt_tokens: int
    asked: float
    one_in: int = 1
    instance: str = ""
    output_tokens: int = 0


@dataclass(slots=True)
class _Tape:
    """One router's, as far as it was read: requests that wait by their serials, and those that run
    by the numbers of their decisions."""

    target: str
    waiting: dict[int, _Request] = field(default_factory=dict[int, _Request])
    running: dict[int, _Request] = field(default_factory=dict[int, _Request])


class RoutedRequests:
    """Reads what became of requests at routers.

    The words are `route.asked`, `route.sent`, `route.first`, `route.reused`, `route.grown`,
    `route.ended`, `route.refused` and `route.left`, of the component that is routed to, and
    `route.gone`, of an instance that has left for good.
    """

    def __init__(self) -> None:
        self._tapes: dict[str, _Tape] = {}

    def __repr__(self) -> str:
        return f"<RoutedRequests [{len(self._tapes)} routers]>"

    def take(self, entry: TapeEntry) -> Iterator[Happened]:
        """The happenings that the next record of a flight tells; none where it is of no router."""
        record = read_record(entry)
        if record is None:
            return
        if isinstance(record, tape.Began):
            known = self._tapes.get(entry.recorder)
            if known is None or record.is_new:
                self._tapes[entry.recorder] = _Tape(record.target)
            return
        reader = self._tapes.get(entry.recorder)
        if reader is None:
            # For whom it routes is said when the tape begins anew.
            return
        if isinstance(record, tape.Gone):
            if record.for_good:
                yield entry.time, "route.gone", f"{reader.target}@{record.instance}", "", {}
            return
        for what, request, details in _happened(reader, record, entry.at):
            details = {"router": entry.recorder, "attempt": request.attempt, **details}
            if request.one_in > 1:
                details["one_in"] = request.one_in
            yield entry.time, what, reader.target, request.request, details
        if len(reader.waiting) + len(reader.running) > MOST_OPEN:
            self._tapes[entry.recorder] = _Tape(reader.target)


def _happened(
    reader: _Tape, record: Any, at: float
) -> Iterator[tuple[str, _Request, dict[str, Any]]]:
    if isinstance(record, tape.Submitted):
        request = _Request(
            f"{record.request:016x}", record.attempt, record.prompt_tokens, at, record.one_in
        )
        yield "route.asked", request, {"prompt_tokens": record.prompt_tokens}
        if record.chosen is None and not record.refused:
            reader.waiting[record.serial] = request
        else:
            yield _decided(reader, request, record.chosen, record.refused)
    elif isinstance(record, tape.Released):
        for serial, chosen, refused in record.outcomes:
            if serial in reader.waiting:
                yield _decided(reader, reader.waiting.pop(serial), chosen, refused)
    elif isinstance(record, tape.Withdrawn):
        if record.serial in reader.waiting:
            yield "route.left", reader.waiting.pop(record.serial), {}
    elif isinstance(record, _OF_A_DECISION) and record.number in reader.running:
        yield _goes_on(reader, reader.running[record.number], record, at)


_OF_A_DECISION: Final = (tape.FirstItem, tape.Reused, tape.Grown, tape.Ended)


def _goes_on(
    reader: _Tape,
    request: _Request,
    record: tape.FirstItem | tape.Reused | tape.Grown | tape.Ended,
    at: float,
) -> tuple[str, _Request, dict[str, Any]]:
    """The happening that a record tells of a request that runs."""
    place: dict[str, Any] = {"instance": request.instance}
    match record:
        case tape.FirstItem():
            return "route.first", request, place | {"seconds": at - request.asked}
        case tape.Reused():
            tokens = {"tokens": record.tokens, "prompt_tokens": request.prompt_tokens}
            return "route.reused", request, tokens
        case tape.Grown():
            more = record.tokens - request.output_tokens
            request.output_tokens = record.tokens
            return "route.grown", request, {"tokens": record.tokens, "more": more}
        case _:
            del reader.running[record.number]
            return "route.ended", request, place | {"error": record.error}


def _decided(
    reader: _Tape, request: _Request, chosen: tape.Chosen | None, refused: str
) -> tuple[str, _Request, dict[str, Any]]:
    """The decision for a request: where it goes, or that it is refused."""
    if chosen is None:
        return "route.refused", request, {"error": refused}
    request.instance = f"{chosen.instance}/{chosen.dp_rank}"
    reader.running[chosen.number] = request
    details = {"instance": request.instance, "reason": chosen.reason, "tokens": chosen.reuse}
    return "route.sent", request, details
