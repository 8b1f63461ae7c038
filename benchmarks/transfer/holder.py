"""The process whose memory is read and written; it carries out one command at a time."""

from __future__ import annotations

import os
import socket
import threading
import time
from asyncio import Runner, to_thread
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

import numpy as np

from dynbus.bus.lane import new_event_loop
from dynbus.transfer.agent import TransferAgent, open_agent

from .bare import Bare
from .cases import POOL_BYTES
from .memory import Bytes, merged, pool, send
from .through_dynbus import LEASE_SECONDS, connect, memory_of, tokens_of


class Holder(NamedTuple):
    """What the reader has to know of it."""

    process: int
    address: int
    metadata: bytes
    shared: str
    port: int


class Driver:
    """A thread that lets the bare agent answer its peer, as often as is asked."""

    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._pause: float | None = None
        self._is_changed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def drive(self, pause: float | None) -> None:
        """Drive it each so many seconds from now on; without a pause for 0, never for None."""
        self._pause = pause
        self._is_changed.set()

    def _run(self) -> None:
        while True:
            self._is_changed.wait(self._pause)
            self._is_changed.clear()
            if self._pause is not None:
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


class Owner:
    """The holder's agent: one for each size of blocks in turn."""

    def __init__(self, url: str, memory: Bytes) -> None:
        self._url = url
        self._memory = memory
        self._opened = AsyncExitStack()
        self._agent: TransferAgent

    async def open(self, name: str, block_bytes: int) -> None:
        """Give the blocks to an agent of this name, and end the one before."""
        await self.close()
        bus = await connect(self._url, "holder")
        self._opened.push_async_callback(bus.close)
        memory = memory_of(block_bytes, self._memory)
        self._agent = await self._opened.enter_async_context(open_agent(bus, name, memory))

    def grant(self, blocks: Sequence[int]) -> bytes:
        """A ticket for blocks."""
        tokens = len(blocks) * tokens_of(self._agent.memory.layout.block_bytes)
        ticket = self._agent.grant(blocks, tokens=tokens, seconds=LEASE_SECONDS, writable=True)
        return ticket.encode()

    async def close(self) -> None:
        await self._opened.aclose()


async def serve(reader: Connection, url: str) -> None:
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
    sender, driver, owner = Sender(listener, memory), Driver(bare), Owner(url, memory)
    try:
        while (command := await to_thread(reader.recv)) != ("stop",):
            answer: object = None
            match command:
                case "drive", pause:
                    driver.drive(pause)
                case "send", int(block_bytes), list(blocks):
                    sender.choose(block_bytes, blocks)
                case "open", str(name), int(block_bytes):
                    await owner.open(name, block_bytes)
                case ("close",):
                    await owner.close()
                case "grant", list(blocks):
                    answer = owner.grant(blocks)
                case ("cpu",):
                    answer = time.process_time()
                case _:
                    raise ValueError(f"no command: {command}")
            reader.send(answer)
        await owner.close()
    finally:
        shared.unlink()


def hold(reader: Connection, url: str) -> None:
    """The process."""
    try:
        with Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(reader, url))
    finally:
        # Threads that wait on sockets, and views of shared memory, end with the process.
        os._exit(0)
