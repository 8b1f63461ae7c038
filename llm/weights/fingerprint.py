"""The fingerprint of a model: KV blocks of one engine are of use to another with the same one
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

_CHUNK: Final = 1 << 22


def are_same(mine: str, theirs: str) -> bool:
    """Whether two fingerprints may be of one model; of whom there is none, it is believed."""
    return not mine or not theirs or mine == theirs


def fingerprint(model: Path) -> str:
    """A hash of a model's configuration and weights; empty where there are neither.

    It reads the files from end to end: a second for some gigabytes that are in the page cache.
    The same model in another format, or quantised otherwise, is another one.

    Args:
        model: a GGUF file, or a folder with `config.json` and safetensors files.

    Raises:
        OSError: a file cannot be read.
    """
    files = [model]
    if model.is_dir():
        files = sorted([*model.glob("config.json"), *model.glob("*.safetensors")])
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.stat().st_size};".encode())
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest() if files else ""
