"""The process that gets a repository of a hub by `huggingface_hub`, so that it can be ended.

Its argument is JSON: `repository`, `revision`, `file`, `weights` and `only_cached`. What it says to
others are lines of JSON with the key `dynbus`: what is downloaded, unless all is here already; then
the folder, or why there is none. It is run by its path and imports nothing of dynbus, so that it
starts fast.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

_TEXTS: Final = (".json", ".txt", ".jinja", ".model")
_FOLDER: Final = ["*.safetensors", *(f"*{ending}" for ending in _TEXTS)]
_HIDDEN: Final = [".*", "*/.*"]
_PART: Final = re.compile(r"-\d+-of-(\d+)\.safetensors")


def wanted_files(files: Iterable[str], file: str = "") -> list[str]:
    """The files of a repository that are needed: weights as safetensors and what describes them, or
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


def cached(hub: Any, repository: str, revision: str | None, file: str) -> Path:
    """The folder of a repository that is here whole; the hub is not asked.

    Raises:
        Exception: it is not.
    """

    def snapshot(allow: list[str], ignore: list[str]) -> Path:
        # Newer versions of the library check these files against what the repository has.
        return Path(
            hub.snapshot_download(
                repository,
                revision=revision,
                local_files_only=True,
                allow_patterns=allow,
                ignore_patterns=ignore,
            )
        )

    def names(folder: Path) -> list[str]:
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]

    if file:
        folder = snapshot([file], [])
        wanted_files(names(folder), file)
        return folder
    folder = snapshot(["config.json"], ["*/*"])
    if any(name.endswith(".safetensors") for name in os.listdir(folder)):
        folder = snapshot(_FOLDER, ["*/*", *_HIDDEN])
    else:
        folder = snapshot(["*.gguf"], _HIDDEN)
    here = names(folder)
    needed = wanted_files(here)
    if needed[0].endswith(".safetensors"):
        check_parts(folder, needed)
        if "tokenizer.json" not in here:
            raise ValueError("its tokenizer is not there")
    return folder


def check_parts(folder: Path, names: list[str]) -> None:
    """Check that all of the weights are in a folder.

    Args:
        names: of its files.

    Raises:
        ValueError: some are missing.
    """
    parts = [int(match[1]) for name in names if (match := _PART.search(name))]
    index = folder / "model.safetensors.index.json"
    named: set[str] = set()
    if index.is_file():
        named.update(json.loads(index.read_bytes())["weight_map"].values())
    if not named <= set(names) or (parts and len(parts) < max(parts)):
        raise ValueError("some of its weights are not there")


def described(hub: Any, repository: str, revision: str | None) -> Path | None:
    """The folder in the cache with what describes a repository's model; None without one."""
    try:
        # Newer versions of the library refuse folders that lack what the repository has.
        names = ["config.json", "tokenizer.json"]
        folder = Path(
            hub.snapshot_download(
                repository, revision=revision, local_files_only=True, allow_patterns=names
            )
        )
    except Exception:  # noqa: BLE001 - whatever it says: the cache does not have it
        return None
    return folder if all((folder / name).is_file() for name in names) else None


def get(
    hub: Any, repository: str, revision: str | None, file: str, weights: bool, only_cached: bool
) -> Path:
    """The folder with the needed files of a repository.

    Args:
        weights: whether they are needed where nothing more can be got.
        only_cached: whether the hub is not asked.

    Raises:
        Exception: they cannot be had.
    """
    try:
        return cached(hub, repository, revision, file)
    except Exception as error:
        # Whatever it says: the cache does not have it.
        print(f"{repository} is not in the hub's cache: {error}", flush=True)
        if only_cached:
            raise
    try:
        tree = hub.HfApi().list_repo_tree(repository, revision=revision, recursive=True)
        files = {one.path: one for one in tree if hasattr(one, "blob_id")}
    except Exception:
        folder = None if weights or file else described(hub, repository, revision)
        if folder is not None:
            return folder
        raise
    wanted = wanted_files(files, file)
    blobs = Path(hub.constants.HF_HUB_CACHE).expanduser()
    blobs /= f"models--{repository.replace('/', '--')}/blobs"
    sizes = {_blob(files[name]): files[name].size or 0 for name in wanted}
    _say({"expected": sizes, "blobs": str(blobs)})
    return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=wanted))


def _blob(file: Any) -> str:
    """The name of a file in the cache."""
    name: str = file.lfs.sha256 if file.lfs is not None else file.blob_id
    return name


def _say(fields: dict[str, Any]) -> None:
    print(json.dumps({"dynbus": fields}), flush=True)


def main(argument: str) -> None:
    """Get what the argument says."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import huggingface_hub

    request = json.loads(argument)
    try:
        folder = get(huggingface_hub, **request)
    except Exception as error:  # noqa: BLE001 - network, disk, tokens: the library has many
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        kind = type(error).__name__
        _say({"failed": " ".join(lines)[:600] or kind, "kind": kind})
    else:
        _say({"folder": str(folder)})
    # Threads of the library may still retry something.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
