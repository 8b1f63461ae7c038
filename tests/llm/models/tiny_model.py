"""Models made in a moment: a folder, and a wheel with a GGUF file."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from tests.llm.text.tiny_tokenizer import CHATML, tiny_json


def tiny_folder(path: Path, *, template: str | None = CHATML, **config: Any) -> Path:
    """A model without weights, of which a front end can use all."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_bytes(tiny_json())
    (path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 512, "eos_token_id": 2, **config})
    )
    described: dict[str, Any] = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    if template is not None:
        described["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


def tiny_wheel(
    index: Path, files: dict[str, bytes], *, name: str = "tiny-model", version: str = "1.0"
) -> str:
    """Put a wheel with these files into a folder that serves as an index; returns its SHA-256."""
    index.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    path = index / f"{stem}-py3-none-any.whl"
    info = f"{stem}.dist-info"
    whole = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Requires-Dist: no-such-package-at-all\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in whole.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in whole))
    return hashlib.sha256(path.read_bytes()).hexdigest()
