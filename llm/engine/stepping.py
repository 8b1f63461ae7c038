"""The driver of an engine's steps: a thread of its own where it computes, else a task of the event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Final, TypeVar

import anyio

from dynbus.llm.generation import Generated, GenerateRequest
from dynbus.spi import describe_exception, monotonic

from .interface import (
    NO_EMBEDDINGS,
    Engine,
    EngineLoad,
    EngineRequest,
    Listener,
    RunningEngine,
    Step,
    StepFailed,
    Stepper,
    TransferringEngine,
    embeds,
    is_witnessed,
    takes_announcements,
    transfers,
)
from .step_watch import Turn

logger = logging.getLogger(__name__)

CATCH_UP: Final = 0.1
"""Seconds that an engine may lag behind its time and still catch up; the rest is dropped."""
STEPS_AHEAD: Final = 4
"""Steps that the event loop may not have heard of before a thread waits for it."""
STOP_TIMEOUT: Final = 10.0
"""Seconds that a step in a thread may take to end; then it is left alone."""


E = TypeVar("E", bound=Engine)

Command = Callable[[E], object]
"""A function that acts on an engine between two steps."""


def stepper_of(engine: Engine | RunningEngine, listener: Listener) -> Stepper:
    """The stepper of this engine; an `EngineStepper` unless it steps itself."""
    if isinstance(engine, RunningEngine):
        return engine.stepper(listener)
    kind = _ThreadStepper if engine.computes else _LoopStepper
    return kind(engine, listener)


class EngineStepper(ABC):
    """Steps an engine, and has it do before its next step what it is told, in that order.

    A `ValueError` is told as a refusal; what else a request raises fails the engine. Of a
    `TransferringEngine` it is a `HoldingStepper`.

    Attributes:
        is_given_up: whether its engine hangs, and nobody waits for the step that runs.
    """

    _engine: Engine
    _turn = Turn.IDLE
    _steps = 0
    is_given_up = False

    def count_steps(self) -> tuple[Turn, int]:
        """See `WatchedStepper`."""
        return self._turn, self._steps

    def add(self, request_id: str, request: EngineRequest) -> None:
        self._put(request_id, lambda engine: _add(engine, request_id, request), is_request=True)

    def cancel(self, request_id: str) -> None:
        self._put(request_id, lambda engine: engine.cancel(request_id), is_request=False)

    @property
    def holds(self) -> bool:
        return transfers(self._engine)

    def reserve(self, request_id: str, request: GenerateRequest) -> None:
        self._tell(request_id, lambda engine: engine.reserve(request_id, request), is_request=True)

    def deliver(self, request_id: str, computed: int, first: Generated | None) -> None:
        self._tell(request_id, lambda engine: engine.deliver(request_id, computed, first))

    def add_held(self, request_id: str, request: GenerateRequest) -> None:
        self._tell(request_id, lambda engine: engine.add_held(request_id, request), is_request=True)

    def hold(self, hold_id: str, request: GenerateRequest) -> None:
        self._tell(hold_id, lambda engine: engine.hold(hold_id, request))

    def release(self, hold_id: str) -> None:
        self._tell(hold_id, lambda engine: engine.release(hold_id))

    @property
    def takes_announcements(self) -> bool:
        """True if `announce` may be called."""
        return takes_announcements(self._engine)

    def announce(self, name: str, owner: str, session: str) -> None:
        """Have an engine get the blocks of a conversation ready; see `AnnouncedEngine`."""

        def run(engine: Engine) -> None:
            assert takes_announcements(engine), "its caller has looked"
            engine.announce(name, owner, session)

        self._put(name, run, is_request=False)

    def note_source(self, request_id: str, source: str) -> None:
        """Have the engine know from where a reserved request gets its blocks, if it wants to."""

        def run(engine: Engine) -> None:
            if is_witnessed(engine):
                engine.note_source(request_id, source)

        self._put(request_id, run, is_request=False)

    def _tell(
        self, name: str, command: Command[TransferringEngine], *, is_request: bool = False
    ) -> None:
        def run(engine: Engine) -> None:
            assert transfers(engine), "its caller has looked"
            command(engine)

        self._put(name, run, is_request=is_request)

    @abstractmethod
    def _put(self, name: str, command: Command[Engine], *, is_request: bool) -> None:
        """Have a command done for a request or a hold."""

    @abstractmethod
    async def run(self) -> None:
        """Step until cancelled; see `Stepper`."""


def _is_idle(engine: Engine) -> bool:
    """True if an engine without work has no request left."""
    return not (transfers(engine) and engine.is_waiting)


def _add(engine: Engine, request_id: str, request: EngineRequest) -> None:
    """Have the engine take in a request of either kind.

    Raises:
        ValueError: it does not, and why.
    """
    if isinstance(request, GenerateRequest):
        engine.add(request_id, request)
    elif embeds(engine):
        engine.add_embedding(request_id, request)
    else:
        raise ValueError(NO_EMBEDDINGS)


def _step(engine: Engine, added: Collection[str]) -> Step:
    """Take a step; the requests that are new in it count as the cause if it fails."""
    try:
        return engine.step()
    except StepFailed:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
            raise
        # A panic of a library in Rust is no `Exception`.
        raise StepFailed(describe_exception(error), added) from error


class _LoopStepper(EngineStepper):
    """Steps an engine that computes nothing, and sleeps for as long as its steps take."""

    def __init__(self, engine: Engine, listener: Listener) -> None:
        self._engine = engine
        self._listener = listener
        self._has_work = asyncio.Event()
        self._added: list[str] = []
        self._taken = 0

    def _put(self, name: str, command: Command[Engine], *, is_request: bool) -> None:
        self._taken += is_request
        try:
            command(self._engine)
        except ValueError as error:
            self._listener.on_refused(name, error)
        else:
            if is_request:
                self._added.append(name)
        self._has_work.set()

    async def run(self) -> None:
        engine = self._engine
        ends = monotonic()
        while True:
            if not engine.has_work:
                self._listener.on_step(Step(()), engine.load, monotonic())
                if _is_idle(engine):
                    self._listener.on_idle(self._taken)
                self._has_work.clear()
                self._turn = Turn.IDLE
                await self._has_work.wait()
                ends = monotonic()
                continue
            # Timers fire late: what a step was late for, the next ones have less.
            began = monotonic()
            begins = max(ends, began - CATCH_UP)
            added, self._added = self._added, []
            self._turn = Turn.BUSY
            step = _step(engine, added)
            self._turn = Turn.HELD
            ends = begins + step.delay
            await anyio.sleep(max(0.0, ends - monotonic()))
            self._steps += 1
            self._listener.on_step(step, engine.load, began)


class _ThreadStepper(EngineStepper):
    """Steps an engine in a thread, the only one that uses it."""

    def __init__(self, engine: Engine, listener: Listener) -> None:
        self._engine = engine
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        # What follows belongs to both sides, under the lock of `_changed`.
        self._changed = threading.Condition()
        # With the request or the hold that each is for, and whether it takes in a request.
        self._commands: list[tuple[str, Command[Engine], bool]] = []
        self._untold = 0
        self._closing = False

    def _put(self, name: str, command: Command[Engine], *, is_request: bool) -> None:
        with self._changed:
            self._commands.append((name, command, is_request))
            self._changed.notify_all()

    async def run(self) -> None:
        # A daemon: a step that never ends does not keep the process.
        threading.Thread(target=self._live, name="engine", daemon=True).start()
        try:
            await asyncio.shield(self._ended)
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if not self._ended.done():
                seconds = 0.0 if self.is_given_up else STOP_TIMEOUT
                with anyio.move_on_after(seconds, shield=True):
                    await asyncio.wait({self._ended})
                if not self._ended.done():
                    # Its `repr` may read what the thread that hangs has locked.
                    logger.warning(
                        "a %s %s: it is left alone",
                        type(self._engine).__name__,
                        f"did not end its step in {seconds:g} s" if seconds else "hangs in a step",
                    )

    # On the event loop ----------------------------------------------------------------

    def _report(
        self,
        step: Step,
        load: EngineLoad,
        began: float,
        refused: list[tuple[str, ValueError]],
        idle_after: int | None,
    ) -> None:
        with self._changed:
            self._untold -= 1
            self._changed.notify_all()
        if self._closing or self._ended.done():
            return
        try:
            for request_id, error in refused:
                self._listener.on_refused(request_id, error)
            self._listener.on_step(step, load, began)
            if idle_after is not None:
                self._listener.on_idle(idle_after)
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            if self._closing:
                # Nobody waits any longer to be told.
                self._ended.exception()
                logger.error("%r failed at its end", self._engine, exc_info=error)

    # In the thread --------------------------------------------------------------------

    def _live(self) -> None:
        failure: Exception | None = None
        try:
            self._step_until_closed()
        except Exception as error:  # noqa: BLE001 - raised by `run`
            failure = error
        except BaseException as error:  # noqa: BLE001 - a panic of a library in Rust is none of them
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        # The loop may be closed already.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, failure)

    def _step_until_closed(self) -> None:
        engine = self._engine
        taken = 0
        while True:
            checks = False
            with self._changed:
                while not self._closing and (
                    self._untold >= STEPS_AHEAD or not (self._commands or engine.has_work)
                ):
                    self._turn = Turn.HELD if self._untold >= STEPS_AHEAD else Turn.IDLE
                    seconds: float | None = None
                    if self._untold < STEPS_AHEAD and is_witnessed(engine):
                        seconds = engine.idle_for()
                    if not self._changed.wait(seconds) and not self._commands:
                        checks = True
                        break
                self._turn = Turn.BUSY
                if self._closing:
                    return
                commands, self._commands = self._commands, []
                self._untold += 1
            if checks and is_witnessed(engine):
                began = monotonic()
                step = engine.check()
                self._steps += 1
                none: list[tuple[str, ValueError]] = []
                self._loop.call_soon_threadsafe(self._report, step, engine.load, began, none, None)
                continue
            refused: list[tuple[str, ValueError]] = []
            added: list[str] = []
            for name, command, is_request in commands:
                taken += is_request
                try:
                    command(engine)
                except ValueError as error:
                    refused.append((name, error))
                except Exception as error:
                    raise StepFailed(describe_exception(error), (name,)) from error
                else:
                    if is_request:
                        added.append(name)
            began = monotonic()
            step = _step(engine, added) if engine.has_work else Step(())
            self._steps += 1
            idle_after = None if engine.has_work or not _is_idle(engine) else taken
            self._loop.call_soon_threadsafe(
                self._report, step, engine.load, began, refused, idle_after
            )
