"""Mirroring of a model: its files become a manifest, and are put into the mirror of the bus."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import anyio

from dynbus import ConfigError
from dynbus.llm.weights.small_files import is_snapshot, resolved_file
from dynbus.spi import JetStream

from .hub_process import check_parts, wanted_files
from .manifest import (
    COMMIT_DIGITS,
    PART_BYTES,
    Manifest,
    MirroredFile,
    digest_of_files,
    model_of,
)
from .mirror import Mirror
from .origins import HubSource, OnProgress, Progress, parse_repository, parse_source
from .source import LocalModel, resolve


class Mirrored(NamedTuple):
    """A model that was mirrored.

    Attributes:
        put: bytes that the mirror did not have before.
    """

    manifest: Manifest
    put: int


async def mirror_model(
    jetstream: JetStream,
    model_path: str | os.PathLike[str],
    name: str | None,
    progress: OnProgress,
    *,
    check: bool = False,
    max_bytes: int | None = None,
) -> Mirrored:
    """Have the files of a model here, and keep them in the mirror of the bus.

    Args:
        model_path: as of `resolve`.
        name: `org/name[/file.gguf][@revision]`, by which it is asked for there; that of its
            repository unless given.
        progress: called from any thread.
        check, max_bytes: as of `Mirror.put`.

    Raises:
        ConfigError: there is no name, or no model; or the mirror is full.
        ModelUnavailable: the files cannot be had.
        DynbusError: they cannot be stored.
    """
    source = parse_source(model_path)
    if isinstance(source, HubSource) and source.only_mirrored:
        raise ConfigError(f"{os.fspath(model_path)} is in the mirror already, or nowhere")
    if name is not None:
        named = parse_repository(name)
    elif isinstance(source, HubSource):
        named = source
    else:
        raise ConfigError(
            f"{os.fspath(model_path)} is no repository of a hub: give the name by which it is "
            "asked for, by --as ORG/NAME"
        )
    model = await resolve(model_path, progress=progress)
    folder, files = await anyio.to_thread.run_sync(_files_of, model, progress)
    manifest = Manifest(
        model=model_of(named),
        commit=_commit_of(model, files),
        files=files,
        sampling=model.sampling,
    )
    put = await Mirror(jetstream).put(
        manifest, named.revision, folder, progress, check=check, max_bytes=max_bytes
    )
    return Mirrored(manifest, put)


def _files_of(model: LocalModel, progress: OnProgress) -> tuple[Path, list[MirroredFile]]:
    """The folder of a model, and the files in it that an engine needs.

    Raises:
        ConfigError: some are missing, or are not to be told to others.
    """
    folder, names = model.path.parent, [model.path.name]
    try:
        if model.format == "folder":
            folder = model.path
            names = wanted_files(path.name for path in folder.iterdir() if path.is_file())
            check_parts(folder, names)
        paths = [resolved_file(folder / name) for name in names]
    except (ValueError, OSError) as error:
        raise ConfigError(f"{model.origin} cannot be mirrored: {error}") from error
    total, done = sum(path.stat().st_size for path in paths), 0
    files: list[MirroredFile] = []
    for name, path in zip(names, paths, strict=True):
        whole, parts, size = sha256(), list[str](), 0
        with path.open("rb") as file:
            while part := file.read(PART_BYTES):
                whole.update(part)
                parts.append(sha256(part).hexdigest())
                size += len(part)
                progress(Progress(f"reading {name}", done + size, total))
        done += size
        files.append(MirroredFile(name=name, size=size, sha256=whole.hexdigest(), parts=parts))
    return folder, files


def _commit_of(model: LocalModel, files: list[MirroredFile]) -> str:
    """The commit of a model: that of the hub's cache where it is from there, else a digest."""
    for path in (model.path, *model.path.parents):
        if is_snapshot(path):
            return path.name
    return digest_of_files(files)[:COMMIT_DIGITS]
