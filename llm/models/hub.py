"""Models of a hub, by `huggingface_hub`: its cache, its tokens, and the files that are needed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dynbus.bus.extras import how_to_install

from .origins import HubSource, ModelUnavailable, OnProgress, Progress

logger = logging.getLogger(__name__)

_TEXTS = (".json", ".txt", ".jinja", ".model")


def wanted_files(files: Iterable[str], file: str = "") -> list[str]:
    """Which files of a repository are needed: weights as safetensors and what describes them, or
    one GGUF file. Never pickled weights, and no code.

    Args:
        file: the GGUF file that was asked for.

    Raises:
        ValueError: there is no model among them that is read here, and what there is.
    """
    names = sorted(name for name in files if not _is_hidden(name))
    if file:
        if file not in names:
            raise ValueError(f"it has no {file}")
        return [file]
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    if weights and "config.json" in top:
        return weights + [name for name in top if name.endswith(_TEXTS)]
    gguf = [name for name in names if name.endswith(".gguf")]
    if len(gguf) == 1:
        return gguf
    if gguf:
        raise ValueError(f"it has {len(gguf)} GGUF files: name one, as hf://org/name/{gguf[0]}")
    raise ValueError("it has neither safetensors with a config.json nor a .gguf file")


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def download(source: HubSource, tell: OnProgress) -> Path:
    """The folder with the needed files of a repository; what the hub's cache has is not got again.

    Raises:
        ModelUnavailable: it cannot be had.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise ModelUnavailable(
            f"{source.repository} is of a hub: {how_to_install('llm')}"
        ) from None
    try:
        # What is there whole is taken without a question to the hub.
        return _cached(huggingface_hub, source)
    except Exception as error:  # noqa: BLE001 - whatever it says: the cache does not have it
        logger.debug("%s is not in the hub's cache: %s", source.repository, error)
    tell(Progress(f"downloading {source.repository}", 0, 0))
    try:
        files = huggingface_hub.HfApi().list_repo_files(source.repository, revision=source.revision)
        return Path(_snapshot(huggingface_hub, source, wanted_files(files, source.file)))
    except Exception as error:  # noqa: BLE001 - network, disk, tokens: the library has many
        text = str(error).strip().partition("\n")[0]
        raise ModelUnavailable(
            f"{source.repository} cannot be downloaded: {text or type(error).__name__}; check its "
            "name, the network, HF_TOKEN and HF_ENDPOINT, or give the path of a folder"
        ) from None


def _cached(hub: Any, source: HubSource) -> Path:
    folder = Path(_snapshot(hub, source, None, local_files_only=True))
    here = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    needed = wanted_files(here, source.file)
    index = folder / "model.safetensors.index.json"
    if not source.file and index.is_file():
        import json

        parts = set(json.loads(index.read_bytes())["weight_map"].values())
        if not parts <= set(needed):
            raise ValueError("some of its weights are not there")
    if not source.file and needed[0].endswith(".safetensors") and "tokenizer.json" not in here:
        raise ValueError("its tokenizer is not there")
    return folder


def _snapshot(hub: Any, source: HubSource, files: list[str] | None, **options: Any) -> str:
    folder: str = hub.snapshot_download(
        source.repository, revision=source.revision, allow_patterns=files, **options
    )
    return folder
