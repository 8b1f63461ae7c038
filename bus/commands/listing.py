"""Lists of the server's that come page by page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dynbus.bus.nats.jetstream import NatsJetStream

API_SECONDS: Final = 5.0


async def pages(
    jetstream: NatsJetStream, call: str, asked: Mapping[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    """All that the server lists, page by page.

    Raises:
        NoStream: what is asked about is gone.
        PermissionDenied, Unavailable: the server does not tell.
    """
    begin, total = 0, 1
    while begin < total:
        page = await jetstream.api(call, {**asked, "offset": begin}, timeout=API_SECONDS)
        yield page
        total = int(page.get("total") or 0)
        begin += int(page.get("limit") or total)


async def subject_counts(jetstream: NatsJetStream, stream: str, wanted: str) -> dict[str, int]:
    """The subjects of a stream that are meant, with the number of messages of each.

    Raises:
        NoStream: there is no such stream.
        PermissionDenied, Unavailable: the server does not tell.
    """
    counts: dict[str, int] = {}
    async for page in pages(jetstream, f"STREAM.INFO.{stream}", {"subjects_filter": wanted}):
        counts |= page["state"].get("subjects") or {}
    return counts
