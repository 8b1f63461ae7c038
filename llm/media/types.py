"""The type of an image or a sound, by its first bytes, and how large a picture it is."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, get_args

Modality = Literal["image", "audio"]
"""A kind of content beside text."""

MODALITIES: Final[tuple[Modality, ...]] = get_args(Modality)


MAX_SEGMENTS: Final = 4096
"""Of a JPEG, before the one that says its size; cameras write some ten. Of a GIF, beside those that
its length explains."""


class MediaType(NamedTuple):
    """The type of an image or a sound.

    Attributes:
        name: its media type, such as `image/png`.
    """

    modality: Modality
    name: str

    @property
    def format(self) -> str:
        """The name without its kind, such as `png`; of a sound as OpenAI's API calls it."""
        return "mp3" if self.name == "audio/mpeg" else self.name.partition("/")[2]


PNG: Final = MediaType("image", "image/png")
JPEG: Final = MediaType("image", "image/jpeg")
GIF: Final = MediaType("image", "image/gif")
WEBP: Final = MediaType("image", "image/webp")
WAV: Final = MediaType("audio", "audio/wav")
MP3: Final = MediaType("audio", "audio/mpeg")

KNOWN: Final[Mapping[Modality, str]] = {
    "image": "PNG, JPEG, WebP and GIF",
    "audio": "WAV and MP3",
}
"""The types of each kind, for people."""


def media_type_of(data: bytes) -> MediaType | None:
    """The type of what some bytes begin with, whatever their sender calls it; None for any that is
    not taken."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if data.startswith(b"\xff\xd8\xff"):
        return JPEG
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GIF
    if data.startswith(b"RIFF"):
        return {b"WEBP": WEBP, b"WAVE": WAV}.get(data[8:12])
    if data.startswith(b"ID3") or _is_mp3_frame(data):
        return MP3
    return None


def _is_mp3_frame(data: bytes) -> bool:
    """True if bytes begin with the header of a frame of MPEG-1 or -2, layer III."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE6 != 0xE2:
        return False
    has_version = data[1] & 0x18 != 0x08
    has_rates = data[2] & 0xF0 != 0xF0 and data[2] & 0x0C != 0x0C
    return has_version and has_rates


class Size(NamedTuple):
    """The size of a picture in pixels."""

    width: int
    height: int


def picture_size(data: bytes, kind: MediaType) -> Size | None:
    """The size that an image says it has, before anything is decoded; None where its beginning is
    broken."""
    read = _READERS[kind]
    try:
        size = read(data)
    except (struct.error, IndexError):
        return None
    return size if size is not None and size.width > 0 and size.height > 0 else None


def _png(data: bytes) -> Size | None:
    return Size(*struct.unpack_from(">II", data, 16)) if data[12:16] == b"IHDR" else None


def _gif(data: bytes) -> Size | None:
    """The size of its screen, which decoders have grow to what its frames need."""
    width, height = struct.unpack_from("<HH", data, 6)
    at = 13 + _colors(data[10])
    in_data = False
    # Data is in pieces of 255 bytes, but for the last one of each block.
    for _ in range(MAX_SEGMENTS + len(data) // 128):
        if at >= len(data):
            return Size(width, height)
        byte = data[at]
        if in_data:
            in_data = byte > 0
            at += 1 + byte
        elif byte == 0x3B:
            return Size(width, height)
        elif byte == 0x21:
            # Without a first piece decoders differ in where the block ends, but for a comment.
            if data[at + 1] != 0xFE and not data[at + 2]:
                return None
            at += 2
            in_data = True
        elif byte == 0x2C:
            left, top, across, down, flags = struct.unpack_from("<HHHHB", data, at + 1)
            width, height = max(width, left + across), max(height, top + down)
            at += 11 + _colors(flags)
            in_data = True
        else:
            # Of no block: decoders look for the next one.
            at += 1
    return None


def _colors(flags: int) -> int:
    """The bytes of a table of colours of a GIF, which may be absent."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _jpeg(data: bytes) -> Size | None:
    at = 2
    for _ in range(MAX_SEGMENTS):
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:
            # Bytes that fill up.
            at += 1
            continue
        # The beginning of a frame; among their numbers are those of tables.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return Size(width, height)
        if marker in (0xD9, 0xDA):
            return None
        (length,) = struct.unpack_from(">H", data, at + 2)
        at += 2 + max(2, length)
    return None


def _webp(data: bytes) -> Size | None:
    form = data[12:16]
    if form == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return Size(width & 0x3FFF, height & 0x3FFF)
    if form == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return Size((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if form == b"VP8X":
        width, height = (int.from_bytes(data[at : at + 3], "little") for at in (24, 27))
        return Size(width + 1, height + 1) if len(data) >= 30 else None
    return None


_READERS: Final[Mapping[MediaType, Callable[[bytes], Size | None]]] = {
    PNG: _png,
    JPEG: _jpeg,
    GIF: _gif,
    WEBP: _webp,
}
