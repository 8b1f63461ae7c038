"""Having the files of a model here, wherever they come from."""

from __future__ import annotations

import asyncio
import contextvars
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import anyio

from dynbus import ConfigError
from dynbus.llm.generation import DefaultSampling

from .downloads import Download
from .hub import cached_folder, repository_folder
from .mirror import Mirror
from .mirrored_files import MirrorReader
from .origins import (
    HubSource,
    LocalSource,
    ModelUnavailable,
    OnProgress,
    PackageSource,
    Progress,
    Source,
    parse_source,
)
from .packages import unpacked

_STOP_TIMEOUT: Final = 2.0
"""Seconds that a thread has to end its download; it takes a tenth of one."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The files of a model on this machine.

    Attributes:
        path: the folder, or the GGUF file.
        name: what the model is called unless its user says otherwise.
        origin: where it is from, as it was asked for.
        sampling: that its makers recommend, where its files do not say it.
    """

    path: Path
    format: Literal["folder", "gguf"]
    name: str
    origin: str
    sampling: DefaultSampling = DefaultSampling()


def model_in(folder: Path, name: str, origin: str) -> LocalModel:
    """The model in a folder: of `config.json` and its weights, or the only GGUF file.

    Args:
        name: of the model; empty for what the folder or the file is called.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if (folder / "config.json").is_file():
        return LocalModel(folder, "folder", name or folder.resolve().name, origin)
    files = sorted(folder.rglob("*.gguf"))
    if len(files) == 1:
        return LocalModel(files[0], "gguf", name or files[0].stem, origin)
    if files:
        names = ", ".join(str(path.relative_to(folder)) for path in files)
        raise ConfigError(f"{origin} has {len(files)} GGUF files: name one of {names}")
    configs = sorted(folder.glob("*/config.json"))
    if len(configs) == 1:
        return model_in(configs[0].parent, name, origin)
    raise ConfigError(f"{origin} has no model: neither a config.json nor a .gguf file")


def local_model(source: LocalSource, origin: str) -> LocalModel:
    """The model in a folder or a file of this machine.

    Raises:
        ConfigError: it is none.
    """
    if source.path.is_dir():
        return model_in(source.path, "", origin)
    if source.path.suffix != ".gguf":
        raise ConfigError(f"model_path {origin!r} is no model: give a folder or a .gguf file")
    return LocalModel(source.path, "gguf", source.path.stem, origin)


async def resolve(
    model_path: str | os.PathLike[str],
    *,
    weights: bool = True,
    progress: OnProgress | None = None,
    mirror: Mirror | None = None,
) -> LocalModel:
    """Have the files of a model on this machine; what is here already is not got again.

    Nothing of what is downloaded is run, imported or unpickled. A call that is cancelled ends its
    download, of which nothing is taken for whole. Where another process downloads the same, this
    one waits for it, unless that one stands still.

    Args:
        model_path: a folder, a `.gguf` file, `hf://org/name[/file.gguf][@revision]`, a bare
            `org/name[@revision]`, the same behind `bus://` for one that is mirrored,
            `pip://NAME==VERSION[#sha256=HEX]`, or a short name of `KNOWN`.
        weights: False for who needs only what describes a model of a hub: where the hub cannot be
            asked, its cache need not have more.
        progress: called while something is downloaded or unpacked, or another process is waited
            for; from another thread.

    Raises:
        ConfigError: that is no model.
        ModelUnavailable: it cannot be had.
    """
    source = parse_source(model_path)
    download = Download(progress or _tell_nobody)
    loop = asyncio.get_running_loop()
    reader = None if mirror is None else MirrorReader(mirror, loop, download)
    get = partial(_get, source, os.fspath(model_path), download, weights, reader)
    context = contextvars.copy_context()
    work = loop.run_in_executor(None, context.run, get)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        download.stop()
        # Nobody else hears what becomes of it.
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        with anyio.move_on_after(_STOP_TIMEOUT, shield=True):
            await asyncio.wait({work})
        raise


def _get(
    source: Source, origin: str, download: Download, weights: bool, mirror: MirrorReader | None
) -> LocalModel:
    match source:
        case LocalSource():
            return local_model(source, origin)
        case HubSource():
            mirrored = _mirrored(source, origin, download, mirror)
            if mirrored is not None:
                return mirrored
            folder = repository_folder(source, download, weights=weights)
            return _of_repository(source, folder, origin)
        case PackageSource():
            model = model_in(unpacked(source, download), source.model_name, origin)
            return replace(model, sampling=source.sampling)


def _mirrored(
    source: HubSource, origin: str, download: Download, mirror: MirrorReader | None
) -> LocalModel | None:
    """The model of the commit that the mirror has, from the hub's cache or from there; None where
    it has none.

    Raises:
        ModelUnavailable: it cannot be had; or the mirror has none, and nobody else is asked.
        DownloadStopped: it shall end.
    """
    manifest = None if mirror is None else mirror.find(source)
    if mirror is None or manifest is None:
        if not source.only_mirrored:
            return None
        if mirror is None:
            why = "a bus is known to workers and to register_llm alone"
        else:
            why = "have an operator put it there, by `dynbus models mirror`"
        raise ModelUnavailable(f"{origin} is not in the mirror of a bus: {why}")
    if not source.only_mirrored:
        folder = cached_folder(replace(source, revision=manifest.commit), download)
        if folder is not None:
            return replace(_of_repository(source, folder, origin), sampling=manifest.sampling)
    model = model_in(mirror.folder(manifest), "", origin)
    name = model.name if model.format == "gguf" else source.repository.rpartition("/")[2]
    return replace(model, name=name, sampling=manifest.sampling)


def _of_repository(source: HubSource, folder: Path, origin: str) -> LocalModel:
    """The model in the folder of a repository in the hub's cache."""
    name = source.repository.rpartition("/")[2]
    if source.file:
        return LocalModel(folder / source.file, "gguf", Path(source.file).stem, origin)
    model = model_in(folder, "", origin)
    return model if model.format == "gguf" else LocalModel(folder, "folder", name, origin)


def _tell_nobody(progress: Progress) -> None:
    pass
