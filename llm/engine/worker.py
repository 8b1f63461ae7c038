"""An engine as an actor: `EngineWorker` is the base of all that serve one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from itertools import count
from typing import Final, Protocol, TypeVar

import anyio
import anyio.to_thread

from dynbus import Actor, Cancelled, Reply, Unavailable, context, handler
from dynbus.kvrouter import KvEventPublisher, event_grants, profiles
from dynbus.llm.continuing import resume
from dynbus.llm.embedding import Embedded, EmbedRequest
from dynbus.llm.garbage import rare_collections
from dynbus.llm.generation import Announced, Announcement, Generated, GenerateRequest
from dynbus.spi import ComponentName, Grant, InstanceName

from .hang_watch import HangWatch, stacks_of_threads
from .interface import Engine, EngineLimits, LoadMetrics, RunningEngine
from .observing import EngineWatch
from .options import HangOptions
from .runner import EngineRunner, EventSink
from .step_watch import HangLimits
from .tracing import EngineTrace

P = TypeVar("P")

logger = logging.getLogger(__name__)

LONGEST_PREFILL: Final = 120.0
"""Seconds for which a request may be silent while it waits in the engine or is computed."""

KEPT_OF_IDLE: Final = 1 / 3
"""The part of `idle_timeout` for which outputs of a request that wants no stream are kept."""


class PromptSink(Protocol):
    """The server of requests whose prompts may come from elsewhere."""

    async def serve(
        self,
        name: str,
        request: GenerateRequest,
        reply: Reply[Generated],
        here: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve a request; by `here`, where its prompt is computed here."""


class EngineWorker(Actor, abstract=True):
    """Serves an engine: a subclass says in `make_engine` which.

    Its KV events go to the routers, where the engine has any. A worker whose engine raises or hangs
    is broken: calls go elsewhere, and `dynbus run` starts it anew. A stream of tokens that is lost
    goes on at another worker, behind what has come.

    Attributes:
        sink: decides where prompts come from; None where all are computed here.
        hang_limit, hang_least, hang_factor: how long a step of the engine may take, as the options
            of these names say; for subclasses, to be set before `on_start`.
    """

    rest_of = staticmethod(resume)

    sink: PromptSink | None = None
    hang_limit: float = HangLimits().longest
    hang_least: float = HangLimits().least
    hang_factor: float = HangLimits().factor
    _engine_runner: EngineRunner | None = None
    _engine_exits: AsyncExitStack | None = None
    _engine_numbers: Iterator[int]

    @classmethod
    def __dynbus_grants__(cls, address: ComponentName, namespaces: Sequence[str]) -> list[Grant]:
        return [*super().__dynbus_grants__(address, namespaces), *event_grants(address)]

    def make_engine(self) -> Engine | RunningEngine:
        """The engine, ready for its first request. Called once, in a thread: it may take its time.

        Raises:
            Exception: it cannot be made; that stops the instance.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make_engine")

    def event_sink(self) -> AbstractAsyncContextManager[EventSink | None]:
        """The receiver of its KV events, for subclasses that send them elsewhere; None where its
        steps have none."""
        return KvEventPublisher.of(self)

    async def hold(self, part: AbstractAsyncContextManager[P]) -> P:
        """Enter what the worker has beside its engine, for as long as that runs; for `on_engine`
        of subclasses. What was entered last is left first, and all before the engine is closed.

        Returns:
            what entering it gives.
        """
        assert self._engine_exits is not None, "the engine runs"
        return await self._engine_exits.enter_async_context(part)

    async def on_engine(self, limits: EngineLimits) -> None:
        """The engine runs, and nobody calls it yet; for subclasses, to register its model.

        Args:
            limits: of the engine.

        Raises:
            Exception: it cannot be served; that stops the engine and the instance.
        """

    async def before_engine(self) -> None:
        """Prepare what has to be there before the engine is made; for subclasses.

        Raises:
            Exception: it cannot be had; that stops the instance.
        """

    def show_step(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show people who wait how far the start is; callable from any thread.

        Args:
            done, total: in any unit; 0 in both where it is not known.
        """
        self.runtime.bus.status.put_step(self._engine_steps, what, done, total)

    @property
    def _engine_steps(self) -> str:
        """The name of the step that `show_step` reports."""
        return f"start of {self.instance_id}"

    async def on_start(self) -> None:
        try:
            await self.before_engine()
            await self._start_engine()
        finally:
            self.runtime.bus.status.remove(self._engine_steps)

    async def _start_engine(self) -> None:
        self._engine_numbers = count()
        # Who stops the start does not wait for the thread: loading may take minutes.
        engine = await anyio.to_thread.run_sync(self._make_engine, abandon_on_cancel=True)
        async with AsyncExitStack() as exits:
            exits.enter_context(rare_collections())
            if isinstance(engine, RunningEngine):
                exits.push_async_callback(engine.aclose)
            sink: EventSink | None = None
            if engine.limits.has_events:
                sink = await exits.enter_async_context(self.event_sink())
            runner = EngineRunner(
                engine,
                sink,
                trace=EngineTrace.of(self.runtime.bus.telemetry, self.__dynbus_name__),
                kept_for=self._kept_for(),
                failed=self.report_broken,
            )
            await exits.enter_async_context(runner)
            hangs: HangWatch | None = None
            limits = HangLimits(self.hang_limit, self.hang_least, self.hang_factor)
            if limits.longest and runner.tells_progress:
                hung = partial(self._hangs, engine, runner)
                hangs = HangWatch(self.runtime.bus, runner.progress, limits, hung)
                await exits.enter_async_context(hangs)
            await exits.enter_async_context(
                EngineWatch(self.runtime.bus, self.__dynbus_name__, runner, hangs, self.found_as)
            )
            self._engine_runner = runner
            self._engine_exits = exits.pop_all()
        try:
            await self.on_engine(engine.limits)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await EngineWorker.on_stop(self)
            raise

    def _bound_steps(self, options: HangOptions) -> None:
        """Let steps take as long as these options say; for constructors of subclasses."""
        self.hang_limit, self.hang_least = options.hang_limit, options.hang_least
        self.hang_factor = options.hang_factor

    def _hangs(self, engine: Engine | RunningEngine, runner: EngineRunner, reason: str) -> None:
        """Withdraw the instance, whose engine hangs; on the thread of the control lane."""
        runner.give_up()
        self.report_broken(f"its engine hangs: {reason}", hung=True)
        known = stacks_of_threads()
        if isinstance(engine, RunningEngine):
            known += f"\n{engine.describe_processes()}"
        logger.error("%s: its engine hangs: %s\n%s", self.__dynbus_name__, reason, known)

    def _make_engine(self) -> Engine | RunningEngine:
        engine = self.make_engine()
        # A freeze of what the process has then keeps nothing that loading has left.
        gc.collect()
        return engine

    async def on_stop(self) -> None:
        if self._engine_exits is not None:
            with anyio.CancelScope(shield=True):
                await self._engine_exits.aclose()

    def found_as(self) -> InstanceName:
        """The name under which it is found now; for subclasses that serve under others."""
        return self.__dynbus_name__

    def instance_metadata(self) -> Mapping[str, str]:
        limits = self._running().limits
        return {
            profiles.BLOCK_SIZE_KEY: str(limits.block_size),
            profiles.TOTAL_BLOCKS_KEY: str(limits.blocks),
            profiles.MAX_BATCHED_TOKENS_KEY: str(limits.max_num_batched_tokens),
            profiles.EVENTS_KEY: "true" if limits.has_events else "false",
            profiles.CONTEXT_KEY: str(limits.context_length),
        }

    def _kept_for(self) -> float | None:
        """Seconds for which outputs are kept: so that no stream is taken for a dead one."""
        idle = type(self).__dynbus_handlers__["generate"].idle_timeout
        return None if idle is None else idle * KEPT_OF_IDLE

    def _running(self) -> EngineRunner:
        if self._engine_runner is None:
            raise Unavailable("the engine is not started")
        return self._engine_runner

    @handler(concurrency=None, idle_timeout=LONGEST_PREFILL, resume="rest_of")
    async def generate(self, request: GenerateRequest, reply: Reply[Generated]) -> None:
        """The tokens that continue a prompt, as the engine's steps make them."""
        # A request that is sent again has the same id.
        await self.serve_request(self._new_name(), request, reply)

    async def serve_request(
        self, name: str, request: GenerateRequest, reply: Reply[Generated]
    ) -> None:
        """Serve a request of `generate` until its reply has ended; for subclasses.

        Args:
            name: of the request in the engine.
        """
        here = partial(self._serve_here, name, request, reply)
        if self.sink is None:
            await here()
        else:
            await self.sink.serve(name, request, reply, here)

    async def _serve_here(
        self, name: str, request: GenerateRequest, reply: Reply[Generated]
    ) -> None:
        runner, running = self._running(), context()
        await runner.prepare(request)
        unlink = running.link(lambda _: runner.cancel(name))
        try:
            if running.is_stopped():
                return
            runner.submit(name, request, reply)
            await reply.ended()
        finally:
            unlink()
            runner.forget(name)

    def _new_name(self) -> str:
        """A name for a request in the engine, of the call that runs."""
        return f"{context().id}.{next(self._engine_numbers)}"

    @handler(concurrency=None, idempotent=True)
    async def embed(self, request: EmbedRequest) -> Embedded:
        """The embedding of a text, where the engine makes some."""
        runner, running = self._running(), context()
        name = self._new_name()
        if running.is_stopped():
            raise Cancelled("the call was stopped before it began")
        unlink = running.link(lambda _: runner.cancel(name))
        try:
            return await runner.embed(name, request)
        finally:
            unlink()

    @handler(concurrency=None, idempotent=True)
    async def announce(self, announcement: Announcement) -> Announced:
        """Have what a host tier keeps of a conversation in the cache before its next request."""
        name, owner, session = self._new_name(), announcement.owner, announcement.session
        held = await self._running().announce(name, owner, session)
        return Announced(held.computed, held.computed - held.cached)

    @handler(idempotent=True)
    async def load_metrics(self) -> LoadMetrics:
        """The load of the engine."""
        runner = self._running()
        return LoadMetrics.of(runner.load, runner.limits)
