"""An agent: the memory of a process that peers may read and write, and its own transfers."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from dynbus import ConfigError, DynbusError, Unavailable
from dynbus.spi import Background, Bus, describe_exception, monotonic

from .binding import Indices, NixlAgent, Operation, nixl
from .config import TransferConfig
from .descriptors import AgentDescription
from .errors import InvalidTransfer, TransferFailed
from .exchange import announced, check_agent_name, check_life, look_up
from .layout import KvMemory
from .leases import LeaseTable, Ticket
from .links import Link, Moved, nixl_name
from .pushing import Pushes, life_of
from .quarantine import Quarantine
from .reach import has_rdma, host_name, reaches_directly, transports, writes_to_neighbours
from .transfers import Transfer

logger = logging.getLogger(__name__)

CLOSE_SECONDS: Final = 5.0
"""For which the threads of an agent that is closed are waited for."""
IDLE_SECONDS: Final = 600.0
"""After which a link that nobody uses gives way when another is made."""


@dataclass
class TransferStatistics:
    """The counters of an agent, and what it holds now.

    Attributes:
        transfers: how many ended, by operation and result: "done", "failed", "cancelled",
            "expired".
        bytes: of those that are done.
        seconds: that those took together.
        links: to peers, at this moment.
        destroyed_links: links that were destroyed since a transfer would not end.
        open_handles: requests that NIXL knows at this moment; 0 at rest.
        quarantined_blocks: local blocks that abandoned transfers may still touch; 0 at rest.
    """

    transfers: Counter[tuple[Operation, str]] = field(
        default_factory=Counter[tuple[Operation, str]]
    )
    bytes: int = 0
    seconds: float = 0.0
    links: int = 0
    destroyed_links: int = 0
    open_handles: int = 0
    quarantined_blocks: int = 0


@dataclass
class _Peer:
    """A life of a peer, and the way to it."""

    description: AgentDescription
    is_direct: bool
    used: float
    link: Link | None = None

    @property
    def is_idle(self) -> bool:
        """True if no transfer or connecting goes on with it."""
        return self.link is None or not self.link.is_busy


class TransferAgent:
    """The agent of a process, from `open_agent`.

    Attributes:
        name: by which peers find it.
        epoch: which life of the name this is; no other life ever has it.
        memory: whose blocks it transfers.
        leases: on its blocks, which it has granted to peers.
        quarantine: local blocks that abandoned transfers may still touch.
    """

    def __init__(
        self, bus: Bus, background: Background, name: str, memory: KvMemory, config: TransferConfig
    ) -> None:
        self.bus = bus
        self.name = name
        self.epoch = secrets.token_hex(8)
        self.memory = memory
        self.leases = LeaseTable(self.epoch)
        self.quarantine = Quarantine()
        self._background = background
        self._config = config
        self._counted = TransferStatistics()
        self._peers: dict[str, _Peer] = {}
        self._readers: dict[str, _Peer] = {}
        self._links: dict[str, tuple[Link, asyncio.Event]] = {}
        self._lookups: dict[tuple[str, str], list[Transfer]] = {}
        self._open: dict[int, Transfer] = {}
        self._ticket: Ticket | None = None
        self._leased: Indices = np.empty(0, np.int32)
        self._made = 0
        self._is_closed = False
        self._watch: asyncio.TimerHandle | None = None
        self._host = host_name()
        self._pushes = Pushes(
            bus, background, name, self.epoch, memory, config, self.leases, self._push
        )

    def __repr__(self) -> str:
        return (
            f"<TransferAgent {self.name} [{len(self._open)} transfers | {len(self._links)} links]>"
        )

    @property
    def statistics(self) -> TransferStatistics:
        """The counters of the agent, and what it holds now."""
        counted = self._counted
        links = [link for link, _ in self._links.values()]
        return TransferStatistics(
            transfers=Counter(counted.transfers),
            bytes=counted.bytes,
            seconds=counted.seconds,
            links=len(links) + self._pushes.landings,
            destroyed_links=counted.destroyed_links + sum(link.destroyed for link in links),
            open_handles=sum(link.open_handles for link in links),
            quarantined_blocks=self.quarantine.blocks_held,
        )

    def grant(
        self, blocks: Sequence[int], *, tokens: int, seconds: float, writable: bool = False
    ) -> Ticket:
        """Lease blocks to a peer; returns the ticket with which it may read them.

        Args:
            writable: it may write them too. Then time alone never frees them, since a writer that
                was frozen goes on when it wakes: see `LeaseTable`.

        Raises:
            InvalidTransfer: there are no such blocks, one of them is given twice, they do not hold
                so many tokens, or the time is not usable.
        """
        layout = self.memory.layout
        _checked_ids("local", blocks, layout.blocks)
        if not 0 <= tokens <= len(blocks) * layout.block_size:
            raise InvalidTransfer(
                f"{len(blocks)} blocks of {layout.block_size} tokens do not hold {tokens} tokens"
            )
        lease = self.leases.grant(blocks, seconds, monotonic(), writable=writable)
        return Ticket(
            self.name, self.epoch, lease.lease_id, lease.blocks, tokens, seconds, writable
        )

    def start(
        self,
        operation: Operation,
        ticket: Ticket,
        remote_blocks: Sequence[int] | Indices,
        local_blocks: Sequence[int] | Indices,
        *,
        tokens: int,
        deadline: float,
        remote_start: int = 0,
        local_start: int = 0,
    ) -> Transfer:
        """Begin to move tokens between blocks of a peer and blocks here; never waits.

        Args:
            operation: "read" from the peer, or "write" to it.
            ticket: of the peer, which has leased the blocks.
            remote_blocks, local_blocks: ids in the order of their tokens; an array is read faster
                than a list.
            deadline: on `dynbus.spi.monotonic`; it ends with the ticket's time at the latest.
            remote_start, local_start: the place of the first token, counted from the beginning of
                the first block of the list.

        Raises:
            InvalidTransfer: blocks, tokens or the operation are not usable as given, or the ticket
                is not of these blocks.
            Unavailable: the agent is closed.
        """
        if operation not in ("read", "write"):
            raise InvalidTransfer(f"a transfer is a read or a write, not {operation!r}")
        layout = self.memory.layout
        ours = _checked_ids("local", local_blocks, layout.blocks)
        theirs = self._checked_remote(operation, ticket, remote_blocks)
        if tokens < 1 or local_start < 0 or remote_start < 0:
            raise InvalidTransfer(
                f"{tokens} tokens from {local_start} here and {remote_start} there are no transfer"
            )
        if layout.blocks_of(local_start + tokens) > ours.size:
            raise InvalidTransfer(
                f"{tokens} tokens from {local_start} on do not fit into {ours.size} local "
                f"blocks of {layout.block_size} tokens"
            )
        if ticket.agent == self.name and ticket.epoch == self.epoch:
            raise InvalidTransfer("an agent does not transfer with itself: copy the blocks")
        if not math.isfinite(deadline):
            raise InvalidTransfer(f"a transfer needs a deadline, not {deadline:g}")
        if self._is_closed:
            raise Unavailable(f"agent {self.name} is closed", started=False)
        moved = Moved(operation, theirs, ours, tokens, remote_start, local_start)
        transfer = Transfer(
            self, moved, ticket, ticket.agent, min(deadline, monotonic() + ticket.seconds)
        )
        self._open[transfer.number] = transfer
        if transfer.deadline <= monotonic():
            # The link's thread might be done with it before the loop's next turn.
            transfer.expire()
            return transfer
        peer = self._peers.get(ticket.agent)
        if peer is not None and peer.description.epoch == ticket.epoch:
            self._begin(transfer, peer)
        else:
            self._find(ticket.agent, ticket.epoch, transfer)
        return transfer

    def _checked_remote(
        self, operation: Operation, ticket: Ticket, blocks: Sequence[int] | Indices
    ) -> Indices:
        if self._ticket is not ticket:
            try:
                check_life(ticket.agent, ticket.epoch)
            except ConfigError as error:
                raise InvalidTransfer(f"the ticket is not of an agent: {error}") from error
            # Many transfers may be of one ticket, and of few of its blocks each. Nothing here may
            # take time or memory by how large an id is: the peer chooses it.
            self._leased = np.array(sorted(ticket.blocks), np.int32)
            self._ticket = ticket
        ids = _checked_ids("remote", blocks, int(self._leased[-1]) + 1)
        if not (self._leased[np.searchsorted(self._leased, ids)] == ids).all():
            raise InvalidTransfer(f"the ticket is not of all of the remote blocks {_shown(ids)}")
        if operation == "write" and not ticket.writable:
            raise InvalidTransfer(f"the ticket of {ticket.agent} is for reading")
        return ids

    # Peers ------------------------------------------------------------------------------------

    def _find(self, agent: str, epoch: str, transfer: Transfer) -> None:
        """Begin once the peer's description is known; it is asked for once at a time."""
        waiting = self._lookups.get((agent, epoch))
        if waiting is not None:
            waiting.append(transfer)
            return
        self._lookups[agent, epoch] = [transfer]
        try:
            self._background.start(self._meet, agent, epoch, name=f"{self.name} looks up {agent}")
        except BaseException:
            del self._lookups[agent, epoch]
            transfer.cancel()
            raise

    async def _meet(self, agent: str, epoch: str) -> None:
        error: DynbusError = Unavailable(f"agent {self.name} is closed", started=False)
        peer: _Peer | None = None
        try:
            description = await look_up(self.bus, agent, epoch, seconds=self._config.lookup_seconds)
            peer = self._met(self._peers, description)
        except DynbusError as problem:
            error = problem
        except Exception as problem:
            logger.exception("agent %s could not be looked up", agent)
            error = TransferFailed(f"agent {agent}: {describe_exception(problem)}")
        finally:
            for transfer in self._lookups.pop((agent, epoch)):
                if peer is None:
                    transfer.fail(error)
                else:
                    self._begin(transfer, peer)

    def _met(self, peers: dict[str, _Peer], description: AgentDescription) -> _Peer:
        """Know a life of a peer, in place of an earlier one: what goes on with that fails."""
        now = monotonic()
        for name, peer in list(peers.items()):
            if name == description.agent or (peer.is_idle and now - peer.used > IDLE_SECONDS):
                _forget(peers, peer)
            elif peer.is_idle:
                # Nothing else tells of those that are gone.
                answer = partial(_answered, peers, peer)
                self._pushes.ask_for(life_of(peer.description), answer)
        reads = self._config.reads
        is_direct = reads == "direct" or (
            reads == "auto"
            and reaches_directly(
                transports(self._config.ucx), self._host, description.host, has_rdma=has_rdma()
            )
        )
        peers[description.agent] = peer = _Peer(description, is_direct, now)
        return peer

    def _begin(self, transfer: Transfer, peer: _Peer) -> None:
        peer.used = monotonic()
        if transfer.operation == "read" and not peer.is_direct:
            self._pushes.pull(transfer)
            return
        if peer.link is None:
            self._made += 1
            name = f"{nixl_name(self.name, self.epoch)}.{self._made}"
            peer.link = Link(
                name,
                self.memory,
                peer.description,
                self._config,
                partial(self.bus.to_main, self._stopped, name),
            )
            self._links[name] = peer.link, asyncio.Event()
        transfer.begin(peer.link)

    def _push(self, landing: AgentDescription, moved: Moved, seconds: float) -> Transfer:
        """Write to where a peer wants to read, which has asked for it."""
        ours = _checked_ids("local", moved.local_blocks, self.memory.layout.blocks)
        theirs = _checked_ids("remote", moved.remote_blocks, landing.layout.blocks)
        if self._is_closed:
            raise Unavailable(f"agent {self.name} is closed", started=False)
        if not 0 < seconds < math.inf or moved.tokens < 1:
            raise InvalidTransfer(f"{moved.tokens} tokens within {seconds:g} s are no transfer")
        moved = replace(moved, local_blocks=ours, remote_blocks=theirs)
        transfer = Transfer(self, moved, None, landing.agent, monotonic() + seconds)
        self._open[transfer.number] = transfer
        peer = self._readers.get(landing.agent)
        if peer is None or peer.description != landing:
            peer = self._met(self._readers, landing)
        self._begin(transfer, peer)
        return transfer

    def _stopped(self, name: str) -> None:
        link, stopped = self._links.pop(name)
        stopped.set()
        self._counted.destroyed_links += link.destroyed
        for peers in (self._peers, self._readers):
            peer = peers.get(link.peer.agent)
            if peer is not None and peer.link is link:
                # It broke by itself; another one is made when it is needed.
                peer.link = None

    # Transfers tell ---------------------------------------------------------------------------

    def count(self, transfer: Transfer, result: str) -> None:
        """A transfer is over."""
        self._counted.transfers[transfer.operation, result] += 1
        if result == "done":
            self._counted.bytes += transfer.bytes
            self._counted.seconds += transfer.seconds

    def hold_back(self, transfer: Transfer, way: str) -> None:
        """A transfer was abandoned, and its memory is not quiet."""
        self.quarantine.hold(transfer.number, way, transfer.local_blocks, monotonic())
        if self._watch is None:
            self._watch = self.bus.loop.call_later(self._config.quiet_seconds, self._destroy_late)

    def let_go(self, transfer: Transfer) -> None:
        """The memory of a transfer is quiet."""
        self.quarantine.quiet(transfer.number)
        self._open.pop(transfer.number, None)

    def _destroy_late(self) -> None:
        self._watch = None
        for name in self.quarantine.links_to_destroy(monotonic(), self._config.quiet_seconds):
            if name in self._links:
                self._links[name][0].destroy()
            elif self._pushes.destroy(name):
                self._counted.destroyed_links += 1
        if self.quarantine:
            self._watch = self.bus.loop.call_later(
                self._config.quiet_seconds / 4, self._destroy_late
            )

    # Life -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End all transfers and links, in bounded time."""
        self._is_closed = True
        for transfer in list(self._open.values()):
            transfer.cancel()
        self._peers.clear()
        self._readers.clear()
        ending = list(self._links.values())
        for link, _ in ending:
            link.close()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            for _, stopped in ending:
                await stopped.wait()
        await self._pushes.close()
        if self._watch is not None:
            self._watch.cancel()
        for link, _ in self._links.values():
            logger.error("%r is still inside of NIXL; its memory must stay as it is", link)


@asynccontextmanager
async def open_agent(
    bus: Bus, name: str, memory: KvMemory, config: TransferConfig | None = None
) -> AsyncGenerator[TransferAgent]:
    """An agent for a memory, which peers on the bus can find by its name.

    Args:
        name: the address of an instance, or another that no other agent on the bus has.

    Raises:
        ConfigError: the name is not usable, NIXL is not installed, or reads are to be pushed where
            UCX may share memory.
        TransferFailed: NIXL refuses the memory.
        Unavailable: JetStream does not answer.
    """
    config = config or TransferConfig()
    check_agent_name(name)
    if config.reads == "pushed" and writes_to_neighbours(transports(config.ucx)):
        raise ConfigError(
            'TransferConfig.reads = "pushed" is not safe where UCX may share memory: a peer on this'
            " machine that was frozen would go on writing when it wakes, into blocks that are in"
            ' use again. Set UCX_TLS to what shares none, such as tcp, or choose "auto"'
        )
    nixl()
    async with Background(f"transfers of {name}", bus.fail) as background:
        agent = TransferAgent(bus, background, name, memory, config)
        home: NixlAgent | None = None
        try:
            home = await anyio.to_thread.run_sync(_open_home, agent, config)
            description = AgentDescription(
                name, agent.epoch, memory.layout, memory.regions, home.metadata(), host_name()
            )
            # Peers may ask for something as soon as they know of it.
            await bus.data.barrier()
            async with announced(bus, background, description):
                try:
                    yield agent
                finally:
                    await agent.close()
        finally:
            await agent.close()
            if home is not None:
                with anyio.move_on_after(CLOSE_SECONDS, shield=True) as closing:
                    await anyio.to_thread.run_sync(home.close, abandon_on_cancel=True)
                if closing.cancelled_caught:
                    logger.error("%r cannot be closed; its memory must stay as it is", home)


def _open_home(agent: TransferAgent, config: TransferConfig) -> NixlAgent:
    """The agent whose memory peers reach; its progress thread serves them, and sleeps between."""
    home = NixlAgent(
        nixl_name(agent.name, agent.epoch), wakes_every=config.idle_wait, ucx=config.ucx
    )
    agent.memory.populate()
    home.register(agent.memory.regions)
    return home


def _forget(peers: dict[str, _Peer], peer: _Peer) -> None:
    """Close the link to a life of a peer; another one is made when it is needed."""
    del peers[peer.description.agent]
    if peer.link is not None:
        peer.link.close()


def _answered(peers: dict[str, _Peer], peer: _Peer, there: bool | None) -> None:
    """Forget a peer that is no longer on the bus."""
    if there is False and peer.is_idle and peers.get(peer.description.agent) is peer:
        _forget(peers, peer)


def _checked_ids(side: str, blocks: Sequence[int] | Indices, there_are: int) -> Indices:
    """Ids of blocks as an array.

    Raises:
        InvalidTransfer: they are no such ids, there is no such block, or one is given twice.
    """
    given = np.asarray(blocks)
    if given.ndim != 1 or not given.size or given.dtype.kind not in "iu":
        raise InvalidTransfer(f"{side} blocks are a list of ids, not {blocks!r:.80}")
    # After a large transfer nothing is in the processor's caches, and each step here is slow.
    ordered = np.sort(given)
    if ordered[0] < 0 or ordered[-1] >= there_are:
        raise InvalidTransfer(f"{side} blocks {_shown(given)} are not all below {there_are}")
    if (again := ordered[1:] == ordered[:-1]).any():
        raise InvalidTransfer(f"{side} block {ordered[again.argmax()]} is given twice")
    return given.astype(np.int32)


def _shown(blocks: NDArray[Any]) -> str:
    return f"{blocks.min()} to {blocks.max()}" if blocks.size > 1 else f"{blocks[0]}"
