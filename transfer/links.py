"""A link: the agent of NIXL with which this process reads and writes one peer, in a thread.

Posting may copy everything before it returns, and asking for the state of a transfer is what lets
it go on. So all of it is done in the link's own thread, one link beside another. Each link has an
agent of its own: to destroy it is the only way to stop a transfer, and stops those of this peer
alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

import numpy as np

from dynbus.bus.errors import DynbusError, describe_exception

from .binding import NixlAgent, NixlError, Operation, Rows
from .config import TransferConfig
from .descriptors import AgentDescription, local_descriptors, remote_descriptors
from .errors import InvalidTransfer, TransferFailed
from .layout import Integers, KvMemory, Region, plan
from .states import Event, State, after, is_over

_SPIN: Final = 0.001
"""Seconds since something happened for which a link asks again at once: a block takes less."""
_FIRST_SLEEP: Final = 20e-6
_LAST_SLEEP: Final = 200e-6
_ABANDONED_SLEEP: Final = 0.005
"""Where nobody waits for what is left."""


@dataclass(frozen=True)
class Moved:
    """What a transfer moves: tokens of a peer's blocks and of those here."""

    operation: Operation
    remote_blocks: Sequence[int]
    local_blocks: Sequence[int]
    tokens: int
    remote_start: int
    local_start: int


class Flow:
    """A transfer as its link sees it. `state` may be moved by any thread.

    Args:
        ended: called once in the link's thread, when it is over and its memory is quiet.

    Attributes:
        bytes: how many it moves; 0 before they are known.
        error: why it failed.
    """

    def __init__(self, moved: Moved, ended: Callable[[], object]) -> None:
        self.moved = moved
        self.bytes = 0
        self.error: DynbusError | None = None
        self.state = State.NEW
        self._ended = ended
        self._lock = threading.Lock()
        self._slices: Iterator[tuple[Rows, Rows, tuple[str, str]]] = iter(())
        self._next: tuple[Rows, Rows, tuple[str, str]] | None = None
        self._requests: deque[int] = deque()

    def __repr__(self) -> str:
        return f"<Flow {self.moved.operation} [{self.state.value} | {len(self._requests)} posted]>"

    @property
    def posted(self) -> int:
        """How many of its requests NIXL works at."""
        return len(self._requests)

    def move(self, event: Event) -> State:
        """Let something happen; returns the state after it."""
        with self._lock:
            self.state = after(self.state, event)
            return self.state

    def cut(self, memory: KvMemory, peer: AgentDescription, slice_bytes: int) -> None:
        """Find out which bytes it moves, and cut them into slices.

        Raises:
            DynbusError: the peer's blocks are not usable.
        """
        moved = self.moved
        pieces = plan(
            memory.layout,
            moved.local_blocks,
            peer.layout,
            moved.remote_blocks,
            moved.tokens,
            local_start=moved.local_start,
            remote_start=moved.remote_start,
        )
        self.bytes = pieces.bytes
        local = local_descriptors(pieces, memory.regions)
        remote = remote_descriptors(pieces, peer.regions)
        local_kinds = _kind(memory.regions, pieces.local_region)
        remote_kinds = _kind(peer.regions, pieces.remote_region)
        self._slices = _slices(local, remote, local_kinds, remote_kinds, slice_bytes)
        self._next = next(self._slices, None)

    def post_one(self, agent: NixlAgent, peer: str) -> bool:
        """Post its next slice; False where there is none, or nobody waits for it.

        Raises:
            NixlError: NIXL refuses it, or the peer is gone.
        """
        with self._lock:
            if self._next is None or is_over(self.state):
                return False
            if self.state is State.NEW:
                self.state = after(self.state, Event.POST)
        request = agent.request(self.moved.operation, peer, *self._next)
        # Known before it is posted, so that it is released whatever happens.
        self._requests.append(request)
        if agent.post(request):
            self._requests.pop()
            agent.release(request)
        self._next = next(self._slices, None)
        with self._lock:
            if self.state is State.POSTING:
                self.state = after(self.state, Event.POSTED)
        return True

    def look(self, agent: NixlAgent) -> bool:
        """Let it go on, and release what is done; whether anything was.

        Raises:
            NixlError: it failed.
        """
        done = False
        for _ in range(len(self._requests)):
            # It stays known while it is asked for, so that it is released whatever happens.
            if not agent.is_done(self._requests[0]):
                self._requests.rotate(-1)
                continue
            agent.release(self._requests.popleft())
            done = True
        return done

    def has_more(self) -> bool:
        """Whether anything is to be posted, or is with NIXL."""
        return bool(self._requests) or (self._next is not None and not is_over(self.state))

    def drop(self, agent: NixlAgent) -> None:
        """Release its requests, although they may go on as long as the agent lives."""
        while self._requests:
            with suppress(NixlError):
                agent.release(self._requests.popleft())

    def end(self, event: Event, error: DynbusError | None = None) -> None:
        """It is over, and nothing of it touches any memory any more."""
        self.error = error
        self.move(event)
        self._ended()


class Link:
    """The way to one life of a peer.

    Args:
        name: of its agents, which get a number each; no other link of any process has it.
        stopped: called in its thread as the last thing.

    Attributes:
        open_handles: requests that NIXL knows.
        destroyed: how often its agent was destroyed since a transfer would not end.
    """

    def __init__(
        self,
        name: str,
        memory: KvMemory,
        peer: AgentDescription,
        config: TransferConfig,
        stopped: Callable[[], object],
    ) -> None:
        self.name = name
        self.peer = peer
        self.open_handles = 0
        self.destroyed = 0
        self._memory = memory
        self._config = config
        self._stopped = stopped
        self._inbox: SimpleQueue[Flow | None] = SimpleQueue()
        self._flows: list[Flow] = []
        self._agent: NixlAgent | None = None
        self._made = 0
        self._is_to_destroy = False
        self._is_closing = False
        # A thread that NIXL keeps for ever must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"link {name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Link {self.name} to {self.peer.agent} [{len(self._flows)} transfers]>"

    @property
    def is_busy(self) -> bool:
        """Whether it has a transfer, or is about to."""
        return bool(self._flows) or not self._inbox.empty()

    def start(self, flow: Flow) -> None:
        """Carry out a transfer; callable from any thread."""
        self._inbox.put(flow)

    def destroy(self) -> None:
        """Destroy the agent, so that all its transfers are over; callable from any thread.

        Another one is made for the next transfer.
        """
        self._is_to_destroy = True

    def close(self) -> None:
        """Destroy the agent and end the thread; callable from any thread."""
        self._is_closing = True
        self._inbox.put(None)

    # In the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take(self._inbox.get())
                self._work()
        finally:
            self._end_all(TransferFailed(f"the link to {self.peer.agent} is closed"))
            while True:
                try:
                    flow = self._inbox.get_nowait()
                except Empty:
                    break
                if flow is not None:
                    flow.end(Event.DESTROYED, TransferFailed("the link is closed"))
            self._stopped()

    def _work(self) -> None:
        """Go on until no transfer is left."""
        woke = time.monotonic()
        sleep = _FIRST_SLEEP
        while self._flows and not self._is_closing:
            if self._is_to_destroy:
                self._is_to_destroy = False
                self.destroyed += 1
                self._end_all(
                    TransferFailed(
                        f"the link to {self.peer.agent} was destroyed, since a transfer that was "
                        "given up did not end"
                    )
                )
                return
            with suppress(Empty):
                while True:
                    self._take(self._inbox.get_nowait())
            if self._turn():
                woke = time.monotonic()
                sleep = _FIRST_SLEEP
            elif time.monotonic() - woke < _SPIN:
                os.sched_yield()
            else:
                time.sleep(sleep)
                waited_for = any(not is_over(flow.state) for flow in self._flows)
                sleep = min(1.5 * sleep, _LAST_SLEEP if waited_for else _ABANDONED_SLEEP)
        self._is_to_destroy = False

    def _take(self, flow: Flow | None) -> None:
        if flow is None:
            return
        if is_over(flow.state):
            flow.end(Event.CANCEL)
            return
        try:
            flow.cut(self._memory, self.peer, self._config.slice_bytes)
        except DynbusError as error:
            flow.end(Event.DESTROYED, error)
        except Exception as error:  # noqa: BLE001 - told to whoever waits for the transfer
            flow.end(Event.DESTROYED, TransferFailed(describe_exception(error)))
        else:
            self._flows.append(flow)

    def _turn(self) -> bool:
        """Let each transfer go on; whether anything happened."""
        try:
            agent = self._agent or self._make_agent()
            happened = False
            for flow in self._flows:
                happened |= flow.look(agent)
                if flow.posted < self._config.slices_ahead:
                    happened |= flow.post_one(agent, self._peer_name)
        except NixlError as error:
            # What else is on its way cannot arrive either, or nobody can tell whether it will.
            self._end_all(
                TransferFailed(f"the transfer with {self.peer.agent} failed: {error.message}")
            )
            return True
        self.open_handles = sum(flow.posted for flow in self._flows)
        if all(flow.has_more() for flow in self._flows):
            return happened
        over = [flow for flow in self._flows if not flow.has_more()]
        self._flows = [flow for flow in self._flows if flow.has_more()]
        for flow in over:
            # What was given up before anything of it was posted is quiet already.
            flow.end(Event.CANCEL if flow.state is State.QUIET else Event.FINISHED)
        return True

    @property
    def _peer_name(self) -> str:
        return nixl_name(self.peer.agent, self.peer.epoch)

    def _make_agent(self) -> NixlAgent:
        self._made += 1
        agent = NixlAgent(f"{self.name}.{self._made}", wakes_every=None, ucx=self._config.ucx)
        agent.register(self._memory.regions)
        agent.add_peer(self._peer_name, self.peer.metadata)
        self._agent = agent
        return agent

    def _end_all(self, error: DynbusError) -> None:
        """Destroy the agent, and with it whatever its transfers still do."""
        agent, self._agent = self._agent, None
        flows, self._flows = self._flows, []
        if agent is not None:
            for flow in flows:
                flow.drop(agent)
            agent.close()
        self.open_handles = 0
        for flow in flows:
            flow.end(Event.DESTROYED, error)


def nixl_name(agent: str, epoch: str) -> str:
    """By which NIXL knows one life of an agent."""
    return f"{agent}~{epoch}"


def _kind(regions: Sequence[Region], used: Integers) -> str:
    """The kind of memory that descriptors are in.

    Raises:
        InvalidTransfer: they are in several.
    """
    first, *others = {regions[int(index)].kind for index in np.unique(used)}
    if others:
        raise InvalidTransfer("memory of the host and of a GPU cannot be in one transfer")
    return first


def _slices(
    local: Rows, remote: Rows, local_kind: str, remote_kind: str, slice_bytes: int
) -> Iterator[tuple[Rows, Rows, tuple[str, str]]]:
    """Descriptors in runs of about `slice_bytes`."""
    kinds = (local_kind, remote_kind)
    lengths = local[:, 1].astype(np.int64)
    if int(lengths.sum()) <= slice_bytes:
        yield local, remote, kinds
        return
    parts = -(-lengths // slice_bytes)
    if parts.max() > 1:
        local, remote = _parted(local, parts, slice_bytes), _parted(remote, parts, slice_bytes)
        lengths = local[:, 1].astype(np.int64)
    number = (np.cumsum(lengths) - 1) // slice_bytes
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(lengths)]
    for first, last in zip(cuts, cuts[1:], strict=False):
        yield local[first:last], remote[first:last], kinds


def _parted(rows: Rows, parts: Integers, size: int) -> Rows:
    """Descriptors, none of which is larger than `size`."""
    whole = np.repeat(rows, parts, axis=0)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    at = (np.arange(len(whole)) - first) * size
    whole[:, 0] += at.astype(np.uint64)
    whole[:, 1] = np.minimum(whole[:, 1].astype(np.int64) - at, size).astype(np.uint64)
    return whole
