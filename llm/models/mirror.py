"""The mirror of models in the object store of the bus: what is kept there, read and dropped."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import msgspec

from dynbus import ConfigError, DynbusError, Unavailable
from dynbus.spi import (
    JetStream,
    NoObject,
    NoStream,
    ObjectBucket,
    ObjectStore,
)

from .downloads import STALL_TIMEOUT
from .manifest import (
    DEFAULT_REVISION,
    PART_BYTES,
    Manifest,
    manifest_name,
    model_in_name,
    model_of,
    part_in,
    part_name,
    read_manifest,
)
from .origins import HubSource, ModelUnavailable, OnProgress, Progress

MIRROR_BUCKET: Final = "dynbus_mirror"
GIB: Final = 1024**3
MAX_BYTES: Final = 32 * GIB
"""Bytes that the bucket may hold unless its maker says otherwise. The server sets them aside."""

LISTING_TIMEOUT: Final = 60.0
DROPPING_TIMEOUT: Final = 600.0
_FULL: Final = "StreamFull"
_NO_ROOM: Final = "NoRoom"
"""Codes of errors: of a bucket that is full, and of a server."""

_ROUNDS: Final = 3
"""Looks at whether all parts of a model are there, before its manifest is written."""


def mirror_bucket(max_bytes: int | None = None) -> ObjectBucket:
    """The bucket of the mirror.

    Args:
        max_bytes: that it may hold, where it is made.
    """
    return ObjectBucket(
        MIRROR_BUCKET, max_bytes=max_bytes, description="dynbus: files of mirrored models"
    )


class MirroredModel(NamedTuple):
    """A model in the mirror.

    Attributes:
        revisions: by which it is asked for, its commit left out.
    """

    manifest: Manifest
    revisions: tuple[str, ...]


class Mirror:
    """The mirror that a bus has."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream
        self._stream = mirror_bucket().stream.name
        self._objects = ObjectStore(jetstream, mirror_bucket())

    def __repr__(self) -> str:
        return f"<Mirror in {self._stream}>"

    async def find(self, source: HubSource) -> Manifest | None:
        """The manifest of a model; None where the mirror does not have it.

        Raises:
            ModelUnavailable: it cannot be used.
            DynbusError: the mirror cannot be asked.
        """
        try:
            return await self._read(manifest_name(model_of(source), source.revision))
        except NoStream:
            return None
        except NoObject as error:
            if _is_damaged(error):
                raise
            return None

    async def part(self, digest: str) -> bytes:
        """A part.

        Raises:
            NoObject, NoStream: it is not there, or not as it was put.
            Unavailable: it has not come within `STALL_TIMEOUT`.
        """
        return (await self._objects.get(part_name(digest), timeout=STALL_TIMEOUT)).data

    async def models(self) -> list[MirroredModel]:
        """All models, by name.

        Raises:
            ModelUnavailable: a manifest cannot be used.
            DynbusError: the mirror cannot be asked.
        """
        models: dict[tuple[str, str], MirroredModel] = {}
        for name in await self._names():
            named = model_in_name(name)
            if named is None:
                continue
            manifest = await self._read(name)
            key, revision = (manifest.model, manifest.commit), named[1]
            before = models.get(key, MirroredModel(manifest, ()))
            added = () if revision == manifest.commit else (revision,)
            models[key] = MirroredModel(manifest, (*before.revisions, *added))
        return [models[key] for key in sorted(models)]

    async def put(
        self,
        manifest: Manifest,
        revision: str | None,
        folder: Path,
        progress: OnProgress,
        *,
        check: bool = False,
        max_bytes: int | None = None,
    ) -> int:
        """Keep a model; parts that are there already are not put again.

        Args:
            folder: that has its files.
            check: read what is there already, and put again what is damaged.
            max_bytes: that the bucket may hold, where it is made now; `MAX_BYTES` unless given.

        Returns:
            The bytes that were put.

        Raises:
            ConfigError: the bucket has no room, or another limit; or a file has changed meanwhile.
            DynbusError: it cannot be stored.
        """
        await self._ensure(max_bytes)
        put, damaged = 0, set[str]()
        if check:
            damaged = await self._damaged_parts(manifest, progress)
        for _ in range(_ROUNDS):
            # Who drops what no manifest names may have dropped some meanwhile.
            missing = (manifest.parts - await self._stored_parts()) | damaged
            if not missing:
                break
            put += await self._put_parts(manifest, missing, folder, progress)
            damaged.clear()
        else:
            raise Unavailable(
                f"parts of {manifest.model} are dropped while they are put: is `dynbus models "
                "unmirror` run at the same time? Mirror it again when that has ended"
            )
        data = msgspec.json.encode(manifest)
        for name in dict.fromkeys((revision or DEFAULT_REVISION, manifest.commit)):
            async with self._making_room():
                await self._objects.put(manifest_name(manifest.model, name), data)
        return put

    async def remove(self, model: str = "", revision: str = "") -> int:
        """Drop a model, and all parts that no manifest names.

        Args:
            model: none for leftovers alone.
            revision: or commit; with it go all names of that commit. All of them unless given.

        Returns:
            The bytes that were freed, as the server counts them.

        Raises:
            ConfigError: there is no such model, or a manifest of another one cannot be read.
            DynbusError: it cannot be dropped.
        """
        try:
            before = (await self._jetstream.stream_info(self._stream)).size
        except NoStream:
            raise ConfigError("nothing was ever mirrored on this bus") from None
        names = await self._names()
        chosen: set[str] = set()
        manifests: dict[str, Manifest | str] = {}
        for name in names:
            named = model_in_name(name)
            if named is None:
                continue
            if named[0] == model and revision in ("", named[1]):
                chosen.add(name)
            try:
                manifests[name] = await self._read(name)
            except (NoObject, ModelUnavailable) as error:
                manifests[name] = str(error)
        commits = {one.commit for name in chosen if isinstance(one := manifests[name], Manifest)}
        kept: set[str] = set()
        for name, manifest in manifests.items():
            if isinstance(manifest, Manifest):
                if manifest.model == model and manifest.commit in commits:
                    chosen.add(name)
                elif name not in chosen:
                    kept |= manifest.parts
            elif name not in chosen:
                raise ConfigError(f"mirror it again or unmirror it first: {manifest}")
        if model and not chosen:
            there = ", ".join(sorted(name.partition("/")[2] for name in manifests)) or "none"
            raise ConfigError(
                f"the mirror has no {model}{revision and '@'}{revision}: it has {there}"
            )
        parts = {part for name in names if (part := part_in(name)) is not None}
        for name in (*sorted(chosen), *map(part_name, sorted(parts - kept))):
            await self._objects.delete(name, forget=True, timeout=LISTING_TIMEOUT)
        await self._objects.drop_abandoned(timeout=DROPPING_TIMEOUT)
        return before - (await self._jetstream.stream_info(self._stream)).size

    async def _read(self, name: str) -> Manifest:
        return read_manifest(name, (await self._objects.get(name)).data)

    async def _names(self) -> list[str]:
        try:
            listed = await self._objects.list_objects(timeout=LISTING_TIMEOUT)
        except NoStream:
            return []
        return [one.name for one in listed]

    async def _stored_parts(self) -> set[str]:
        return {part for name in await self._names() if (part := part_in(name)) is not None}

    async def _damaged_parts(self, manifest: Manifest, progress: OnProgress) -> set[str]:
        damaged: set[str] = set()
        done = 0
        for digest in sorted(manifest.parts & await self._stored_parts()):
            try:
                data = await self.part(digest)
            except NoObject as error:
                if _is_damaged(error):
                    damaged.add(digest)
                # Else it is among those that are missing.
                continue
            if await anyio.to_thread.run_sync(_digest, data) != digest:
                damaged.add(digest)
            done += len(data)
            progress(Progress(f"checking {manifest.model}", done, manifest.size))
        return damaged

    async def _put_parts(
        self, manifest: Manifest, missing: set[str], folder: Path, progress: OnProgress
    ) -> int:
        done, left = 0, set(missing)
        total = sum(
            min(PART_BYTES, file.size - number * PART_BYTES)
            for file in manifest.files
            for number, digest in enumerate(file.parts)
            if digest in missing
        )
        for file in manifest.files:
            for number, digest in enumerate(file.parts):
                if digest not in left:
                    continue
                left.remove(digest)
                at = number * PART_BYTES
                data = await anyio.to_thread.run_sync(_read_part, folder / file.name, at)
                if await anyio.to_thread.run_sync(_digest, data) != digest:
                    raise ConfigError(f"{folder / file.name} has changed while it was read")
                async with self._making_room():
                    await self._objects.put(
                        part_name(digest),
                        data,
                        make_room=self._objects.drop_abandoned,
                        timeout=STALL_TIMEOUT,
                    )
                done += len(data)
                progress(Progress(f"putting {file.name}", done, total))
        return done

    async def _ensure(self, max_bytes: int | None) -> None:
        """Make the bucket where there is none.

        Raises:
            ConfigError: the server has no room for it, or it has another limit than was asked for.
        """
        wanted = max_bytes or MAX_BYTES
        try:
            await ObjectStore(self._jetstream, mirror_bucket(wanted)).ensure()
        except DynbusError as error:
            if error.code != _NO_ROOM:
                raise
            raise ConfigError(
                f"the server has no room for a mirror of {wanted / GIB:g} GiB: give fewer by "
                f"--max-gib, or raise max_file_store of its JetStream ({error})"
            ) from None
        limit = await self._limit()
        if max_bytes not in (None, limit):
            raise ConfigError(
                f"the mirror is there already, for {limit / GIB:g} GiB and not {wanted / GIB:g}: "
                f"leave out --max-gib, or {self._how_to_grow}"
            )

    async def _limit(self) -> int:
        """Bytes that the bucket may hold; 0 for any number."""
        return (await self._jetstream.stream_config(self._stream)).limits.max_bytes or 0

    @property
    def _how_to_grow(self) -> str:
        return f"change max_bytes of its bucket, by `nats stream edit {self._stream} --max-bytes=N`"

    @asynccontextmanager
    async def _making_room(self) -> AsyncGenerator[None]:
        """Say of a bucket that is full how it gets room."""
        try:
            yield
        except DynbusError as error:
            if error.code == _FULL:
                what = f"the mirror is full with {await self._limit() / GIB:.3g} GiB"
                remedy = self._how_to_grow
            elif error.code == _NO_ROOM:
                what = "the server has no room for more of the mirror"
                remedy = "raise max_file_store of its JetStream"
            else:
                raise
            raise ConfigError(
                f"{what}: drop a model by `dynbus models unmirror`, or {remedy}; mirrored again, a "
                f"model goes on where it stopped ({error})"
            ) from None


def _is_damaged(error: NoObject) -> bool:
    """True for an object that is there, and not as it was put."""
    return error.code != NoObject.code


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def _read_part(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(PART_BYTES)
