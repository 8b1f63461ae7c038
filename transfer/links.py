"""A link: the agent of NIXL with which this process reads and writes one peer, in a thread.

Posting may copy everything before it returns, and asking for the state of a transfer is what lets
it go on. So all of it is done in the link's own thread, one link beside another. Each link has an
agent of its own: to destroy it is the only way to stop a transfer, and stops those of this peer
alone.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from dynbus import DynbusError
from dynbus.spi import describe_exception

from .binding import Indices, NixlAgent, NixlError, Operation, Rows
from .config import TransferConfig
from .descriptors import (
    AgentDescription,
    descriptors,
    local_descriptors,
    remote_descriptors,
)
from .errors import InvalidTransfer, TransferFailed
from .layout import BlockLayout, Integers, KvMemory, Pieces, Region, plan
from .states import Event, State, after, is_over, is_posted

_SPIN: Final = 0.001
"""Seconds since something happened for which a link asks again at once: a block takes less."""
_FIRST_SLEEP: Final = 20e-6
_LAST_SLEEP: Final = 200e-6
_ABANDONED_SLEEP: Final = 0.005
"""Seconds between two looks at transfers whose result nobody waits for."""


@dataclass(frozen=True)
class Moved:
    """The tokens that a transfer moves: of a peer's blocks and of those here."""

    operation: Operation
    remote_blocks: Indices
    local_blocks: Indices
    tokens: int
    remote_start: int = 0
    local_start: int = 0


class _Rows(NamedTuple):
    """A slice by its addresses."""

    local: Rows
    remote: Rows

    def request(self, operation: Operation, way: _Way) -> int:
        return way.agent.request(operation, way.peer, self.local, self.remote, way.kinds)


class _Prepared(NamedTuple):
    """A slice by places in prepared lists."""

    local: Indices
    remote: Indices

    def request(self, operation: Operation, way: _Way) -> int:
        ours, theirs = way.lists
        return way.agent.prepared_request(operation, (ours, self.local), (theirs, self.remote))


_Slice: TypeAlias = _Rows | _Prepared


class Flow:
    """A transfer as its link sees it. `state` may be moved by any thread.

    Args:
        ended: called once in the link's thread, when it is over and its memory is quiet.

    Attributes:
        bytes: how many it moves; 0 before they are known.
        error: why it failed.
        is_cut_off: it ended with its link, and not by itself: what it has sent over TCP may be on
            its way still, in the buffers of both systems, as long as the peer is there to take it.
    """

    def __init__(self, moved: Moved, ended: Callable[[], object]) -> None:
        self.moved = moved
        self.bytes = 0
        self.error: DynbusError | None = None
        self.is_cut_off = False
        self.state = State.NEW
        self._ended = ended
        self._lock = threading.Lock()
        self._slices: Iterator[_Slice] = iter(())
        self._next: _Slice | None = None
        self._requests: deque[int] = deque()

    def __repr__(self) -> str:
        return f"<Flow {self.moved.operation} [{self.state.value} | {len(self._requests)} posted]>"

    @property
    def posted(self) -> int:
        """The number of its requests that NIXL works at."""
        return len(self._requests)

    def move(self, event: Event) -> State:
        """Let something happen; returns the state after it."""
        with self._lock:
            self.state = after(self.state, event)
            return self.state

    def cut(self, pair: _Pair, slice_bytes: int) -> None:
        """Find out which bytes it moves, and cut them into slices.

        Raises:
            DynbusError: the peer's blocks are not usable.
        """
        self.bytes, self._slices = pair.slices(self.moved, slice_bytes)
        self._next = next(self._slices, None)

    def post_one(self, way: _Way) -> bool:
        """Post its next slice; False where there is none, or nobody waits for it.

        Raises:
            NixlError: NIXL refuses it, or the peer is gone.
        """
        with self._lock:
            if self._next is None or is_over(self.state):
                return False
            if self.state is State.NEW:
                self.state = after(self.state, Event.POST)
        request = self._next.request(self.moved.operation, way)
        # Known before it is posted, so that it is released whatever happens.
        self._requests.append(request)
        if way.agent.post(request):
            self._requests.pop()
            way.agent.release(request)
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
        """True if there is something to post, or NIXL has some of it."""
        return bool(self._requests) or (self._next is not None and not is_over(self.state))

    def drop(self, agent: NixlAgent) -> None:
        """Release its requests, although they may go on as long as the agent lives."""
        while self._requests:
            with suppress(NixlError):
                agent.release(self._requests.popleft())

    def finish(self, event: Event, error: DynbusError | None = None) -> None:
        """It is over, and nothing of it touches any memory here any more."""
        self.error = error
        self.is_cut_off = event is Event.DESTROYED and is_posted(self.state)
        self.move(event)
        self._ended()


class _Template(NamedTuple):
    """The pieces of a whole block, as for block 0 of both sides.

    Attributes:
        longest: bytes of the largest piece.
        local, remote: where the pieces' descriptors begin in the prepared lists; a column.
    """

    pieces: Pieces
    bytes: int
    longest: int
    local: Indices
    remote: Indices


class _Pair:
    """The memory here and that of one life of a peer.

    Where both have blocks of one size, a block has the same pieces wherever it is. Then all pieces
    of all blocks are in lists that NIXL prepares once, and a transfer is a choice of places in
    them, of which NIXL joins those that are adjacent.
    """

    def __init__(self, memory: KvMemory, peer: AgentDescription, prepared: int) -> None:
        self._memory = memory
        self._peer = peer
        self._template: _Template | None = None
        self.kinds = (_kind(memory.regions), _kind(peer.regions))
        ours, theirs = memory.layout, peer.layout
        if ours.block_size == theirs.block_size:
            pieces = plan(ours, [0], theirs, [0], ours.block_size)
            if len(pieces) * max(ours.blocks, theirs.blocks) <= prepared:
                piece = np.arange(len(pieces), dtype=np.int32)[:, None]
                self._template = _Template(
                    pieces,
                    pieces.bytes,
                    int(pieces.length.max()),
                    piece * np.int32(ours.blocks),
                    piece * np.int32(theirs.blocks),
                )

    def lists(self) -> tuple[Rows, Rows] | None:
        """All pieces of all blocks of both sides; None where they are not prepared."""
        if self._template is None:
            return None
        pieces = self._template.pieces
        return (
            _all_blocks(
                self._memory.layout,
                self._memory.regions,
                pieces.local_region,
                pieces.local_offset,
                pieces.length,
            ),
            _all_blocks(
                self._peer.layout,
                self._peer.regions,
                pieces.remote_region,
                pieces.remote_offset,
                pieces.length,
            ),
        )

    def slices(self, moved: Moved, slice_bytes: int) -> tuple[int, Iterator[_Slice]]:
        """The bytes of a transfer, and its slices.

        Raises:
            DynbusError: the peer's blocks are not usable.
        """
        whole, rest = divmod(moved.tokens, self._memory.layout.block_size)
        template = self._template
        if template is None or not whole or moved.local_start or moved.remote_start:
            return self._planned(moved, slice_bytes)
        local, remote = moved.local_blocks[:whole], moved.remote_blocks[:whole]
        if min(local.size, remote.size) < whole or remote.max() >= self._peer.layout.blocks:
            raise InvalidTransfer(
                f"remote blocks {remote} are not {whole} of the {self._peer.layout.blocks} there"
            )
        slices = self._chosen(template, local, remote, slice_bytes)
        if not rest:
            return whole * template.bytes, slices
        last = replace(
            moved,
            local_blocks=moved.local_blocks[whole : whole + 1],
            remote_blocks=moved.remote_blocks[whole : whole + 1],
            tokens=rest,
        )
        size, more = self._planned(last, slice_bytes)
        return whole * template.bytes + size, itertools.chain(slices, more)

    def _planned(self, moved: Moved, slice_bytes: int) -> tuple[int, Iterator[_Slice]]:
        pieces = plan(
            self._memory.layout,
            moved.local_blocks.tolist(),
            self._peer.layout,
            moved.remote_blocks.tolist(),
            moved.tokens,
            local_start=moved.local_start,
            remote_start=moved.remote_start,
        )
        local = local_descriptors(pieces, self._memory.regions)
        remote = remote_descriptors(pieces, self._peer.regions)
        return pieces.bytes, _cut_rows(local, remote, slice_bytes)

    def _chosen(
        self, template: _Template, local: Indices, remote: Indices, slice_bytes: int
    ) -> Iterator[_Slice]:
        """Places in the lists, piece by piece, in runs of about `slice_bytes`."""
        if len(local) > 1:
            # What is adjacent on both sides is joined where it is in order.
            order = np.argsort(local)
            local, remote = local[order], remote[order]
        ours, theirs = (template.local + local).ravel(), (template.remote + remote).ravel()
        step = max(1, slice_bytes // template.longest)
        for first in range(0, ours.size, step):
            yield _Prepared(ours[first : first + step], theirs[first : first + step])


class _Way(NamedTuple):
    """The agent of a link at this moment, which knows its peer.

    Attributes:
        peer: by which NIXL knows it.
        kinds: of the memory here and there.
        lists: prepared ones of both sides; none where slices are given by their addresses.
    """

    agent: NixlAgent
    peer: str
    kinds: tuple[str, str]
    lists: tuple[int, int]


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
        self._pair: _Pair | None = None
        self._way: _Way | None = None
        self._made = 0
        self._is_to_destroy = False
        self._closes_at = math.inf
        # A thread that NIXL keeps for ever must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"link {name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Link {self.name} to {self.peer.agent} [{len(self._flows)} transfers]>"

    @property
    def is_busy(self) -> bool:
        """True if it has a transfer, or is about to."""
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
        """Destroy the agent and end the thread; callable from any thread.

        What was given up and is on its way may still arrive for a while before: a peer that sends
        something over TCP may not survive that nobody is there to take it.
        """
        self._closes_at = time.monotonic() + self._config.quiet_seconds
        self._inbox.put(None)

    # In the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._closes_at == math.inf:
                self._receive(self._inbox.get())
                self._work()
        finally:
            self._end_all(TransferFailed(f"the link to {self.peer.agent} is closed"))
            while True:
                try:
                    flow = self._inbox.get_nowait()
                except Empty:
                    break
                if flow is not None:
                    flow.finish(Event.DESTROYED, TransferFailed("the link is closed"))
            self._stopped()

    def _work(self) -> None:
        """Go on until no transfer is left."""
        woke = time.monotonic()
        sleep = _FIRST_SLEEP
        while self._flows and time.monotonic() < self._closes_at:
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
                    self._receive(self._inbox.get_nowait())
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

    def _receive(self, flow: Flow | None) -> None:
        if flow is None:
            return
        if is_over(flow.state):
            flow.finish(Event.CANCEL)
            return
        try:
            if self._pair is None:
                self._pair = _Pair(self._memory, self.peer, self._config.prepared)
            flow.cut(self._pair, self._config.slice_bytes)
        except DynbusError as error:
            flow.finish(Event.DESTROYED, error)
        except Exception as error:  # noqa: BLE001 - told to the waiter for the transfer
            flow.finish(Event.DESTROYED, TransferFailed(describe_exception(error)))
        else:
            self._flows.append(flow)

    def _turn(self) -> bool:
        """Let each transfer go on; whether anything happened."""
        try:
            way = self._way or self._make_way()
            happened = False
            for flow in self._flows:
                happened |= flow.look(way.agent)
                if flow.posted < self._config.slices_ahead:
                    happened |= flow.post_one(way)
        except NixlError as error:
            # What else is on its way cannot arrive either, or nobody can tell whether it will.
            self._end_all(
                TransferFailed(f"the transfer with {self.peer.agent} failed: {error.message}")
            )
            return True
        self.open_handles = sum(flow.posted for flow in self._flows)
        # Asked once: a caller that cancels one meanwhile changes the answer.
        over = [flow for flow in self._flows if not flow.has_more()]
        if not over:
            return happened
        self._flows = [flow for flow in self._flows if flow not in over]
        for flow in over:
            # What was given up before anything of it was posted is quiet already.
            flow.finish(Event.CANCEL if flow.state is State.QUIET else Event.FINISHED)
        return True

    def _make_way(self) -> _Way:
        assert self._pair is not None
        self._made += 1
        agent = NixlAgent(f"{self.name}.{self._made}", wakes_every=None, ucx=self._config.ucx)
        agent.register(self._memory.regions)
        peer = nixl_name(self.peer.agent, self.peer.epoch)
        agent.add_peer(peer, self.peer.metadata)
        ours, theirs = self._pair.kinds
        lists = self._pair.lists()
        prepared = (0, 0)
        if lists is not None:
            prepared = agent.prepare("", lists[0], ours), agent.prepare(peer, lists[1], theirs)
        self._way = _Way(agent, peer, (ours, theirs), prepared)
        return self._way

    def _end_all(self, error: DynbusError) -> None:
        """Destroy the agent, and with it whatever its transfers still do."""
        way, self._way = self._way, None
        flows, self._flows = self._flows, []
        if way is not None:
            for flow in flows:
                flow.drop(way.agent)
            for prepared in filter(None, way.lists):
                way.agent.forget(prepared)
            way.agent.close()
        self.open_handles = 0
        for flow in flows:
            flow.finish(Event.DESTROYED, error)


def nixl_name(agent: str, epoch: str) -> str:
    """By which NIXL knows one life of an agent."""
    return f"{agent}~{epoch}"


def _kind(regions: Sequence[Region]) -> str:
    """The kind of memory that regions are.

    Raises:
        InvalidTransfer: there are several.
    """
    first, *others = {region.kind for region in regions}
    if others:
        raise InvalidTransfer("memory of the host and of a GPU cannot be of one agent")
    return first


def _all_blocks(
    layout: BlockLayout,
    regions: Sequence[Region],
    region: Integers,
    offset: Integers,
    length: Integers,
) -> Rows:
    """The descriptors of pieces in all blocks of a layout, piece by piece."""
    by_block = np.arange(layout.blocks, dtype=np.int64) * layout.strides[0]
    return descriptors(
        regions,
        np.repeat(region, layout.blocks),
        (offset[:, None] + by_block).ravel(),
        np.repeat(length, layout.blocks),
    )


def _runs(lengths: Integers, slice_bytes: int) -> Iterator[tuple[int, int]]:
    """The beginnings and ends of runs of about `slice_bytes`."""
    number = (np.cumsum(lengths) - 1) // slice_bytes
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(lengths)]
    yield from itertools.pairwise(cuts)


def _cut_rows(local: Rows, remote: Rows, slice_bytes: int) -> Iterator[_Slice]:
    """Descriptors in runs of about `slice_bytes`."""
    lengths = local[:, 1].astype(np.int64)
    if int(lengths.sum()) <= slice_bytes:
        yield _Rows(local, remote)
        return
    parts = -(-lengths // slice_bytes)
    if parts.max() > 1:
        local, remote = _parted(local, parts, slice_bytes), _parted(remote, parts, slice_bytes)
        lengths = local[:, 1].astype(np.int64)
    for first, last in _runs(lengths, slice_bytes):
        yield _Rows(local[first:last], remote[first:last])


def _parted(rows: Rows, parts: Integers, size: int) -> Rows:
    """Descriptors, none of which is larger than `size`."""
    whole = np.repeat(rows, parts, axis=0)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    at = (np.arange(len(whole)) - first) * size
    whole[:, 0] += at.astype(np.uint64)
    whole[:, 1] = np.minimum(whole[:, 1].astype(np.int64) - at, size).astype(np.uint64)
    return whole
