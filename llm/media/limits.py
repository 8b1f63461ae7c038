"""`MediaLimits`: how many images and sounds a request may have, and how large."""

from __future__ import annotations

from typing import Final, NamedTuple

_MIB: Final = 1024 * 1024


class MediaLimits(NamedTuple):
    """The limits of the images and sounds of one request.

    Attributes:
        part_bytes: of one of them.
        parts: how many.
        bytes: of all of them together.
        pixels: of a picture, by what it says of itself.
    """

    part_bytes: int = 8 * _MIB
    parts: int = 32
    bytes: int = 16 * _MIB
    pixels: int = 50_000_000


DEFAULT_LIMITS: Final = MediaLimits()
