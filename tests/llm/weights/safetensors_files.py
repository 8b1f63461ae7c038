"""Writes safetensors files, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.llm.weights.gguf_files import quantised


def write_safetensors(
    path: Path, tensors: Mapping[str, NDArray[np.float32]], type: str = "F32"
) -> Path:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in tensors.items():
        content = quantised(tensor, type)
        header[name] = {
            "dtype": type,
            "shape": tensor.shape,
            "data_offsets": [len(body), len(body) + len(content)],
        }
        body += content
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)
    return path
