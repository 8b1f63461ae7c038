"""Requests that find out what else than text a server takes, and what stands for it in a prompt."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

EDGE: Final = 64
"""Pixels of a side of the picture: more than the patches that models cut pictures into."""

_RATE: Final = 16_000


def probe_request(model: str, modality: str, text: str = "a") -> dict[str, Any]:
    """A chat with a small picture or half a second of silence, for one token."""
    parts = [_PARTS[modality], {"type": "text", "text": text}]
    return {**plain_request(model, text), "messages": [{"role": "user", "content": parts}]}


def plain_request(model: str, text: str = "a") -> dict[str, Any]:
    """The same chat without it."""
    parts = [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": parts}]
    return {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0.0}


def inserted(without: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The tokens that one prompt has in the middle and another has not; none where it is not so."""
    more = len(tokens) - len(without)
    if more <= 0:
        return []
    pairs = enumerate(zip(without, tokens, strict=False))
    begin = next((at for at, (one, other) in pairs if one != other), len(without))
    is_inserted = list(tokens[begin + more :]) == list(without[begin:])
    return list(tokens[begin : begin + more]) if is_inserted else []


def _png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", EDGE, EDGE, 8, 2, 0, 0, 0)
    lines = (b"\0" + b"\x7f" * 3 * EDGE) * EDGE
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(lines))
        + chunk(b"IEND", b"")
    )


def _wav() -> bytes:
    samples = bytes(_RATE)
    form = struct.pack("<HHIIHH", 1, 1, _RATE, 2 * _RATE, 2, 16)
    content = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    content += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(content)) + content


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


_PARTS: Final[Mapping[str, dict[str, Any]]] = {
    "image": {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{_encoded(_png())}"},
    },
    "audio": {"type": "input_audio", "input_audio": {"data": _encoded(_wav()), "format": "wav"}},
}
