"""The manifest of a mirrored model: its files, and the parts that each is made of.

A part is bytes of a file under their SHA-256, so that parts which several models share are kept
once, and an upload or a download that was interrupted has lost one part at most.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

import msgspec

from dynbus.llm.generation import DefaultSampling

from .hub_process import wanted_files
from .origins import HubSource, ModelUnavailable

VERSION: Final = 1
PART_BYTES: Final = 16 * 1024 * 1024
"""Of all parts of a file but the last. Who reads or writes parts holds one of them in memory."""

DEFAULT_REVISION: Final = "main"
COMMIT_DIGITS: Final = 40

_MANIFESTS: Final = "models/"
_PARTS: Final = "parts/"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class MirroredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a mirrored model.

    Attributes:
        name: without folders.
        size: in bytes.
        sha256: of all of it, in hexadecimal.
        parts: the SHA-256 of each part, in their order.
    """

    name: str
    size: int
    sha256: str
    parts: list[str]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of a mirrored model, as JSON in the bucket.

    Attributes:
        model: `org/name`, or `org/name/file.gguf` for one file of a repository.
        commit: of the hub; of files that are not from there, `COMMIT_DIGITS` of their digest.
        sampling: that the model's makers recommend, where its files do not say it.
    """

    version: int = VERSION
    model: str
    commit: str
    files: list[MirroredFile]
    sampling: DefaultSampling = DefaultSampling()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def parts(self) -> set[str]:
        """The SHA-256 of all parts."""
        return {part for file in self.files for part in file.parts}


def digest_of_files(files: list[MirroredFile]) -> str:
    """The SHA-256 of what files are called and hold, in hexadecimal."""
    listed = sorted((file.name, file.size, file.sha256) for file in files)
    return sha256(msgspec.json.encode(listed)).hexdigest()


def part_name(digest: str) -> str:
    """The name of a part's object."""
    return _PARTS + digest


def part_in(name: str) -> str | None:
    """The digest of the part that an object is; None for another object."""
    return name.removeprefix(_PARTS) if name.startswith(_PARTS) else None


def model_of(source: HubSource) -> str:
    """The model that a source names, without its revision."""
    return f"{source.repository}/{source.file}" if source.file else source.repository


def manifest_name(model: str, revision: str | None) -> str:
    """The name of a manifest's object."""
    return f"{_MANIFESTS}{model}@{revision or DEFAULT_REVISION}"


def model_in_name(name: str) -> tuple[str, str] | None:
    """The model and the revision that the name of a manifest's object has; None for another
    object."""
    if not name.startswith(_MANIFESTS):
        return None
    model, _, revision = name.removeprefix(_MANIFESTS).partition("@")
    return model, revision


def read_manifest(name: str, data: bytes) -> Manifest:
    """The manifest in an object.

    Raises:
        ModelUnavailable: it is none, it names files that no model here has, or it was written by
            a later release.
    """
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _unusable(name, str(error)) from None
    if manifest.version != VERSION:
        raise ModelUnavailable(
            f"{name} of the bus's mirror has version {manifest.version}, and this dynbus reads "
            f"{VERSION}: use the release of dynbus that wrote it"
        )
    names = [file.name for file in manifest.files]
    try:
        if sorted(wanted_files(names)) != sorted(names) or len(set(names)) != len(names):
            raise _unusable(name, f"{names} are not the files of one model")
    except ValueError as error:
        raise _unusable(name, str(error)) from None
    for file in manifest.files:
        # It becomes a path.
        if "/" in file.name or "\\" in file.name or not file.name.isprintable():
            raise _unusable(name, f"{file.name!r} is no plain name of a file")
        digests = [file.sha256, *file.parts]
        if file.size < 0 or not all(map(_DIGEST.fullmatch, digests)):
            raise _unusable(name, f"what it says of {file.name} cannot be")
    return manifest


def _unusable(name: str, why: str) -> ModelUnavailable:
    return ModelUnavailable(
        f"{name} of the bus's mirror is no manifest: {why[:300]}; have an operator mirror the "
        "model again, by `dynbus models mirror`"
    )
