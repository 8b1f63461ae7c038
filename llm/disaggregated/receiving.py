"""The decode side of hand-overs: what `HandOver` decides for a request is carried out here."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, Protocol, assert_never

import anyio
import msgspec
from anyio.abc import TaskGroup

from dynbus import DynbusError, InvalidRequest, NoInstances, Overloaded, Reply, Unavailable
from dynbus.llm.engine.interface import Held
from dynbus.llm.engine.runner import EngineRunner
from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.spi import Background, describe_exception, monotonic
from dynbus.transfer import (
    BadDescription,
    ChecksumMismatch,
    Settled,
    Settlement,
    Ticket,
    compare,
    wanted,
)

from .hand_over import (
    Abandon,
    Action,
    Call,
    Deliver,
    EndCall,
    Enqueue,
    HandOver,
    Read,
    Reason,
    Release,
    Settle,
    Show,
)
from .messages import (
    Offer,
    OfferAnswer,
    Prefilled,
    PrefillJob,
    PrefillRequest,
)
from .observing import NOT_COUNTED, HandOverFigures, TransferSpan, TransferSpans, WorkQueueSpan

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT: Final = 1.0
"""Seconds that leaving a call may take, for which its prefill instance is told."""

SHARE_OF_DEADLINE: Final = 0.5
"""The part of a request's time that a hand-over may take: in the rest its prompt can still be
computed here."""


class Moving(Protocol):
    """A transfer that has begun; `dynbus.transfer.agent.Transfer` is one."""

    @property
    def bytes(self) -> int:
        """How many it moves."""
        ...

    @property
    def blocks(self) -> int:
        """How many blocks it touches here."""
        ...

    @property
    def seconds(self) -> float:
        """From its start to its end, or until now."""
        ...

    async def result(self) -> None:
        """Wait until all bytes are there."""

    def cancel(self) -> None:
        """Give it up."""

    async def quiet(self) -> None:
        """Wait until nothing of it can arrive any more."""


class Mover(Protocol):
    """What moves blocks; `dynbus.transfer.agent.TransferAgent` is one."""

    def start(
        self,
        operation: Literal["read", "write"],
        ticket: Ticket,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        tokens: int,
        deadline: float,
        remote_start: int = 0,
        local_start: int = 0,
    ) -> Moving:
        """Begin to move tokens; never waits."""
        ...


class Peers(Protocol):
    """The prefill instances, as a decode instance calls them."""

    def prefill(self, request: PrefillRequest, instance: str) -> AsyncGenerator[Prefilled, None]:
        """Have a prompt computed; by the instance that the router chooses where it is empty."""
        ...

    async def settle(self, settlement: Settlement, instance: str) -> Settled:
        """Settle a lease."""
        ...


class Limits(NamedTuple):
    """How long hand-overs may take, in seconds.

    Attributes:
        hand_over: all of one, the wait for blocks here included; half of what the request's
            deadline leaves counts where that is less.
        queue: until a prefill instance has taken it in. What waits in the engine there waits on,
            within `hand_over`.
        transfer: each transfer.
        lease: for which a prefill instance keeps what it has computed.
        settle: the answer of a prefill instance that has nothing to compute for it.
    """

    hand_over: float = 60.0
    queue: float = 10.0
    transfer: float = 10.0
    lease: float = 30.0
    settle: float = 5.0


class Receiver:
    """What all hand-overs of a decode instance have in common.

    Args:
        instance: by which prefill instances answer to its jobs.
        put: puts a job into the work queue.
        compares: whether what was read is compared with the checksums of its source.
        background: owns what goes on after a request has ended: transfers that are given up.
    """

    def __init__(
        self,
        runner: EngineRunner,
        mover: Mover,
        peers: Peers,
        background: Background,
        limits: Limits,
        figures: HandOverFigures,
        spans: TransferSpans,
        *,
        instance: str,
        put: Callable[[PrefillJob, float], Awaitable[None]] | None = None,
        compares: bool = False,
    ) -> None:
        self.runner = runner
        self.mover = mover
        self.peers = peers
        self.background = background
        self.limits = limits
        self.figures = figures
        self.spans = spans
        self.instance = instance
        self.put = put
        self.compares = compares
        self.open: dict[str, Receiving] = {}

    def __repr__(self) -> str:
        return f"<Receiver [{len(self.open)} hand-overs]>"

    async def offer(self, offer: Offer, *, is_own: bool = False) -> OfferAnswer:
        """A prefill instance has taken a job: it computes it now, or is told that nobody waits.

        Args:
            is_own: whether it is this instance, which moves no blocks to itself.
        """
        receiving = self.open.get(offer.hand_over)
        if receiving is None:
            return OfferAnswer(done=False, reason="nobody waits for it any more")
        if is_own:
            receiving.compute_here()
            return OfferAnswer(done=False, reason="it computes its own prompt where it decodes")
        return await receiving.offered(offer)


class Receiving:
    """One request at a decode instance, whose prompt a prefill instance computes.

    Args:
        name: of the request in the engine.
        hand_over: the id of this attempt.
        is_worth: whether a prompt is computed elsewhere of which so many tokens are cached here.
        time_left: seconds to the request's deadline; None without one.
    """

    def __init__(
        self,
        receiver: Receiver,
        name: str,
        hand_over: str,
        request: GenerateRequest,
        reply: Reply[Generated],
        *,
        queued: bool,
        is_worth: Callable[[int], bool],
        time_left: float | None,
    ) -> None:
        self._receiver = receiver
        self._runner = receiver.runner
        self._name = name
        self._id = hand_over
        self._request = request
        self._reply = reply
        self._is_worth = is_worth
        self._queued = queued
        self._time_left = time_left
        self.machine = HandOver(
            len(request.token_ids), queued=queued, vocabulary=receiver.runner.limits.vocabulary
        )
        self._tasks: TaskGroup | None = None
        self._held: Held | None = None
        self._instance = ""
        self._calling = anyio.CancelScope()
        self._items: dict[int, Read] = {}
        self._transfers: dict[int, Moving] = {}
        self._spans: dict[int, TransferSpan] = {}
        self._went_on = anyio.Event()
        self._taken_in = anyio.Event()
        self._waiting: WorkQueueSpan | None = None
        # An offer comes by another call: what follows from it belongs to this one all the same,
        # with its deadline and its trace.
        self._context = contextvars.copy_context()
        self._began = monotonic()

    def __repr__(self) -> str:
        return f"<Receiving {self._name} {self.machine!r}>"

    async def run(self) -> None:
        """Serve the request until its reply has ended.

        Raises:
            InvalidRequest, Unavailable: the engine does not take it.
        """
        self._runner.reserve(self._name, self._request, self._reply)
        self._receiver.open[self._id] = self
        self._receiver.figures.began()
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                self._do(self.machine.begin())
                tasks.start_soon(self._wait_for_blocks)
                await self._reply.ended()
                tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            # Before its blocks are released: the engine writes into none that it has forgotten.
            self._runner.forget(self._name)
            self._do(self.machine.ended())
            self._do(self.machine.call_ended())
            self._leave()

    def _leave(self) -> None:
        """It waits for nothing any more."""
        if not self._went_on.is_set():
            self._went_on.set()
            self._taken_in.set()
            if self._waiting is not None:
                self._waiting.end()
            self._receiver.open.pop(self._id, None)
            machine = self.machine
            self._receiver.figures.ended(
                machine.reason if machine.first is not None or machine.reason else "cancelled"
            )
            if machine.reason and machine.reason not in NOT_COUNTED:
                logger.warning(
                    "%s: its prompt is computed here from token %d on: %s (%s)",
                    *(self._name, machine.settled, machine.reason, machine.detail),
                )

    async def offered(self, offer: Offer) -> OfferAnswer:
        """A prefill instance has taken the job: have it compute, and wait until that is over."""
        actions = self.machine.offered(offer.instance)
        if not actions:
            return OfferAnswer(done=False, reason="it is computed already")
        if self._waiting is not None:
            self._waiting.end(offer.instance)
        self._do(actions)
        await self._went_on.wait()
        return OfferAnswer(done=not self.machine.reason, reason=self.machine.detail)

    def compute_here(self) -> None:
        """This instance has taken its own job: it has room for the prompt."""
        self._do(self.machine.fall_back("own_job", "this instance took the job itself"))

    # What the machine asks for --------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Enqueue():
                self._start(self._enqueue)
            case Call(instance, _):
                self._start(self._call, instance)
            case Read(part):
                self._items[part] = action
                if not self._start(self._read, action):
                    self._do(self.machine.quiet(part))
            case Settle(part):
                self._start(self._settle, part)
            case Show(first):
                self._show(first)
            case Deliver(computed, first):
                self._runner.deliver(self._name, computed, first)
                self._leave()
            case EndCall():
                self._calling.cancel()
            case Abandon(part):
                self._abandon(part)
            case Release():
                self._runner.release(self._name)
            case _:
                assert_never(action)

    def _start(self, function: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        """Do something beside what runs, unless the request has ended."""
        if self._tasks is None or self._reply.has_ended:
            return False
        self._context.run(self._tasks.start_soon, function, *args)
        return True

    def _show(self, first: Generated) -> None:
        assert self._held is not None, "its blocks were there before it was asked for"
        # What the routers of decode instances are to know is what was reused here.
        shown = msgspec.structs.replace(first, cached_tokens=self._held.cached)
        self._runner.show_first(self._name, shown)

    def _abandon(self, part: int) -> None:
        transfer = self._transfers.get(part)
        if transfer is None:
            # It has not begun, and will not.
            self._do(self.machine.quiet(part))
            return
        transfer.cancel()
        self._receiver.figures.abandoned(transfer.blocks)
        name = f"the end of a transfer for {self._name}"
        # At the end of the process there is none; the memory goes with it.
        with suppress(RuntimeError, Unavailable):
            self._receiver.background.start(self._wait_until_quiet, part, transfer, name=name)

    async def _wait_until_quiet(self, part: int, transfer: Moving) -> None:
        try:
            await transfer.quiet()
        finally:
            self._receiver.figures.quiet(transfer.blocks)
            self._do(self.machine.quiet(part))

    # What happens ---------------------------------------------------------------------------

    async def _wait_for_blocks(self) -> None:
        try:
            held = await self._runner.next_held(self._name)
        except DynbusError:
            # Whoever waits for the reply is told why.
            return
        self._held = held
        is_worth = self._is_worth(held.cached)
        self._do(self.machine.reserved(held.cached, is_worth=is_worth))
        if not self.machine.waits:
            return
        limits = self._receiver.limits
        with anyio.move_on_after(self._limit(limits.queue)):
            await self._taken_in.wait()
        if not self._taken_in.is_set():
            self._do(self.machine.fall_back("too_slow", "no prefill instance took it in"))
            return
        left = self._limit(limits.hand_over) - (monotonic() - self._began)
        with anyio.move_on_after(max(0.0, left)):
            await self._went_on.wait()
        self._do(self.machine.fall_back("too_slow", "the hand-over took too long"))

    def _limit(self, seconds: float) -> float:
        """Seconds from the beginning, and no more than the request's time allows."""
        if self._time_left is None:
            return seconds
        return min(seconds, max(0.0, self._time_left * SHARE_OF_DEADLINE))

    async def _enqueue(self) -> None:
        put = self._receiver.put
        assert self._held is not None
        receiver = self._receiver
        job = PrefillJob(
            self._id,
            receiver.instance,
            len(self._request.token_ids) - self._held.cached,
        )
        self._waiting = receiver.spans.enqueue()
        if put is None:
            self._do(self.machine.fall_back("queue_failed", "there is no work queue"))
            return
        try:
            await put(job, monotonic() + self._limit(receiver.limits.queue))
        except DynbusError as error:
            self._do(self.machine.fall_back("queue_failed", describe_exception(error)))

    async def _call(self, instance: str) -> None:
        assert self._held is not None
        request = PrefillRequest(self._id, self._request, self._held.cached)
        reason: Reason = ""
        detail = ""
        with self._calling:
            items = self._receiver.peers.prefill(request, instance)
            try:
                async for item in items:
                    self._instance = self._instance or item.instance
                    self._taken_in.set()
                    self._do(self.machine.came(item))
            except NoInstances as error:
                reason, detail = "no_instances", str(error)
            except (InvalidRequest, Overloaded) as error:
                reason, detail = "refused", str(error)
            except DynbusError as error:
                reason, detail = "prefill_lost", describe_exception(error)
            finally:
                with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                    await items.aclose()
        self._do(self.machine.call_ended(reason, detail))

    async def _read(self, action: Read) -> None:
        assert self._held is not None
        assert action.item.ticket is not None
        part, ticket, limits = action.part, action.item.ticket, self._receiver.limits
        if self._transfers.get(part) is not None or not self.machine.waits:
            self._do(self.machine.quiet(part))
            return
        span = self._receiver.spans.begin()
        try:
            transfer = self._receiver.mover.start(
                "read",
                ticket,
                ticket.blocks,
                self._blocks_of(action),
                tokens=action.stop - action.start,
                deadline=monotonic() + self._limit(limits.transfer),
                # The ticket's blocks end where its tokens do.
                remote_start=ticket.tokens - (action.stop - action.start),
                local_start=action.start % self._runner.limits.block_size,
            )
        except DynbusError as error:
            span.end(failed=describe_exception(error))
            self._do(self.machine.read_failed(part, describe_exception(error)))
            self._do(self.machine.quiet(part))
            return
        self._transfers[part] = transfer
        try:
            await transfer.result()
        except DynbusError as error:
            span.end(failed=describe_exception(error))
            self._receiver.figures.transferred(transfer.seconds, 0, 0, failed=True)
            self._do(self.machine.read_failed(part, describe_exception(error)))
        except BaseException:
            span.end(failed="it was given up")
            raise
        else:
            span.end(transfer.bytes, transfer.blocks, transfer.seconds)
            self._receiver.figures.transferred(transfer.seconds, transfer.bytes, transfer.blocks)
            self._do(self.machine.read(part))

    def _blocks_of(self, action: Read) -> Sequence[int]:
        """The local blocks of a part, in the order of their tokens."""
        assert self._held is not None
        size = self._runner.limits.block_size
        return self._held.blocks[action.start // size : -(-action.stop // size)]

    async def _settle(self, part: int) -> None:
        read = self._items[part]
        ticket, tokens = read.item.ticket, read.stop - read.start
        assert ticket is not None
        settlement = Settlement(ticket.lease_id, ticket.epoch)
        if self._receiver.compares:
            asked = wanted(self._runner.memory, tokens, ticket.tokens - tokens)
            settlement = msgspec.structs.replace(settlement, wanted=asked)
        try:
            with anyio.fail_after(self._receiver.limits.settle):
                answer = await self._receiver.peers.settle(settlement, self._instance)
        except TimeoutError:
            self._do(self.machine.fall_back("prefill_lost", "it does not settle its lease"))
            return
        except DynbusError as error:
            self._do(self.machine.fall_back("prefill_lost", describe_exception(error)))
            return
        if answer.held and self._receiver.compares:
            try:
                await compare(
                    self._runner.memory,
                    self._blocks_of(read),
                    tokens,
                    answer.vouched,
                    start=read.start % self._runner.limits.block_size,
                    source=self._instance,
                )
            except ChecksumMismatch as error:
                self._do(self.machine.fall_back("damaged", str(error)))
                return
            except BadDescription as error:
                self._do(self.machine.fall_back("bad_answer", str(error)))
                return
        self._do(self.machine.answered(part, held=answer.held))
