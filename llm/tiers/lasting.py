"""`LastingMemory`: the memory of a host store as a file, which outlives the process that writes it.

A process that is killed leaves what it has written to mapped pages to the system. A file has a key,
an entry for each place, and then the places' bytes; the entry is taken back before the bytes change
and comes after them, so whatever it names is whole. One process has a file at a time, by a lock
that ends with it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError

logger = logging.getLogger(__name__)

KEY_BYTES: Final = 32

MAX_FILES: Final = 64
"""Stores of one kind that a folder has: as many processes use it at a time."""

_ENTRY: Final = np.dtype(
    [
        ("sequence_hash", "<u8"),
        ("parent_hash", "<u8"),
        ("block_hash", "<u8"),
        ("checksum", "<u8"),
        # Of the place: `_UNKNOWN`, or whether its block begins a prompt.
        ("kind", "<u8"),
    ]
)
_UNKNOWN, _FIRST, _LATER = 0, 1, 2


_NAME: Final = re.compile(r"([0-9a-f]{16})-\d+\.kv")

_MOST_NAMED: Final = 8

_NOT_OURS: Final = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR)
"""The errors of opening another user's file, or what is none."""


class LastingBlock(NamedTuple):
    """A block that an earlier process has left.

    Attributes:
        parent_hash: of the block before it; None at the beginning of a prompt.
        checksum: of its bytes.
    """

    place: int
    sequence_hash: int
    parent_hash: int | None
    block_hash: int
    checksum: int


class LastingMemory:
    """The bytes of a store's places, and what they are.

    Args:
        folder: made where it is missing.
        kind: all that has to be the same for blocks to be of use, such as the model.
        places: of the store.
        block_bytes: of each.

    Attributes:
        key: random; the hashes of its blocks are made with it, by each process.
        data: of shape [bytes], uint8.

    Raises:
        ConfigError: the folder cannot be written, or has no file left for this process.
    """

    def __init__(self, folder: Path, kind: str, places: int, block_bytes: int) -> None:
        entries = KEY_BYTES + places * _ENTRY.itemsize
        # So that the first block begins with a page.
        head = -(-entries // mmap.PAGESIZE) * mmap.PAGESIZE
        size = head + places * block_bytes
        digest = hashlib.blake2b(f"1 {kind} {places} {block_bytes}".encode(), digest_size=8)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path, self._file = _lock_one(folder, digest.hexdigest())
            try:
                # When it was begun to be used last.
                os.utime(self._file)
                os.posix_fallocate(self._file, 0, size)
                self._map = mmap.mmap(self._file, size)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise ConfigError(f"host_folder: {folder} cannot be used: {error}") from error
        _tell_unused(folder, digest.hexdigest())
        self._entries: NDArray[Any] = np.frombuffer(self._map, _ENTRY, places, KEY_BYTES)
        if not any(self._map[:KEY_BYTES]):
            # What is named there was named by a key that a host without power has not written.
            self._entries["kind"] = _UNKNOWN
            self._map[:KEY_BYTES] = secrets.token_bytes(KEY_BYTES)
        self.key = self._map[:KEY_BYTES]
        self.data: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, offset=head)

    def __repr__(self) -> str:
        return f"<LastingMemory {self.path}>"

    def close(self) -> None:
        """Leave the file to other processes; more calls change nothing. Nothing may be read or
        written after that."""
        if self._file < 0:
            return
        # The mapping, which has a descriptor of its own, ends with the last view of it.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)
        self._file = -1

    def blocks(self) -> Iterator[LastingBlock]:
        """The blocks that are there."""
        for place in np.flatnonzero(self._entries["kind"] != _UNKNOWN).tolist():
            entry = self._entries[place]
            is_first = int(entry["kind"]) == _FIRST
            yield LastingBlock(
                place,
                int(entry["sequence_hash"]),
                None if is_first else int(entry["parent_hash"]),
                int(entry["block_hash"]),
                int(entry["checksum"]),
            )

    def drop(self, places: Iterable[int]) -> None:
        """Know nothing of places, whose bytes are about to change or of no use."""
        self._entries["kind"][list(places)] = _UNKNOWN

    def forget(self, sequence_hashes: Sequence[int]) -> None:
        """Know nothing of blocks, wherever they are."""
        names = np.array(sequence_hashes, np.uint64)
        self._entries["kind"][np.isin(self._entries["sequence_hash"], names)] = _UNKNOWN

    def note(self, block: LastingBlock) -> None:
        """Name a block whose bytes are there."""
        entry = self._entries[block.place]
        entry["sequence_hash"] = block.sequence_hash
        entry["parent_hash"] = block.parent_hash or 0
        entry["block_hash"] = block.block_hash
        entry["checksum"] = block.checksum
        entry["kind"] = _FIRST if block.parent_hash is None else _LATER


class UnusedFile(NamedTuple):
    """A file that no process has.

    Attributes:
        size: bytes that it takes.
        begun: when it was begun to be used last, in Unix seconds.
    """

    path: Path
    size: int
    begun: float


def unused_files(folder: Path, kind: str) -> list[UnusedFile]:
    """The files of other kinds of stores that no process has, the longest unused first.

    Args:
        kind: the one that is not looked at, as files name it.
    """
    unused: list[UnusedFile] = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or match[1] == kind:
            continue
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            # It is another user's, a link, or gone.
            continue
        try:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                unused.append(UnusedFile(path, status.st_blocks * 512, status.st_mtime))
        except BlockingIOError:
            # A process has it.
            pass
        finally:
            os.close(file)
    return sorted(unused, key=lambda one: one.begun)


def _tell_unused(folder: Path, kind: str) -> None:
    """Have operators know of files that nobody may need any more: only they know which models are
    served again."""
    unused = unused_files(folder, kind)
    if not unused:
        return
    named = [
        f"{one.path.name} ({one.size / 2**20:,.0f} MiB, last begun to be used "
        f"{datetime.fromtimestamp(one.begun, UTC):%Y-%m-%d %H:%M} UTC)"
        for one in unused[:_MOST_NAMED]
    ]
    more = f" and {len(unused) - _MOST_NAMED} more" if len(unused) > _MOST_NAMED else ""
    logger.warning(
        "host_folder: no process has these files in %s, which are of other models or sizes of the "
        "store, and take %s MiB until somebody removes them: %s%s",
        folder,
        f"{sum(one.size for one in unused) / 2**20:,.0f}",
        ", ".join(named),
        more,
    )


def _lock_one(folder: Path, name: str) -> tuple[Path, int]:
    """A file that no other process has, and its descriptor."""
    for number in range(MAX_FILES):
        path = folder / f"{name}-{number}.kv"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno in _NOT_OURS and os.path.lexists(path):
                continue
            raise
        try:
            if os.fstat(file).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return path, file
        except BlockingIOError:
            # Another process has it.
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)
    raise OSError(f"{MAX_FILES} processes use it already")
