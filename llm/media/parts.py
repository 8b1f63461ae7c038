"""Images and sounds among the parts of a chat's messages: what each names, and how an engine gets
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final, NamedTuple

import msgspec

from dynbus.llm.openai.errors import BadRequest, unsupported
from dynbus.llm.openai.fields import fields_of, items_of

from .base64_text import decoded, encoded
from .limits import MediaLimits
from .types import KNOWN, MediaType, Modality, media_type_of, picture_size

_TEXTS: Final = ("text", "refusal")
"""The types of parts that are text."""

_MAX_SHOWN: Final = 40


class NamedPart(NamedTuple):
    """An image or a sound as a request names it.

    Attributes:
        message, place: which message has it, and where in its content.
        text: a URL, or base64.
        begin: the place in the text from which on it is the base64 of the part itself; None where
            it is to be fetched.
        detail: how closely an image is to be looked at, as OpenAI's API has it; None for not said.
    """

    message: int
    place: int
    modality: Modality
    text: str
    begin: int | None = None
    detail: str | None = None

    @property
    def where(self) -> str:
        """The place of the part in the request."""
        return f"messages[{self.message}].content[{self.place}]"

    @property
    def least_bytes(self) -> int:
        """The bytes that it has, or two more than it has; 0 where it is to be fetched."""
        return 0 if self.begin is None else max(0, (len(self.text) - self.begin) // 4 * 3 - 2)


class ReadPart(NamedTuple):
    """An image or a sound that was read.

    Attributes:
        named: as the request names it.
        kind: its type, by its own bytes.
        digest: SHA-256 of its bytes, in hexadecimal digits: by this it is known.
        encoded: its bytes as base64.
    """

    named: NamedPart
    kind: MediaType
    digest: str
    encoded: str

    def as_json(self) -> dict[str, Any]:
        """The part of a chat that engines get, to be written as JSON without a further look at each
        of its characters: always inline, and with its digest as `uuid`, by which vLLM knows it too.
        A client's own `uuid` reaches nobody: it could name another's image."""
        if self.kind.modality == "audio":
            sound = {"data": msgspec.Raw(f'"{self.encoded}"'), "format": self.kind.format}
            return {"type": "input_audio", "input_audio": sound, "uuid": self.digest}
        image: dict[str, Any] = {
            "url": msgspec.Raw(f'"data:{self.kind.name};base64,{self.encoded}"')
        }
        if self.named.detail is not None:
            image["detail"] = self.named.detail
        return {"type": "image_url", "image_url": image, "uuid": self.digest}

    def as_marker(self) -> dict[str, Any]:
        """A text in place of the part, which is the same for the same image alone."""
        return {"type": "text", "text": f"<{self.kind.modality} {self.digest}>"}


def named_parts(messages: Sequence[Mapping[str, Any]]) -> list[NamedPart]:
    """The images and sounds that messages name; none for nearly all requests.

    Raises:
        BadRequest: a part is of a type that no engine gets, or does not fit.
    """
    parts: list[NamedPart] = []
    for at, message in enumerate(messages):
        content: object = message.get("content")
        if isinstance(content, str):
            continue
        for place, part in enumerate(items_of(content)):
            fields = fields_of(part)
            if fields.get("type") not in _TEXTS:
                named = _named(fields, at, place)
                if named is not None:
                    parts.append(named)
    return parts


def _named(part: Mapping[str, Any], message: int, place: int) -> NamedPart | None:
    """The image or the sound of a part that is no text; None for no part at all, which others
    refuse."""
    where, kind = f"messages[{message}].content[{place}]", part.get("type")
    if kind == "image_url":
        given: object = part.get("image_url")
        image = {"url": given} if isinstance(given, str) else fields_of(given)
        url, detail = _text(image, "url", f"{where}.image_url"), None
        if image.get("detail") is not None:
            detail = _text(image, "detail", f"{where}.image_url")
        if url[:5].lower() == "data:":
            return NamedPart(message, place, "image", url, _begin_of(url, where), detail)
        if not url.lower().startswith(("http://", "https://")):
            raise _invalid(
                where,
                f"{url[:_MAX_SHOWN]!r} is no URL of an image: give data:image/png;base64,DATA, or "
                "https://HOST/PATH",
            )
        return NamedPart(message, place, "image", url, None, detail)
    if kind == "input_audio":
        data = _text(fields_of(part.get("input_audio")), "data", f"{where}.input_audio")
        return NamedPart(message, place, "audio", data, 0)
    if isinstance(kind, str):
        raise unsupported(
            where,
            f"parts of the type {kind[:_MAX_SHOWN]!r} are not supported; give text, image_url or "
            "input_audio",
        )
    return None


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The text that an image or a sound has in a field.

    Raises:
        BadRequest: it has none.
    """
    value = fields.get(name)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{name}", "give a string")
    return value


def _begin_of(url: str, where: str) -> int:
    """The place from which on a `data:` URL is base64."""
    head, comma, _ = url[:256].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise _invalid(f"{where}.image_url.url", "a data: URL has to be data:TYPE;base64,DATA")
    return len(head) + 1


def check_count(named: Sequence[NamedPart], limits: MediaLimits) -> None:
    """Refuse more parts than there may be, and inline ones that are too large, before any is
    decoded.

    Raises:
        BadRequest: there are, or one is.
    """
    if len(named) > limits.parts:
        raise _too_large(
            "messages",
            f"{len(named)} images and sounds are too many; at most {limits.parts} are taken",
        )
    for part in named:
        check_size(part.where, part.least_bytes, limits)
    check_total(sum(part.least_bytes for part in named), limits)


def check_size(where: str, size: int, limits: MediaLimits) -> None:
    """Refuse an image or a sound that is too large.

    Raises:
        BadRequest: it is.
    """
    if size > limits.part_bytes:
        raise _too_large(
            where, f"it has more than {limits.part_bytes} bytes, which is the most that is taken"
        )


def check_total(size: int, limits: MediaLimits) -> None:
    """Refuse images and sounds that are too large together.

    Raises:
        BadRequest: they are.
    """
    if size > limits.bytes:
        raise _too_large(
            "messages",
            f"its images and sounds have more than {limits.bytes} bytes together, which is the "
            "most that is taken",
        )


def _invalid(where: str, why: str) -> BadRequest:
    return BadRequest(f"{where}: {why}", param=where, reason="invalid_media")


def _too_large(where: str, why: str) -> BadRequest:
    return BadRequest(f"{where}: {why}", param=where, reason="media_too_large")


def read_part(named: NamedPart, fetched: bytes | None, limits: MediaLimits) -> ReadPart:
    """Read an image or a sound. Takes a while: to be called in a thread.

    Args:
        fetched: its bytes; None where they are in the request.

    Raises:
        BadRequest: it is none of a type that is taken, or too large.
    """
    where = named.where
    if fetched is None:
        try:
            data, text = decoded(named.text, named.begin or 0)
        except ValueError:
            raise _invalid(where, "its data is no base64") from None
    else:
        data, text = fetched, encoded(fetched)
    check_size(where, len(data), limits)
    kind = media_type_of(data)
    if kind is None or kind.modality != named.modality:
        what = "image" if named.modality == "image" else "sound"
        raise _invalid(
            where,
            f"by its bytes it is no {what} of a type that is taken: these are "
            f"{KNOWN[named.modality]}",
        )
    if kind.modality == "image":
        _check_pixels(where, data, kind, limits)
    return ReadPart(named, kind, sha256(data).hexdigest(), text)


def _check_pixels(where: str, data: bytes, kind: MediaType, limits: MediaLimits) -> None:
    size = picture_size(data, kind)
    if size is None:
        raise _invalid(where, f"its beginning is no whole {kind.format.upper()} image")
    if size.width * size.height > limits.pixels:
        raise _too_large(
            where,
            f"it has {size.width} x {size.height} pixels, and at most {limits.pixels} are taken",
        )


def with_json(messages: Sequence[dict[str, Any]], read: Sequence[ReadPart]) -> list[dict[str, Any]]:
    """Messages with the images and sounds that were read, as engines get them."""
    return _replaced(messages, read, ReadPart.as_json)


def with_markers(
    messages: Sequence[dict[str, Any]], read: Sequence[ReadPart]
) -> list[dict[str, Any]]:
    """Messages with a text in place of each image and sound."""
    return _replaced(messages, read, ReadPart.as_marker)


def _replaced(
    messages: Sequence[dict[str, Any]],
    read: Sequence[ReadPart],
    make: Callable[[ReadPart], dict[str, Any]],
) -> list[dict[str, Any]]:
    changed = [*messages]
    for part in read:
        at, place = part.named.message, part.named.place
        content = [*changed[at]["content"]]
        content[place] = make(part)
        changed[at] = {**changed[at], "content": content}
    return changed
