"""One run under faults: its own servers and instances, calls that go on, and what was found."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Final

import anyio
import msgspec

from dynbus.actors.calling.clients import with_options
from dynbus.actors.declaring.handlers import HandlerSpec
from dynbus.actors.declaring.restart_policy import FIRST_PAUSE, RestartPolicy
from dynbus.actors.declaring.service_args import ServiceArgs
from dynbus.actors.placing.allotment import Machine
from dynbus.actors.running.child import ChildState
from dynbus.actors.running.child_messages import WorkerSettings
from dynbus.actors.running.in_process import Assignment, Ending, Failure
from dynbus.actors.running.loader import resolve
from dynbus.actors.running.plan import PlannedNode, PlanRequest
from dynbus.actors.running.planning import MakePlan, plan_elsewhere, planned
from dynbus.actors.running.processes import ForkServer
from dynbus.actors.running.supervisor import Supervisor
from dynbus.actors.runtime import Runtime
from dynbus.bus import exit_codes
from dynbus.bus.background import task_group
from dynbus.bus.clock import monotonic
from dynbus.bus.config import load_config
from dynbus.bus.errors import ConfigError
from dynbus.bus.nats.server_process import until
from dynbus.bus.protocol.names import EndpointName

from .checker import Checker, Promise
from .echo import Echo
from .load import WAIT, Echoes, Load, Source, repeated
from .nemesis import Nemesis
from .own_folder import own_folder
from .report import Report, Resources, Sample, figures_of, longest_of
from .schedule import Kind, Step, schedule
from .servers import OwnServers, own_servers

START_SECONDS: Final = 120.0
"""Seconds in which every instance must be ready before the faults begin."""
WHOLE_SECONDS: Final = 60.0
"""Seconds after the last fault in which the run must be whole again."""
WARMUP_SECONDS: Final = 1.0
SAMPLE_SECONDS: Final = 15.0
NETWORK: Final = frozenset({Kind.DELAY, Kind.CUT, Kind.HALF_OPEN, Kind.SILENCE})
"""Faults that need proxies."""
ECHO_PAUSES: Final = (0.02, 0.06)
DRAIN_GRACE: Final = 5.0
"""Seconds that calls have at an instance of the built-in graph that goes away."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The graph of a trial, and the faults that it gets.

    Attributes:
        graph: what `dynbus run` would start; None for the built-in echoes.
        calls: endpoints, each with its request as JSON.
        instances: of each node; None for what the graph says, and two at least.
        pauses: see `schedule`.
        servers: 1, or 3 for a cluster.
        callers: that call at a time.
        items: of each stream of an echo, the fewest and the most.
        timeout: seconds of each call of a graph.
        strict: see `repeated`.
    """

    graph: PlanRequest | None
    calls: Sequence[tuple[EndpointName, bytes | None]] = ()
    seed: int
    seconds: float
    kinds: Sequence[Kind]
    pauses: tuple[float, float]
    instances: int | None = None
    servers: int = 1
    callers: int = 16
    items: tuple[int, int] = (20, 80)
    timeout: float = 60.0
    strict: bool = False
    log_level: str = "error"


class StartFailed(Exception):
    """Raised when an instance did not start while nothing was wrong.

    Attributes:
        failure: why, for the user.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _AtOnce(RestartPolicy):
    """An instance that was killed on purpose is started again without a growing pause."""

    def pause_after(self, lived: float, jitter: float) -> float:
        super().pause_after(lived, jitter)
        return FIRST_PAUSE


async def run_trial(options: TrialOptions, interrupted: asyncio.Event) -> Report:
    """Start servers and instances, do to them what the schedule says, and check every call.

    Everything that it starts has ended when this returns or raises.

    Args:
        interrupted: set to end the faults early; what was found until then is reported.

    Raises:
        ConfigError: a call, or something in the graph, is not usable.
        PlanFailed: the graph cannot be planned.
        StartFailed: an instance does not start.
        Unavailable: a server does not.
    """
    proxied = not NETWORK.isdisjoint(options.kinds)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(own_folder())
        forks = await stack.enter_async_context(ForkServer())
        servers = await stack.enter_async_context(
            own_servers(folder, options.servers, proxied=proxied)
        )
        graph = await _graph_of(options, servers, forks)
        ending = Ending()
        supervisor = Supervisor(
            *(graph.nodes, graph.settings, forks, ending),
            drain_grace=graph.drain_grace,
            machine=graph.machine,
            policy=_AtOnce,
        )
        async with task_group() as tasks:
            tasks.start_soon(supervisor.run)
            supervisor.begin()
            try:
                return await _under_faults(options, graph, servers, supervisor, interrupted)
            finally:
                ending.drain()
                with anyio.move_on_after(graph.drain_grace, shield=True):
                    await supervisor.ended.wait()
                ending.stop()


@dataclass(frozen=True)
class _Graph:
    """The graph that is started."""

    nodes: Sequence[PlannedNode]
    settings: WorkerSettings
    machine: Machine
    drain_grace: float


async def _graph_of(options: TrialOptions, servers: OwnServers, forks: ForkServer) -> _Graph:
    url, level = servers.worker_url, options.log_level
    if options.graph is None:
        count = options.instances or 4
        assignment = Assignment(Echo, {}, ServiceArgs(workers=count))
        bus = {"servers": url, "drain_grace": DRAIN_GRACE}
        settings = WorkerSettings(sys.path, bus, "console", level)
        return _Graph([planned(assignment)], settings, Machine(), DRAIN_GRACE)
    request = msgspec.structs.replace(options.graph, nats=url)
    plan = await plan_elsewhere(forks, MakePlan(request, "console", level))
    config = load_config(plan.bus, os.environ, sources=plan.sources)
    settings = WorkerSettings(plan.path, plan.bus, "console", level, addresses=plan.addresses)
    # What the user's classes are called with is read in this process.
    sys.path[:] = plan.path
    importlib.invalidate_caches()
    nodes = [_with_spare(node, options.instances) for node in plan.nodes]
    graph = _Graph(nodes, settings, plan.machine, config.drain_grace)
    if not options.calls and not _without_request(graph):
        raise ConfigError(
            "nothing would be called, so nothing checked: every endpoint needs a request; give "
            "--call ENDPOINT=JSON"
        )
    return graph


def _with_spare(node: PlannedNode, instances: int | None) -> PlannedNode:
    """The node with instances that others can stand in for, started again whenever they end."""
    service = node.service
    workers = service.workers
    if workers and service.resources.gpu is None:
        workers = max(2, workers) if instances is None else instances
    service = dataclasses.replace(service, workers=workers, on_crash="restart")
    return msgspec.structs.replace(node, service=service)


async def _under_faults(
    options: TrialOptions,
    graph: _Graph,
    servers: OwnServers,
    supervisor: Supervisor,
    interrupted: asyncio.Event,
) -> Report:
    counts = Counter(child.node.address for child in supervisor.children)
    await _ready(supervisor)
    checker = Checker()
    nemesis = Nemesis(
        *(supervisor, servers),
        bounds=lambda address: _bounds(counts[address]),
        struck=checker.stalls.fault,
        callers_pid=os.getpid(),
    )
    steps = schedule(options.seed, options.kinds, options.seconds, options.pauses)
    async with Runtime.connect(servers.caller_url, name="dynbus-chaos") as runtime:
        sources, descriptions = await _sources(options, graph, runtime)
        load = Load(checker, sources)
        async with task_group() as tasks:
            tasks.start_soon(load.run, options.callers)
            try:
                with anyio.move_on_after(WARMUP_SECONDS):
                    await interrupted.wait()
                before = await _sample(servers, monotonic())
                began = monotonic()
                samples = await _break(nemesis, steps, options.seconds, servers, interrupted)
                took = monotonic() - began
                whole_after = await _whole(supervisor, checker)
            finally:
                load.ending.set()
        after = await _sample(servers, began)
        if whole_after is not None:
            for source in sources:
                await load.call(source.next_call())
    stalls, unexplained = figures_of(checker)
    return Report(
        held=checker.held,
        interrupted=interrupted.is_set(),
        seed=options.seed,
        seconds=round(took, 1),
        kinds=[kind.value for kind in options.kinds],
        pauses=options.pauses,
        servers=options.servers,
        instances=dict(counts),
        callers=options.callers,
        load=descriptions,
        carried_out=dict(nemesis.counts),
        skipped=dict(Counter(each.kind.value for each in nemesis.done if not each.carried_out)),
        calls=checker.calls,
        items=checker.items,
        ends=dict(checker.ends),
        stalls=stalls,
        unexplained=unexplained,
        longest=longest_of(checker, began),
        whole_after=whole_after,
        broken=dict(checker.broken),
        violations=checker.examples,
        before=before,
        after=after,
        samples=samples,
        steps=nemesis.done,
    )


async def _break(
    nemesis: Nemesis,
    steps: Sequence[Step],
    seconds: float,
    servers: OwnServers,
    interrupted: asyncio.Event,
) -> list[Sample]:
    """Have faults go on for so long, and heal them; what was held meanwhile."""
    samples: list[Sample] = []
    async with task_group() as faults:
        faults.start_soon(nemesis.run, steps)
        faults.start_soon(_take_samples, samples, servers)
        with anyio.move_on_after(seconds):
            await interrupted.wait()
        faults.cancel_scope.cancel()
    return samples


async def _take_samples(samples: list[Sample], servers: OwnServers) -> None:
    began = monotonic()
    while True:
        await anyio.sleep(SAMPLE_SECONDS)
        samples.append(await _sample(servers, began))


async def _sample(servers: OwnServers, began: float) -> Sample:
    """A sample of the resources held now, in a run whose faults `began` then."""
    return Sample(round(monotonic() - began, 1), Resources.now(), await servers.holdings())


def _bounds(count: int) -> tuple[int, int]:
    """The lowest and highest number of instances that a node of so many may come to have."""
    return max(1, math.ceil(count / 2)), count + max(1, count // 2)


async def _ready(supervisor: Supervisor) -> None:
    """Wait until every instance is ready.

    Raises:
        StartFailed: one does not start.
    """

    def ready() -> bool:
        return all(child.state is ChildState.READY for child in supervisor.children)

    with anyio.move_on_after(START_SECONDS):
        await until(lambda: ready() or supervisor.ended.is_set())
    if ready():
        return
    late = f"the instances were not ready within {START_SECONDS:g} s"
    raise StartFailed(supervisor.failure or Failure(exit_codes.START_FAILED, late))


async def _whole(supervisor: Supervisor, checker: Checker) -> float | None:
    """Wait until nothing keeps the run from being ready; seconds, or None where that is in vain."""
    began = monotonic()
    with anyio.move_on_after(WHOLE_SECONDS):
        await until(lambda: not supervisor.problems())
        return round(monotonic() - began, 2)
    problems = supervisor.problems()
    details = "; ".join(f"{label}: {why}" for label, why in problems.items())
    checker.violated(Promise.NOT_WHOLE, "the run", details)
    return None


async def _sources(
    options: TrialOptions, graph: _Graph, runtime: Runtime
) -> tuple[list[Source], list[str]]:
    """The sources of calls, and a description of their targets."""
    if options.graph is None:
        echoes = Echoes(runtime, options.seed, items=options.items, pauses=ECHO_PAUSES)
        low, high = options.items
        return [echoes], [f"echoes: streams of {low} to {high} items, and calls; none may fail"]
    calls: list[tuple[EndpointName, bytes | None]] = list(options.calls)
    calls = calls or _without_request(graph)
    sources: list[Source] = []
    descriptions: list[str] = []
    for name, request in calls:
        spec, client = await _client_of(name, graph, runtime)
        client = with_options(client, wait=WAIT)
        source, text = await repeated(
            *(name, request, runtime, spec, client),
            timeout=options.timeout,
            strict=options.strict,
        )
        sources.append(source)
        descriptions.append(text)
    return sources, descriptions


def _without_request(graph: _Graph) -> list[tuple[EndpointName, bytes | None]]:
    """The endpoints of a graph that can be called with nothing."""
    endpoints: list[tuple[EndpointName, bytes | None]] = []
    for node in graph.nodes:
        if not node.service.workers or not node.service.enabled:
            continue
        for spec in resolve(node.actor).__dynbus_handlers__.values():
            if spec.parameter is None or spec.default is not Parameter.empty:
                endpoints.append((EndpointName.parse(f"{node.address}.{spec.name}"), None))
    return endpoints


async def _client_of(
    name: EndpointName, graph: _Graph, runtime: Runtime
) -> tuple[HandlerSpec | None, Any]:
    """A client of an endpoint: typed where a class of the graph has it."""
    node = next((n for n in graph.nodes if n.address == f"{name.namespace}.{name.component}"), None)
    if node is None:
        known = ", ".join(each.address for each in graph.nodes)
        raise ConfigError(f"--call {name}: the graph has no such node; it has {known}")
    actor = resolve(node.actor)
    for spec in actor.__dynbus_handlers__.values():
        if spec.name == name.endpoint:
            return spec, runtime.client(actor, node=name.component, namespace=name.namespace)
    return None, await runtime.endpoint(name).client()
