"""A prefill or decode instance freezes, in whatever phase: what comes out is right, and in time.

The other side is in this process, and freezes it at the moment of a test's choice.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.conditions import PATIENCE, Stopwatch, eventually
from tests.llm.disaggregated.test_worker import REMOTE, greedy
from tests.llm.disaggregated.test_worker import tokens_of as all_tokens_of
from tests.llm.disaggregated.tiny_engine import tiny_engine
from tests.nixl.serving import found, left_in, running, tokens_of
from tests.scenarios.observation import Prefer

from dynbus import Runtime, with_options
from dynbus.actors.runtime import ActorInstance
from dynbus.bus.nats.server_process import RunningServer
from dynbus.llm.disaggregated.remote_prefill import RemotePrefill
from dynbus.llm.disaggregated.worker import DisaggregatedWorker
from dynbus.llm.hand_over.messages import Prefilled, PrefillRequest
from dynbus.llm.hand_over.part_reader import Part
from dynbus.llm.hand_over.sink import Limits, Origin
from dynbus.llm.worker import ModelWorker
from dynbus.transfer.layout import KvMemory
from dynbus.transfer.leases import LeaseTable, Ticket
from dynbus.transfer.mover import Mover, Moving

TIME = 10.0
"""Seconds that a request may take; half of it is for its hand-over, the rest for what follows."""
LEASE = 1.0


class Phases:
    """Calls a function once, when a phase is reached for the first time."""

    def __init__(self) -> None:
        self._at: dict[str, Callable[[], None]] = {}

    def at(self, phase: str, function: Callable[[], None]) -> None:
        self._at[phase] = function

    def reached(self, phase: str) -> None:
        function = self._at.pop(phase, None)
        if function is not None:
            function()


class WatchedMover:
    """The mover over NIXL, which says when it grants a lease."""

    def __init__(self, mover: Mover, phases: Phases) -> None:
        self._mover = mover
        self._phases = phases
        self.granted = 0
        self.epoch: str = mover.epoch
        self.leases: LeaseTable = mover.leases

    def grant(self, blocks: Sequence[int], *, tokens: int, seconds: float) -> Ticket:
        self.granted += 1
        self._phases.reached(f"grant {self.granted}")
        return self._mover.grant(blocks, tokens=tokens, seconds=seconds)

    def start(self, *args: Any, **options: Any) -> Moving:
        return self._mover.start(*args, **options)


class WatchedOrigin(Origin):
    """Prefill instances of which it is told what they say, and what is read of them."""

    def __init__(self, origin: Origin, phases: Phases) -> None:
        self.limits, self.figures = origin.limits, origin.figures
        self.reader = self
        self._origin = origin
        self._phases = phases

    async def ask(self, request: PrefillRequest, instance: str) -> AsyncGenerator[Prefilled, None]:
        items = self._origin.ask(request, instance)
        try:
            async for item in items:
                self._phases.reached("taken in")
                if item.ticket is not None:
                    self._phases.reached("computing")
                if item.first is not None:
                    self._phases.reached("first token")
                yield item
        finally:
            await items.aclose()

    def start(self, part: Part, deadline: float) -> Moving:
        self._phases.reached("reading")
        return self._origin.reader.start(part, deadline)

    async def settled(self, part: Part) -> bool:
        self._phases.reached("settling")
        return await self._origin.reader.settled(part)


class Engine(DisaggregatedWorker, namespace="killed"):
    """The side that goes on."""

    hand_over_limits = Limits(lease=LEASE)

    async def on_start(self) -> None:
        self.phases = Phases()
        await super().on_start()

    def open_mover(self, name: str, memory: KvMemory) -> AbstractAsyncContextManager[Mover]:
        @asynccontextmanager
        async def watched() -> AsyncGenerator[Mover]:
            async with super(Engine, self).open_mover(name, memory) as mover:
                yield WatchedMover(mover, self.phases)

        return watched()


class Whole(ModelWorker, namespace="killed"):
    """Serves all of a request itself."""


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    return tiny_engine(tmp_path, blocks=256)


def freeze(pid: int) -> None:
    """Stop a process; when this returns nothing of it runs."""
    os.kill(pid, signal.SIGSTOP)
    watch = Stopwatch()
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
        watch.check(PATIENCE, "it is frozen")


@contextmanager
def thawed(pid: int) -> Generator[None]:
    """A process that runs at the end, whatever happens."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def engine_of(instance: ActorInstance) -> Engine:
    assert isinstance(instance.actor, Engine)
    return instance.actor


async def other_side(runtime: Runtime, node: str) -> int:
    """The process of the other side, once it is found, and nothing of a test before this one."""
    runtime.discovery.begin()

    def is_alone() -> bool:
        pids = [pid for _, pid in found(runtime, node)]
        return len(pids) == 1 and Path(f"/proc/{pids[0]}").exists()

    await eventually(is_alone, what=f"there is {node}, and the one of the test before has gone")
    [(_, pid)] = found(runtime, node)
    return pid


async def at_rest(runtime: Runtime, here: Engine) -> None:
    """Wait until neither side has anything of any request."""

    def is_at_rest() -> bool:
        figures = here.figures
        mover = here._mover  # pyright: ignore[reportPrivateUsage]
        assert mover is not None
        return not (figures.open or figures.quarantined or figures.held or len(mover.leases))

    await eventually(is_at_rest, what="nothing is left here")
    assert await left_in(runtime, PATIENCE) == 0


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param(("reading",), id="one phase"),
        pytest.param(
            ("before", "computing", "reading", "first token", "settling"),
            id="each phase",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_request_is_right_and_in_time_in_whatever_phase_its_prefill_instance_freezes(
    nats_server: RunningServer, model: dict[str, Any], tmp_path: Path, phases: tuple[str, ...]
) -> None:
    requests = [greedy(300, 8, seed=at + 1) for at in range(len(phases))]
    noticed: list[Stopwatch] = []
    delays: list[float] = []

    async def story() -> None:
        async with (
            Runtime.connect(nats_server.url) as one,
            Runtime.connect(nats_server.url) as caller,
        ):
            pid = await other_side(caller, "prefill")
            whole = await one.start(Whole, **model, model_name="whole")
            wanted = [await all_tokens_of(caller.client(Whole, wait=PATIENCE), r) for r in requests]
            await whole.stop()
            decode = await one.start(Engine, node="decode", disaggregation=REMOTE, **model)
            here = engine_of(decode)
            sink = here._decodes  # pyright: ignore[reportPrivateUsage]
            assert sink is not None
            remote = sink.planner
            assert isinstance(remote, RemotePrefill)
            remote.origin = WatchedOrigin(remote.origin, here.phases)
            ended = here.figures.ended

            def hand_over_ended(reason: str) -> None:
                if reason:
                    noticed.append(Stopwatch())
                ended(reason)

            here.figures.ended = hand_over_ended  # type: ignore[method-assign]
            client = caller.client(Engine, node="decode", wait=PATIENCE)
            others = itertools.count(90)

            async def is_handed_over() -> bool:
                """Prompts are handed over, again."""
                before = here.figures.remote[""]
                await all_tokens_of(client, greedy(40, 2, seed=next(others)))
                return here.figures.remote[""] > before

            for phase, request, right in zip(phases, requests, wanted, strict=True):
                await eventually(is_handed_over, what="prompts are handed over")
                with thawed(pid):
                    if phase == "before":
                        freeze(pid)
                    else:
                        here.phases.at(phase, lambda: freeze(pid))
                    tokens: list[int] = []
                    noticed.clear()
                    delay: float | None = None
                    async for item in with_options(client, timeout=TIME).generate(request):
                        tokens += item.token_ids
                        if noticed and delay is None:
                            delay = noticed[0].seconds()
                    assert tokens == right, phase
                    assert len(noticed) == 1, (phase, here.figures.remote)
                    assert delay is not None
                    delays.append(delay)
                await at_rest(caller, here)

    with running(tmp_path, nats_server.url, model, 1, roles=["prefill"]):
        asyncio.run(story())
    # A request goes on within a second of when it is found that its prompt does not come.
    assert statistics.median(delays) < 1.0, delays


@pytest.mark.parametrize(
    "stories",
    [
        pytest.param([(1, True)], id="one story"),
        pytest.param(
            [(part, runs_out) for runs_out in (False, True) for part in (1, 2, 3)],
            id="each phase",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_request_is_right_in_whatever_phase_its_decode_instance_freezes_and_leases_run_out(
    nats_server: RunningServer,
    model: dict[str, Any],
    tmp_path: Path,
    stories: Sequence[tuple[int, bool]],
) -> None:
    requests = [greedy(300, 8, seed=at + 1) for at in range(len(stories))]

    async def story() -> None:
        async with (
            Runtime.connect(nats_server.url) as one,
            Runtime.connect(nats_server.url) as caller,
        ):
            pid = await other_side(caller, "decode")
            whole = await one.start(Whole, **model, model_name="whole")
            wanted = [await all_tokens_of(caller.client(Whole, wait=PATIENCE), r) for r in requests]
            await whole.stop()
            [(frozen_one, _)] = found(caller, "decode")
            prefill = await one.start(Engine, node="prefill", **model)
            here = engine_of(prefill)
            # Where a request goes on when it is noticed that the other one is frozen.
            await one.start(Engine, node="decode", disaggregation=REMOTE, **model)
            client = caller.client(Engine, node="decode", wait=PATIENCE, routing=Prefer(frozen_one))

            async def is_handed_over() -> bool:
                """It knows of the prefill instance."""
                await tokens_of(client, greedy(40, 2, seed=90))
                return here.figures.served["read"] > 0

            await eventually(is_handed_over, what="prompts are handed over")
            for (part, runs_out), request, right in zip(stories, requests, wanted, strict=True):
                with thawed(pid):
                    frozen = anyio.Event()

                    def stop() -> None:
                        freeze(pid)
                        frozen.set()  # noqa: B023 - called in this round

                    # The third part is the last one, with the first token.
                    mover = here._mover  # pyright: ignore[reportPrivateUsage]
                    assert isinstance(mover, WatchedMover)
                    here.phases.at(f"grant {mover.granted + part}", stop)
                    left = here.figures.served["left"]
                    tokens: list[int] = []
                    async with anyio.create_task_group() as tasks:
                        asked = tasks.start_soon

                        async def ask() -> None:
                            tokens.extend(await tokens_of(client, request))  # noqa: B023

                        asked(ask)
                        await eventually(
                            frozen.is_set,
                            what=f"the prefill engine grants part {part} of the prompt",
                        )
                        if runs_out:
                            # The lease runs out: the prompt is given up here.
                            await eventually(
                                lambda: here.figures.served["left"] > left,  # noqa: B023
                                what="the lease runs out",
                            )
                            assert here.figures.held == 0
                        os.kill(pid, signal.SIGCONT)
                    assert tokens == right, (part, runs_out)
                await at_rest(caller, here)

    with running(tmp_path, nats_server.url, model, 1, roles=["decode"]):
        asyncio.run(story())
