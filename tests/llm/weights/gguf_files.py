"""Writes GGUF files, for tests."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q6_K": 14, "BF16": 30}
ALIGNMENT = 32


def write_gguf(
    path: Path,
    metadata: Mapping[str, object],
    tensors: Mapping[str, NDArray[np.float32]],
    type: str = "F32",
) -> Path:
    """Write a file whose matrices are of this type, and whose vectors are F32."""
    path.write_bytes(gguf_bytes(metadata, tensors, type))
    return path


def gguf_bytes(
    metadata: Mapping[str, object], tensors: Mapping[str, NDArray[np.float32]], type: str = "F32"
) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        number, content = _value(value)
        head += _string(key) + struct.pack("<I", number) + content
    body = b""
    for name, tensor in tensors.items():
        kind = type if tensor.ndim > 1 else "F32"
        shape = tensor.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", TYPES[kind], len(body))
        body += _padded(quantised(tensor, kind))
    return _padded(head) + body


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % ALIGNMENT)


def _string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: object) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case Sequence():
            parts = [_value(part) for part in cast("Sequence[object]", value)]
            number = parts[0][0] if parts else 4
            head = struct.pack("<IQ", number, len(parts))
            return 9, head + b"".join(content for _, content in parts)
        case _:
            raise TypeError(f"{value!r} has no type of GGUF here")


def quantised(tensor: NDArray[np.float32], type: str) -> bytes:
    """The bytes of a tensor: what a file of this type has in it."""
    values = np.ascontiguousarray(tensor, np.float32)
    match type:
        case "F32":
            return values.tobytes()
        case "F16":
            return values.astype("<f2").tobytes()
        case "BF16":
            return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        case "Q6_K":
            return bytes(values.size // 256 * 210)
        case _:
            pass
    blocks = values.reshape(-1, 32)
    low = blocks.min(1, keepdims=True)
    if type == "Q8_0":
        scale = _half(np.abs(blocks).max(1, keepdims=True) / 127)
        numbers = np.rint(blocks / scale).astype(np.int8).view(np.uint8)
        return np.hstack([_bytes(scale), numbers]).tobytes()
    if type == "Q4_0":
        scale = _half(np.abs(blocks).max(1, keepdims=True) / 7)
        numbers = (np.rint(blocks / scale) + 8).clip(0, 15).astype(np.uint8)
        return np.hstack([_bytes(scale), _nibbles(numbers)]).tobytes()
    scale = _half((blocks.max(1, keepdims=True) - low) / 15)
    numbers = np.rint((blocks - low) / scale).clip(0, 15).astype(np.uint8)
    return np.hstack([_bytes(scale), _bytes(_half(low)), _nibbles(numbers)]).tobytes()


def _half(values: NDArray[np.float32]) -> NDArray[np.float32]:
    halves = values.astype("<f2").astype(np.float32)
    return np.where(halves == 0, np.float32(1e-4), halves)


def _bytes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def _nibbles(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.bitwise_or(numbers[:, :16], np.left_shift(numbers[:, 16:], 4, dtype=np.uint8))
