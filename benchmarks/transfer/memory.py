"""Pools of memory, their blocks, and the system calls that move them."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .cases import POOL_BYTES

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]

IOV_MAX = 1024
"""Pieces in one system call at most."""


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def pool(fill: int = 0) -> Bytes:
    """Memory whose pages are all there."""
    return np.full(POOL_BYTES, fill, np.uint8)


def merged(memory: Bytes, block_bytes: int, blocks: Sequence[int]) -> list[memoryview]:
    """The blocks' memory; what is adjacent and in order is one piece."""
    whole = memory.data
    runs: list[tuple[int, int]] = []
    for block in blocks:
        begin, end = block * block_bytes, (block + 1) * block_bytes
        if runs and runs[-1][1] == begin:
            begin = runs.pop()[0]
        runs.append((begin, end))
    return [whole[begin:end] for begin, end in runs]


def send(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Send all of them, many in one system call."""
    left = list(pieces)[::-1]
    while left:
        sent = connection.sendmsg(left[: -IOV_MAX - 1 : -1])
        _advance(left, sent)


def receive(connection: socket.socket, pieces: Sequence[memoryview]) -> None:
    """Fill all of them."""
    left = list(pieces)[::-1]
    while left:
        received = connection.recvmsg_into(left[: -IOV_MAX - 1 : -1])[0]
        if not received:
            raise ConnectionError("the holder has closed its socket")
        _advance(left, received)


def _advance(left: list[memoryview], count: int) -> None:
    """Drop so many bytes of what is left; it is in reverse order."""
    while count:
        piece = left.pop()
        if count < len(piece):
            left.append(piece[count:])
            return
        count -= len(piece)


class RemoteRead:
    """`process_vm_readv` of blocks of another process into some of our own."""

    def __init__(
        self, process: int, block_bytes: int, local: tuple[int, Places], remote: tuple[int, Places]
    ) -> None:
        """`local` and `remote` are an address and the blocks from there on."""
        self._process = process
        self._calls = [
            tuple(
                (_Piece * len(part))(
                    *(_Piece(address + int(block) * block_bytes, block_bytes) for block in part)
                )
                for address, blocks in (local, remote)
                for part in [blocks[at : at + IOV_MAX]]
            )
            for at in range(0, len(local[1]), IOV_MAX)
        ]
        self._bytes = block_bytes * len(local[1])

    def __call__(self) -> None:
        count = 0
        for mine, theirs in self._calls:
            size = ctypes.c_ulong(len(mine))
            count += _libc.process_vm_readv(
                self._process, mine, size, theirs, size, ctypes.c_ulong(0)
            )
        if count != self._bytes:
            raise OSError(ctypes.get_errno(), "process_vm_readv did not read everything")
