"""The process whose memory is read and written; it carries out one command at a time."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

import numpy as np

from .bare import Bare
from .cases import POOL_BYTES
from .memory import Bytes, merged, pool, send


class Holder(NamedTuple):
    """What the reader has to know of it."""

    process: int
    address: int
    metadata: bytes
    shared: str
    port: int


class Spinning:
    """A thread that drives the bare agent when asked to; over TCP, NIXL does not answer without."""

    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._is_wanted = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def switch(self, is_wanted: bool) -> None:
        if is_wanted:
            self._is_wanted.set()
        else:
            self._is_wanted.clear()

    def _run(self) -> None:
        while True:
            self._is_wanted.wait()
            self._bare.agent.get_new_notifs()


class Sender:
    """A thread that sends the blocks in question for each byte that comes from the reader."""

    def __init__(self, listener: socket.socket, memory: Bytes) -> None:
        self._memory = memory
        self._pieces: Sequence[memoryview] = ()
        self._connection, _ = listener.accept()
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._run, daemon=True).start()

    def choose(self, block_bytes: int, blocks: Sequence[int]) -> None:
        self._pieces = merged(self._memory, block_bytes, blocks)

    def _run(self) -> None:
        while self._connection.recv(1):
            send(self._connection, self._pieces)


async def serve(reader: Connection) -> None:
    """Have a pool of memory, and do with it what the reader says until that is `stop`."""
    memory = pool()
    memory[:] = np.random.default_rng(1).integers(0, 256, POOL_BYTES, np.uint8)
    bare = Bare("holder", memory)
    shared = SharedMemory(create=True, size=POOL_BYTES)
    np.copyto(np.ndarray(POOL_BYTES, np.uint8, shared.buf), memory)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    reader.send(Holder(os.getpid(), memory.ctypes.data, bare.metadata, shared.name, port))
    bare.connect(reader.recv())
    sender, spinning = Sender(listener, memory), Spinning(bare)
    try:
        while (command := await asyncio.to_thread(reader.recv)) != "stop":
            match command:
                case "spin", bool(is_wanted):
                    spinning.switch(is_wanted)
                case "send", block_bytes, blocks:
                    sender.choose(block_bytes, blocks)
                case _:
                    raise ValueError(f"no command: {command}")
            reader.send("done")
    finally:
        shared.unlink()


def hold(reader: Connection) -> None:
    """The process."""
    try:
        asyncio.run(serve(reader))
    finally:
        # Threads that wait on sockets, and views of shared memory, end with the process.
        os._exit(0)
