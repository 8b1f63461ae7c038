"""An agent: the memory of a process that peers may read and write, and its own transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynbus.bus.bus import Bus

from .binding import Operation
from .config import TransferConfig
from .layout import KvMemory
from .leases import LeaseTable, Ticket
from .quarantine import Quarantine
from .states import State


@dataclass
class TransferStatistics:
    """What an agent has done, and what it holds now.

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

    transfers: Counter[tuple[Operation, str]] = field(default_factory=Counter)
    bytes: int = 0
    seconds: float = 0.0
    links: int = 0
    destroyed_links: int = 0
    open_handles: int = 0
    quarantined_blocks: int = 0


class Transfer:
    """One transfer, from `TransferAgent.start` on.

    Attributes:
        number: that no other transfer of this process has.
        operation: what the local side does.
        peer: the name of the peer's agent.
        local_blocks: that are read or written here.
        bytes: how many it moves; 0 before the peer's description is known.
        blocks: how many local blocks it touches.
        seconds: from its start to its end, or until now.
        state: where it is.
    """

    number: int
    operation: Operation
    peer: str
    local_blocks: tuple[int, ...]
    bytes: int
    blocks: int
    seconds: float
    state: State

    async def result(self) -> None:
        """Wait until all bytes are there. Whoever is cancelled here abandons the transfer.

        After a READ the bytes may be used only once the source has settled the lease.

        Raises:
            TransferFailed: the link, the peer or NIXL failed.
            PeerRestarted: the ticket is of an earlier life of the peer.
            BadDescription: what the peer says of its memory is damaged, or cannot be.
            LayoutMismatch: the peer's blocks cannot become those here.
            InvalidTransfer: the peer has no such blocks.
            DeadlineExceeded: its deadline, or the lease's time, is over.
            Cancelled: `cancel` was called.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Give the transfer up, at any time; what has ended stays as it is."""
        raise NotImplementedError

    async def quiet(self) -> None:
        """Wait until nothing reads or writes its local memory any more, whatever its result.

        That is at once for what is done; at most about `TransferConfig.quiet_seconds` after it was
        abandoned otherwise.
        """
        raise NotImplementedError


class TransferAgent:
    """The agent of a process, from `open_agent`.

    Attributes:
        name: by which peers find it.
        epoch: which life of the name this is; no other life ever has it.
        memory: whose blocks it transfers.
        leases: on its blocks, which it has granted to peers.
        quarantine: local blocks that abandoned transfers may still touch.
    """

    name: str
    epoch: str
    memory: KvMemory
    leases: LeaseTable
    quarantine: Quarantine

    @property
    def statistics(self) -> TransferStatistics:
        """What it has done, and what it holds now."""
        raise NotImplementedError

    def grant(self, blocks: Sequence[int], *, tokens: int, seconds: float) -> Ticket:
        """Lease blocks to a peer; returns the ticket with which it may read or write them.

        Raises:
            InvalidTransfer: there are no such blocks, one of them is given twice, they do not hold
                so many tokens, or the time is not usable.
        """
        raise NotImplementedError

    def start(
        self,
        operation: Operation,
        ticket: Ticket,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
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
            remote_blocks, local_blocks: in the order of their tokens.
            deadline: on `dynbus.bus.clock.monotonic`; it ends with the ticket's time at the latest.
            remote_start, local_start: the place of the first token, counted from the beginning of
                the first block of the list.

        Raises:
            InvalidTransfer: blocks, tokens or the operation are not usable as given, or the ticket
                is not of these blocks.
            Unavailable: the agent is closed.
        """
        raise NotImplementedError


@asynccontextmanager
async def open_agent(
    bus: Bus, name: str, memory: KvMemory, config: TransferConfig | None = None
) -> AsyncGenerator[TransferAgent]:
    """An agent for a memory, which peers on the bus can find by its name.

    Args:
        name: the address of an instance, or another that no other agent on the bus has.

    Raises:
        ConfigError: the name is not usable, or NIXL is not installed.
        TransferFailed: NIXL refuses the memory.
        Unavailable: JetStream does not answer.
    """
    raise NotImplementedError
    yield
