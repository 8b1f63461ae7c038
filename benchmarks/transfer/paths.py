"""The ways by which blocks are moved; each is prepared for a case, and then run many times."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from dynbus.bus import clock
from dynbus.transfer.agent import TransferAgent, open_agent
from dynbus.transfer.leases import Ticket

from .bare import Bare, Operation
from .cases import POOL_BYTES, Case
from .holder import Holder
from .memory import Bytes, RemoteRead, merged, pool, receive
from .through_dynbus import LEASE_SECONDS, connect, memory_of, tokens_of

Once = Callable[[], Awaitable[None]]


class Path(NamedTuple):
    """One way: `prepared` gives what moves the blocks of a case once.

    Attributes:
        writes: the reader's blocks go to the holder.
        is_bare: the holder's bare agent takes part.
    """

    name: str
    prepared: Callable[[Case], AbstractContextManager[Once]]
    writes: bool = False
    is_bare: bool = False


class Reader:
    """This process's memory, and all ways from the holder's."""

    def __init__(self, holder: Connection, url: str) -> None:
        self._pipe = holder
        self._url = url
        self._agent: TransferAgent
        self.holder: Final[Holder] = holder.recv()
        self.memory: Final[Bytes] = pool()
        self.bare: Final = Bare("reader", self.memory)
        holder.send(self.bare.metadata)
        self._socket = socket.create_connection(("127.0.0.1", self.holder.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.bare.connect(self.holder.metadata)
        self._shared = SharedMemory(name=self.holder.shared)
        self._shared_pool = np.ndarray(POOL_BYTES, np.uint8, self._shared.buf)
        self._source = self._shared_pool.copy()

    def command(self, *command: object) -> Any:
        """Have the holder do something, and wait until it is done."""
        self._pipe.send(command)
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(("stop",))

    def paths(self) -> list[Path]:
        return [
            Path("dynbus", lambda case: self._transfer(case, "read")),
            Path("dynbus-write", lambda case: self._transfer(case, "write"), writes=True),
            Path("nixl", lambda case: self._nixl(case, "READ"), is_bare=True),
            Path("nixl-write", lambda case: self._nixl(case, "WRITE"), writes=True, is_bare=True),
            Path("nixl-initialize", self._initialize, is_bare=True),
            Path("memcpy", lambda case: self._copy(case, self._source)),
            Path("shm", lambda case: self._copy(case, self._shared_pool)),
            Path("process_vm_readv", self._system_call),
            Path("tcp", self._tcp),
        ]

    @asynccontextmanager
    async def agents(self, block_bytes: int) -> AsyncGenerator[None]:
        """An agent for blocks of this size on both sides, each on a bus of its own."""
        self.command("open", f"holder-{block_bytes}", block_bytes)
        bus = await connect(self._url, "reader")
        try:
            memory = memory_of(block_bytes, self.memory)
            async with open_agent(bus, f"reader-{block_bytes}", memory) as self._agent:
                yield
        finally:
            await bus.close()
            self.command("close")

    async def check(self, case: Case, path: Path, once: Once) -> None:
        """Run a path once, and compare the blocks on both sides by bytes read in another way.

        The holder's memory is as before when this returns.
        """
        local, remote = case.places()
        mine = self.memory.reshape(-1, case.block_bytes)
        before = self._remote(case)
        mine[local] = ~before
        await once()
        if not np.array_equal(mine[local], self._remote(case)) or path.writes != np.array_equal(
            mine[local], ~before
        ):
            raise RuntimeError(f"{path.name} has not moved {case.name}")
        if path.writes:
            mine[local] = before
            await once()

    def _remote(self, case: Case) -> Bytes:
        """The holder's blocks as they are."""
        _, remote = case.places()
        found = np.empty((case.blocks, case.block_bytes), np.uint8)
        RemoteRead(
            self.holder.process,
            case.block_bytes,
            (found.ctypes.data, np.arange(case.blocks)),
            (self.holder.address, remote),
        )()
        return found

    @contextmanager
    def _transfer(self, case: Case, operation: Literal["read", "write"]) -> Generator[Once]:
        local, remote = (blocks.astype(np.int32) for blocks in case.places())
        ticket = Ticket.decode(self.command("grant", remote.tolist()))
        tokens = case.blocks * tokens_of(case.block_bytes)
        agent = self._agent

        async def once() -> None:
            deadline = clock.monotonic() + LEASE_SECONDS
            transfer = agent.start(
                operation, ticket, remote, local, tokens=tokens, deadline=deadline
            )
            await transfer.result()

        yield once

    @contextmanager
    def _nixl(self, case: Case, operation: Operation) -> Generator[Once]:
        local, remote = case.places()
        with self.bare.prepared(
            operation, case.block_bytes, local, self.holder.address, remote
        ) as run:
            yield _awaitable(run)

    @contextmanager
    def _initialize(self, case: Case) -> Generator[Once]:
        local, remote = case.places()
        yield _awaitable(
            self.bare.initialized(case.block_bytes, local, self.holder.address, remote)
        )

    @contextmanager
    def _copy(self, case: Case, source: Bytes) -> Generator[Once]:
        local, remote = case.places()
        if case.layout == "contiguous":
            # One copy, as a program that knows it would make.
            yield _awaitable(lambda: np.copyto(self.memory[: case.bytes], source[: case.bytes]))
            return
        mine, theirs = (
            list(array.reshape(-1, case.block_bytes)) for array in (self.memory, source)
        )
        pairs = [(mine[to], theirs[at]) for to, at in zip(local, remote, strict=True)]

        def run() -> None:
            for to, at in pairs:
                to[:] = at

        yield _awaitable(run)

    @contextmanager
    def _system_call(self, case: Case) -> Generator[Once]:
        local, remote = case.places()
        size = case.block_bytes
        if case.layout == "contiguous":
            size, local, remote = case.bytes, local[:1], remote[:1]
        yield _awaitable(
            RemoteRead(
                self.holder.process,
                size,
                (self.memory.ctypes.data, local),
                (self.holder.address, remote),
            )
        )

    @contextmanager
    def _tcp(self, case: Case) -> Generator[Once]:
        local, remote = case.places()
        self.command("send", case.block_bytes, remote.tolist())
        pieces = merged(self.memory, case.block_bytes, local.tolist())

        def run() -> None:
            self._socket.send(b"x")
            receive(self._socket, pieces)

        yield _awaitable(run)


def _awaitable(run: Callable[[], None]) -> Once:
    async def once() -> None:
        run()

    return once
