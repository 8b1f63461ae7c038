"""Processes with an agent each, which tests drive, freeze, kill and cut off.

A peer is forked from a server that has imported everything but NIXL, in which each peer starts
threads of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from dynbus.bus.bus import Bus
from dynbus.bus.clock import monotonic
from dynbus.bus.config import BusConfig
from dynbus.bus.errors import Cancelled
from dynbus.transfer.agent import TransferAgent, open_agent
from dynbus.transfer.checksums import checksums
from dynbus.transfer.config import TransferConfig
from dynbus.transfer.layout import BlockLayout, KvMemory
from dynbus.transfer.leases import Ticket
from dynbus.transfer.states import State
from dynbus.transfer.transfers import Transfer

ANSWER_SECONDS: Final = 60.0
"""For which the answer of a peer that is alive is waited for."""
QUIET_SECONDS: Final = 0.5
"""For which peers let an abandoned transfer go on before its link is destroyed."""
CLONE_NEWNET: Final = 0x40000000
CLONE_NEWNS: Final = 0x00020000


class PeerOptions(NamedTuple):
    """How a peer is made."""

    server: str
    name: str
    layout: BlockLayout
    ucx: Mapping[str, str] = {}
    namespace: str = ""
    seed: int = 0
    quiet_seconds: float = QUIET_SECONDS


class PeerError(Exception):
    """What a peer answered in place of a result.

    Attributes:
        kind: the name of the exception's class.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Peer:
    """A process with an agent. What is asked of it is in `_Served`."""

    def __init__(self, options: PeerOptions) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.nixl.peers"])
        self._connection, child = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_run, args=(child, options), daemon=True
        )
        self._process.start()
        child.close()
        self.options = options
        self.name = options.name

    def __repr__(self) -> str:
        return f"<Peer {self.name} {self._process.pid}>"

    def ready(self) -> None:
        """Wait until its agent can be found."""
        assert self._answer() == "ready"

    def ask(self, what: str, *args: Any) -> Any:
        """Let it do something, and wait for the answer.

        Raises:
            PeerError: it raised an exception.
        """
        self.tell(what, *args)
        return self._answer()

    def tell(self, what: str, *args: Any) -> None:
        """Let it do something that `answer` is asked of later."""
        self._connection.send((what, args))

    def answer(self) -> Any:
        """What it answers to the first thing told that was not answered."""
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it without a farewell, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """End it, however it is."""
        with suppress(OSError, ProcessLookupError):
            self.signal(signal.SIGCONT)
        with suppress(OSError):
            self._connection.send(("stop", ()))
        self._process.join(10)
        self.kill()
        self._connection.close()

    def _answer(self) -> Any:
        if not self._connection.poll(ANSWER_SECONDS):
            raise AssertionError(f"{self!r} did not answer")
        kind, value = self._connection.recv()
        if kind:
            raise PeerError(kind, value)
        return value


@contextmanager
def peers(*options: PeerOptions) -> Generator[list[Peer]]:
    """Peers that are ready, and ended in the end."""
    started: list[Peer] = []
    try:
        for each in options:
            started.append(Peer(each))
        for peer in started:
            peer.ready()
        yield started
    finally:
        for peer in started:
            peer.close()


# In the process of a peer ---------------------------------------------------------------------


def _run(connection: Connection, options: PeerOptions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if options.namespace:
        enter_namespace(options.namespace)
        _show_its_devices()
    anyio.run(_serve, connection, options)


async def _serve(connection: Connection, options: PeerOptions) -> None:
    memory = KvMemory.allocate(options.layout)
    served = _Served(memory)
    served.fill(options.seed)
    bus = await Bus.connect(BusConfig(servers=(options.server,)), name=options.name)
    try:
        config = TransferConfig(quiet_seconds=options.quiet_seconds, ucx=options.ucx)
        async with open_agent(bus, options.name, memory, config) as agent:
            served.agent = agent
            connection.send(("", "ready"))
            while True:
                try:
                    what, args = await anyio.to_thread.run_sync(connection.recv)
                except EOFError:
                    return
                if what == "stop":
                    return
                try:
                    value = getattr(served, what)(*args)
                    if hasattr(value, "__await__"):
                        value = await value
                    connection.send(("", value))
                except Exception as error:  # noqa: BLE001 - told to the test
                    connection.send((type(error).__name__, str(error)))
    finally:
        await bus.close()


class _Served:
    """What a test can ask of a peer."""

    agent: TransferAgent

    def __init__(self, memory: KvMemory) -> None:
        self.memory = memory
        self._transfers: dict[int, Transfer] = {}

    # As the owner of blocks

    def fill(self, seed: int) -> None:
        """Let every byte depend on a seed; 0 for zeros."""
        arrays: Any = self.memory.owner
        generator = np.random.default_rng(seed)
        for array in arrays:
            if seed:
                array.view(np.uint64)[:] = generator.integers(1, 2**63, array.size // 8, np.uint64)
            else:
                array[:] = 0

    def grant(self, blocks: Sequence[int], seconds: float, writable: bool = False) -> bytes:
        """A ticket for whole blocks."""
        tokens = len(blocks) * self.memory.layout.block_size
        ticket = self.agent.grant(blocks, tokens=tokens, seconds=seconds, writable=writable)
        return ticket.encode()

    def settle(self, ticket: bytes) -> bool:
        """Whether the lease has held."""
        of = Ticket.decode(ticket)
        return self.agent.leases.settle(of.lease_id, of.epoch, monotonic())

    def is_held(self, ticket: bytes) -> bool:
        """Whether the lease has held until now."""
        of = Ticket.decode(ticket)
        return self.agent.leases.held(of.lease_id, of.epoch, monotonic()) is not None

    def release(self, ticket: bytes) -> bool:
        """Whether there was a lease to end."""
        of = Ticket.decode(ticket)
        return self.agent.leases.release(of.lease_id, of.epoch)

    def blocks_held(self) -> int:
        """Blocks under leases whose time is not over."""
        self.agent.leases.expired(monotonic())
        return self.agent.leases.blocks_held

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """Of whole blocks."""
        return checksums(self.memory, blocks, len(blocks) * self.memory.layout.block_size)

    # As the other side

    def start(
        self,
        operation: Any,
        ticket: bytes,
        remote: Sequence[int],
        local: Sequence[int],
        seconds: float,
    ) -> int:
        """Begin a transfer of whole blocks; returns its number."""
        transfer = self.agent.start(
            operation,
            Ticket.decode(ticket),
            remote,
            local,
            tokens=len(local) * self.memory.layout.block_size,
            deadline=monotonic() + seconds,
        )
        self._transfers[transfer.number] = transfer
        return transfer.number

    async def result(self, number: int) -> None:
        """Wait for its result."""
        await self._transfers[number].result()

    async def on_its_way(self, number: int) -> str:
        """Wait until NIXL has some of it; returns its state."""
        transfer = self._transfers[number]
        while transfer.state is State.NEW:
            await anyio.lowlevel.checkpoint()
        return str(transfer.state.value)

    def cancel(self, number: int) -> None:
        """Give it up."""
        self._transfers[number].cancel()

    async def quiet(self, number: int) -> float:
        """Wait until its memory is quiet; returns the seconds that it took."""
        begun = monotonic()
        await self._transfers.pop(number).quiet()
        return monotonic() - begun

    async def cancel_many(
        self, operation: Any, ticket: bytes, count: int, seed: int, blocks: int
    ) -> dict[str, int]:
        """Begin many transfers, a few at a time, and cancel each after a random time."""
        chance = random.Random(seed)
        ends: Counter[str] = Counter()
        limit = anyio.CapacityLimiter(4)
        everything = range(self.memory.layout.blocks)

        async def one() -> None:
            async with limit:
                taken = chance.sample(everything, blocks)
                number = self.start(operation, ticket, taken, taken, 30.0)
                transfer = self._transfers.pop(number)
                match chance.randrange(4):
                    case 0:
                        # Before anything is posted, or as soon as it is.
                        await anyio.lowlevel.checkpoint()
                    case 1:
                        while transfer.state is State.NEW:
                            await anyio.lowlevel.checkpoint()
                    case 2:
                        await anyio.sleep(chance.uniform(0, 0.003))
                    case _:
                        with anyio.move_on_after(chance.uniform(0, 0.02)), suppress(Cancelled):
                            await transfer.result()
                transfer.cancel()
                try:
                    await transfer.result()
                except Cancelled:
                    ends["cancelled"] += 1
                else:
                    ends["done"] += 1
                await transfer.quiet()

        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(one)
        return dict(ends)

    def statistics(self) -> dict[str, int]:
        """What it holds."""
        found = self.agent.statistics
        return {
            "handles": found.open_handles,
            "quarantined": found.quarantined_blocks,
            "links": found.links,
            "destroyed": found.destroyed_links,
        }


# Network namespaces ---------------------------------------------------------------------------


def enter_namespace(name: str) -> None:
    """Let this thread, and those that it starts, live in a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(Path("/run/netns") / name, os.O_RDONLY)
    try:
        if libc.setns(place, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {name} cannot be entered")
    finally:
        os.close(place)


def _show_its_devices() -> None:
    """Let this process see the network devices of its namespace, which UCX looks for in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    private_and_all_below, detach = 1 << 18 | 1 << 14, 2
    if (
        libc.unshare(CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, private_and_all_below, None)
        or libc.umount2(b"/sys", detach)
        or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    ):
        raise OSError(ctypes.get_errno(), "/sys cannot be mounted for a namespace")


@contextmanager
def joined_namespaces() -> Generator[tuple[str, str, Callable[[str], None]]]:
    """Two network namespaces with one link between them, and what sets it "up" or "down".

    It needs root, and the program `ip`.
    """
    names = [f"dynbus-{os.getpid()}-{side}" for side in "ab"]
    links = [f"v{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=20)

    def set_link(state: str) -> None:
        ip("-n", names[1], "link", "set", links[1], state)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1], set_link
    finally:
        for name in names:
            if (Path("/run/netns") / name).exists():
                ip("netns", "del", name)


@contextmanager
def forwarded(namespace: str, port: int) -> Generator[str]:
    """The URL by which a network namespace reaches a server on the loopback of this one."""
    listening = _listen_in_namespace(namespace)
    ends: list[socket.socket] = [listening]

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                far = socket.create_connection(("127.0.0.1", port))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"nats://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        thread.join(10)


def _listen_in_namespace(name: str) -> socket.socket:
    found: list[socket.socket] = []

    def listen() -> None:
        enter_namespace(name)
        found.append(socket.create_server(("127.0.0.1", 0)))

    # The namespace is that of a thread, and ends with it.
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return found[0]
