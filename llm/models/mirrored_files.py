"""Files of a mirrored model on this host: read part by part, checked, and kept for all processes.

A model appears in the cache in one step, whole and checked, under the digest of its files. Of
several processes that want it at once one reads it, and the others wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import shutil
from collections.abc import Coroutine
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

from dynbus import DynbusError

from .downloads import LOOK_INTERVAL, Download
from .manifest import Manifest, MirroredFile, digest_of_files
from .mirror import Mirror
from .origins import HubSource, ModelUnavailable, Progress
from .packages import cache_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOKING: Final = Progress("looking into the mirror of the bus", 0, 0)


class MirrorReader:
    """A mirror, for the thread of a download.

    Args:
        loop: that the mirror's connection belongs to; it runs on while the thread waits.
    """

    def __init__(self, mirror: Mirror, loop: asyncio.AbstractEventLoop, download: Download) -> None:
        self._mirror = mirror
        self._loop = loop
        self._download = download

    def find(self, source: HubSource) -> Manifest | None:
        """The manifest of a model; None where the mirror does not have it, or cannot be asked for
        a model that may be had elsewhere.

        Raises:
            ModelUnavailable: it cannot be used, or asked for one that is nowhere else.
            DownloadStopped: the download shall end.
        """
        try:
            return self._wait(self._mirror.find(source), _LOOKING)
        except ModelUnavailable:
            raise
        except DynbusError as error:
            why = f"the mirror of the bus cannot be asked for {source.repository}: {error}"
            if source.only_mirrored:
                raise ModelUnavailable(why) from None
            logger.warning("%s", why)
            return None

    def folder(self, manifest: Manifest) -> Path:
        """The folder with the files of a model; one that is here is not got again.

        Raises:
            ModelUnavailable: they cannot be had.
            DownloadStopped: the download shall end. Files that are whole stay for the next one.
        """
        cache = cache_folder()
        kept = cache / f"mirrored-{digest_of_files(manifest.files)}"
        if kept.is_dir():
            return kept
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with self._download.locked(cache / f"{kept.name}.lock", manifest.model):
                if not kept.is_dir():
                    self._get(manifest, kept)
        except OSError as error:
            raise ModelUnavailable(
                f"{manifest.model} cannot be kept in {cache}: {error.strerror or error}; make room "
                "there, or set XDG_CACHE_HOME to a folder that has it"
            ) from None
        return kept

    def _get(self, manifest: Manifest, kept: Path) -> None:
        part = kept.with_name(f"{kept.name}.part")
        part.mkdir(exist_ok=True)
        # A file has its name once it was checked.
        missing = [file for file in manifest.files if not (part / file.name).exists()]
        needed, free = sum(file.size for file in missing), shutil.disk_usage(part).free
        if needed > free:
            raise ModelUnavailable(
                f"{manifest.model} has {needed} bytes that are not here, and {kept.parent} has "
                f"{free} bytes free: make room there, or set XDG_CACHE_HOME"
            )
        done = manifest.size - needed
        for file in missing:
            self._get_file(manifest, file, part, done)
            done += file.size
        part.rename(kept)

    def _get_file(self, manifest: Manifest, file: MirroredFile, folder: Path, before: int) -> None:
        """Read a file of a model.

        Args:
            before: bytes that are here already.
        """
        path = folder / f".{file.name}"
        hashed, size = sha256(), 0
        with path.open("wb") as output:
            for digest in file.parts:
                what = f"downloading {manifest.model} from the bus"
                progress = Progress(what, before + size, manifest.size)
                try:
                    data = self._wait(self._mirror.part(digest), progress)
                except DynbusError as error:
                    raise _unusable(manifest, file, str(error)) from None
                size += len(data)
                if size > file.size:
                    break
                output.write(data)
                hashed.update(data)
        if size != file.size or hashed.hexdigest() != file.sha256:
            path.unlink()
            raise _unusable(manifest, file, f"it does not have the SHA-256 {file.sha256}")
        path.rename(folder / file.name)

    def _wait(self, work: Coroutine[Any, Any, T], progress: Progress) -> T:
        """Have the loop do something meanwhile.

        Raises:
            DownloadStopped: the download shall end.
        """
        outcome = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait((outcome,), LOOK_INTERVAL).done:
                self._download.tell(progress)
            self._download.tell(progress)
            return outcome.result()
        finally:
            outcome.cancel()


def _unusable(manifest: Manifest, file: MirroredFile, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"{file.name} of {manifest.model} cannot be had from the mirror of the bus: {why}; have an "
        "operator put again what is damaged or missing there, by `dynbus models mirror --check`"
    )
