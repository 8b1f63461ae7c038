"""Images and sounds, as few bytes as tell their type; the PNG is a whole one."""

from __future__ import annotations

import base64
import struct
import zlib
from hashlib import sha256
from typing import Any


def png(color: int = 0, width: int = 8, height: int = 8) -> bytes:
    """A picture of one grey."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = zlib.compress((b"\0" + bytes([color]) * width) * min(height, 64))
    content = chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content


def gif(width: int = 8, height: int = 8) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\0\0\0;"


def frame(left: int, top: int, width: int, height: int, colors: bytes = b"") -> bytes:
    """A frame of a GIF, with up to two colours of its own."""
    flags = 0x80 if colors else 0
    place = struct.pack("<HHHHB", left, top, width, height, flags)
    return b"," + place + colors + b"\x02\x02\x44\x01\0"


def animation(*blocks: bytes, width: int = 8, height: int = 8) -> bytes:
    """A GIF of these blocks, with two colours."""
    screen = struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6)
    return b"GIF89a" + screen + b"".join(blocks) + b";"


def jpeg(width: int = 8, height: int = 8) -> bytes:
    tables = b"\xff\xe0\0\x04AB" + b"\xff\xff\xc4\0\x03\0"
    frame = b"\xff\xc0\0\x0b\x08" + struct.pack(">HH", height, width) + b"\x01\x01\x11\0"
    return b"\xff\xd8" + tables + frame + b"\xff\xd9"


def webp(form: bytes = b"VP8X", width: int = 8, height: int = 8) -> bytes:
    if form == b"VP8X":
        sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        data = b"\0\0\0\0" + sides
    elif form == b"VP8L":
        data = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)
    else:
        data = b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height)
    content = b"WEBP" + form + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(content)) + content


def wav() -> bytes:
    return b"RIFF\x24\0\0\0WAVEfmt " + bytes(20)


def mp3() -> bytes:
    return b"\xff\xfb\x90\x00" + bytes(20)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def image(data: bytes, claimed: str = "image/png") -> dict[str, Any]:
    """The part of a chat with an image."""
    return {
        "type": "image_url",
        "image_url": {"url": f"data:{claimed};base64,{encoded(data)}"},
    }


def sound(data: bytes, claimed: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": claimed}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
