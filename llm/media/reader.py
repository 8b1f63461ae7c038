"""`MediaReader`: the images and sounds of requests, read within limits and hashed once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import anyio
import msgspec
from msgspec.structs import replace

from dynbus.kvrouter import fairness
from dynbus.llm.openai.errors import BadRequest, unsupported
from dynbus.llm.openai.fields import is_array
from dynbus.llm.openai.requests import ChatRequest
from dynbus.llm.shares import SharedRoom
from dynbus.llm.turns import TenantThreads, current_tenant

from .limits import DEFAULT_LIMITS, MediaLimits
from .parts import (
    NamedPart,
    ReadPart,
    check_count,
    check_total,
    named_parts,
    read_part,
    with_json,
    with_markers,
)
from .types import KNOWN, Modality

ROOM_BYTES: Final = 256 * 1024 * 1024
"""Bytes of the images and sounds of all requests that are being read, or twice the most of one
where that is more."""

BYTES_OF_PART: Final = 4096
"""Bytes of text that an image or a sound is taken for where its engine alone counts its tokens: a
thousand tokens, whatever its own bytes are."""

_MANY: Final = 256
"""Parts that are looked through in a thread."""

_NAMES: Final[Mapping[Modality, str]] = {"image": "an image", "audio": "a sound"}


class Fetcher(Protocol):
    """Fetches what URLs name.

    Attributes:
        timeout: seconds for all URLs of a request.
    """

    @property
    def timeout(self) -> float: ...

    async def fetch(self, url: str, where: str, most: int) -> bytes:
        """The bytes at a URL.

        Args:
            where: the part is in the request, for refusals.
            most: bytes that are taken.

        Raises:
            BadRequest: it is not fetched, or is too large, and why.
        """
        ...


class MediaRequest(NamedTuple):
    """A request for a chat as engines get it, with what was read of its images and sounds.

    Attributes:
        request: with a text in place of each, which routers may go by.
        body: as JSON, for engines that take text.
        parts: none where it has text alone.
        text_bytes: of the body without them, each counted as `BYTES_OF_PART`.
    """

    request: ChatRequest
    body: msgspec.Raw
    parts: Sequence[ReadPart]
    text_bytes: int


class MediaReader:
    """Reads the images and sounds of requests.

    Args:
        limits: of one request.
        fetcher: of those that are URLs; None refuses them.
    """

    def __init__(
        self, limits: MediaLimits = DEFAULT_LIMITS, fetcher: Fetcher | None = None
    ) -> None:
        self._limits = limits
        self._fetcher = fetcher
        self._threads = TenantThreads(ThreadPoolExecutor(1, thread_name_prefix="dynbus-media"), 1)
        self._room = SharedRoom(fairness.Shares(max(ROOM_BYTES, 2 * limits.bytes), 1))

    def __repr__(self) -> str:
        return f"<MediaReader {self._limits!r}>"

    async def named(
        self, request: ChatRequest, model: str, takes: Collection[str] | None
    ) -> list[NamedPart]:
        """The images and sounds that a request names.

        Args:
            model: that is asked.
            takes: what it takes beside text; None where nobody has said.

        Raises:
            BadRequest: a part is of a type that no engine gets, or that this model does not take.
        """
        contents = [message.get("content") for message in request.messages]
        count = sum(len(content) for content in contents if is_array(content))
        if not count:
            return []
        find = partial(named_parts, request.messages)
        parts = await self._threads.run(find) if count > _MANY else find()
        for part in parts:
            if takes is not None and part.modality not in takes:
                raise unsupported(part.where, _refusal(part.modality, model, takes))
        check_count(parts, self._limits)
        return parts

    async def read(
        self, request: ChatRequest, body: msgspec.Raw, named: Sequence[NamedPart]
    ) -> MediaRequest:
        """A request with its images and sounds inline, each with its digest.

        Args:
            named: what `named` has found in it, one at least.

        Raises:
            BadRequest: one is none of a type that is taken, cannot be fetched, or is too large.
        """
        limits, tenant = self._limits, current_tenant()
        # Those that are here are in the room for bodies.
        wanted = min(limits.bytes, limits.part_bytes * sum(part.begin is None for part in named))
        await self._room.reserve(tenant, wanted)
        try:
            fetched = await self._fetch(named)
            return await self._threads.run(partial(self._read, request, body, named, fetched))
        finally:
            self._room.give_back(tenant, wanted)

    async def _fetch(self, named: Sequence[NamedPart]) -> dict[str, bytes]:
        """The bytes at the URLs of parts, each of them fetched once."""
        fetched: dict[str, bytes] = {}
        to_fetch = [part for part in named if part.begin is None]
        if not to_fetch:
            return fetched
        if self._fetcher is None:
            raise unsupported(
                to_fetch[0].where,
                "URLs are not fetched here; send the image itself, as data:image/png;base64,DATA",
            )
        left, part = self._limits.bytes, to_fetch[0]
        try:
            with anyio.fail_after(self._fetcher.timeout):
                for part in to_fetch:
                    if part.text not in fetched:
                        most = min(self._limits.part_bytes, left)
                        data = await self._fetcher.fetch(part.text, part.where, most)
                        fetched[part.text], left = data, left - len(data)
        except TimeoutError:
            raise BadRequest(
                f"{part.where}: with those before it was not fetched within "
                f"{self._fetcher.timeout:g} s",
                param=part.where,
                reason="url_not_fetched",
            ) from None
        return fetched

    def _read(
        self,
        request: ChatRequest,
        body: msgspec.Raw,
        named: Sequence[NamedPart],
        fetched: Mapping[str, bytes],
    ) -> MediaRequest:
        read: list[ReadPart] = []
        encoded = 0
        for part in named:
            data = fetched[part.text] if part.begin is None else None
            read.append(read_part(part, data, self._limits))
            encoded += len(read[-1].encoded)
            check_total(encoded // 4 * 3 - 2, self._limits)
        written = with_json(request.messages, read)
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        try:
            changed = msgspec.Raw(msgspec.json.encode({**fields, "messages": written}))
        except RecursionError:
            raise BadRequest("messages: they are nested too deeply", param="messages") from None
        text_bytes = len(changed) - encoded + BYTES_OF_PART * len(read)
        marked = replace(request, messages=with_markers(request.messages, read))
        return MediaRequest(marked, changed, read, text_bytes)


def _refusal(modality: Modality, model: str, takes: Collection[str]) -> str:
    """The reason for which a model does not take a part."""
    others = [one for one in KNOWN if one in takes]
    known = f"text and {' and '.join(others)}" if others else "text only"
    return f"this part is {_NAMES[modality]}, and the model {model} takes {known}"
