"""The fingerprint of a model: KV blocks of one engine are of use to another with the same one
alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import xxhash

_CHUNK: Final = 1 << 22
_SAMPLE: Final = 4096


def are_same(mine: str, theirs: str) -> bool:
    """True if two fingerprints may be of one model; a missing one may be of any."""
    return not mine or not theirs or mine == theirs


def fingerprint(model: Path, *, samples: int = 0) -> str:
    """A hash of a model's configuration and weights; empty where there are neither.

    It reads the files from end to end, unless samples are enough: a second for some gigabytes that
    are in the page cache. The same model in another format, or quantised otherwise, is another one.

    Args:
        model: a GGUF file, or a folder with `config.json` and safetensors files.
        samples: of 4 KiB that are read of a file which has more than these; 0 for all of it.

    Raises:
        OSError: a file cannot be read.
    """
    files = [model]
    if model.is_dir():
        files = sorted([*model.glob("config.json"), *model.glob("*.safetensors")])
    digest = xxhash.xxh3_128()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size};".encode())
        with file.open("rb") as content:
            if 0 < samples * _SAMPLE < size:
                for at in range(0, size, -(-size // samples)):
                    content.seek(at)
                    digest.update(content.read(_SAMPLE))
                continue
            while chunk := content.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest() if files else ""
