"""Prefill and decode instances in processes of their own, which tests kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
from tests.conditions import PATIENCE, Stopwatch
from tests.llm.disaggregated.test_worker import greedy, seeded

from dynbus import Runtime, with_options
from dynbus.bus.clock import monotonic
from dynbus.bus.errors import DynbusError
from dynbus.bus.protocol.names import InstanceName
from dynbus.llm.disaggregated.roles import Role, RoleChange
from dynbus.llm.disaggregated.worker import DisaggregatedWorker
from dynbus.llm.generation import GenerateRequest
from dynbus.llm.page.state import InstanceSurvey

ACTORS = """
from dynbus.llm.hand_over.sink import Limits
from dynbus.llm.disaggregated.worker import DisaggregatedWorker


class Engine(DisaggregatedWorker, namespace="killed"):
    hand_over_limits = Limits(hand_over=20.0, queue=5.0, transfer=5.0, lease=10.0, settle=2.0)
"""


@contextmanager
def running(
    folder: Path,
    url: str,
    model: dict[str, Any],
    workers: int,
    roles: Collection[str] = ("prefill", "decode"),
    namespace: str = "",
    package: Path | None = None,
) -> Generator[None]:
    """A run of so many instances of each role, in a network namespace where one is named.

    Args:
        package: the folder from which dynbus is imported; that of the environment unless given.
    """
    folder.mkdir(exist_ok=True)
    (folder / "engines.py").write_text(ACTORS)
    nodes = {
        "prefill": {"class": "Engine", "workers": workers, **model},
        "decode": {
            "class": "Engine",
            "workers": workers,
            **model,
            "disaggregation": {"mode": "remote"},
        },
    }
    nodes = {role: nodes[role] for role in roles}
    (folder / "run.yaml").write_bytes(msgspec.json.encode(nodes))
    command = [sys.executable, "-m", "dynbus", "run", "engines.py", "-f", "run.yaml"]
    if namespace:
        command = ["ip", "netns", "exec", namespace, *command]
    env = os.environ | ({} if package is None else {"PYTHONPATH": str(package)})
    with (folder / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--nats", url], stdout=log, stderr=log, cwd=folder, env=env
        )
        try:
            yield
        except BaseException:
            # What an engine said before it died is nowhere else.
            print((folder / "run.log").read_text(errors="replace")[-20_000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()


def found(runtime: Runtime, node: str) -> list[tuple[str, int]]:
    """The instances of a role, each with its process."""
    there = runtime.discovery.view.instances("killed", node, monotonic())
    return [(one.id, int(one.record.address.rpartition(":")[2])) for one in there]


async def figures_of(runtime: Runtime, node: str) -> dict[str, float]:
    """What the only instance of a role says of its hand-overs; nothing where it does not answer."""
    [(instance, _)] = found(runtime, node)
    name = InstanceName("killed", node, instance)
    row = (await InstanceSurvey(runtime.bus).of([name])).get(name)
    return dict(row.counts.figures) if row is not None and row.counts is not None else {}


async def until_found(runtime: Runtime, workers: int) -> None:
    watch = Stopwatch()
    while any(len(found(runtime, node)) < workers for node in ("prefill", "decode")):
        watch.check(PATIENCE, "both roles have their instances")
        await anyio.sleep(0.05)


async def tokens_of(client: Any, request: GenerateRequest) -> list[int]:
    """All tokens of a request, whose stream goes on elsewhere when its instance dies."""
    return [token async for item in client.generate(request) for token in item.token_ids]


class Engine(DisaggregatedWorker, namespace="killed"):
    """What the processes run."""


class Outcome(msgspec.Struct):
    """What came of a run with kills.

    Attributes:
        right, wrong: requests.
        kills: of instances.
        left: blocks that are held or in use, and requests that run, five seconds after the end.
    """

    right: int = 0
    wrong: int = 0
    kills: int = 0
    left: int = -1


def requests_of(count: int) -> list[GenerateRequest]:
    """Different requests, greedy and seeded."""
    make = (greedy, seeded)
    return [make[n % 2](30 + 37 * n % 400, 6 + n % 7, seed=n) for n in range(count)]


async def serve_while_killing(
    url: str, wanted: Sequence[list[int]], *, requests: int, kills: int, workers: int, seed: int = 1
) -> Outcome:
    """Send requests, eight at a time, and kill instances of either role meanwhile."""
    outcome, chance = Outcome(), random.Random(seed)
    kinds = requests_of(len(wanted))
    async with Runtime.connect(url) as runtime:
        runtime.discovery.begin()
        await until_found(runtime, workers)
        client = runtime.client(Engine, node="decode", wait=PATIENCE)
        numbers = iter(range(requests))
        every = max(1, requests // (kills + 1))

        async def send() -> None:
            for number in numbers:
                if number and number % every == 0 and outcome.kills < kills:
                    await kill()
                at = number % len(wanted)
                tokens = await tokens_of(client, kinds[at])
                if tokens == wanted[at]:
                    outcome.right += 1
                else:
                    outcome.wrong += 1

        async def kill() -> None:
            watch, before = Stopwatch(), outcome.kills
            while outcome.kills == before:
                watch.check(PATIENCE, "there is an instance to kill")
                there = found(runtime, chance.choice(("prefill", "decode")))
                # The records of those that were killed are there for a while.
                with suppress(ProcessLookupError, IndexError):
                    os.kill(chance.choice(there)[1], signal.SIGKILL)
                    outcome.kills += 1
                    break
                await anyio.sleep(0.05)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(send)
        await until_found(runtime, workers)
        outcome.left = await left_in(runtime)
    return outcome


async def serve_while_changing_roles(
    url: str, wanted: Sequence[list[int]], *, changes: Sequence[Role]
) -> int:
    """Send requests, four at a time, each once, while an instance that decodes changes its role.

    Returns:
        How many requests there were.

    Raises:
        DynbusError: one of them failed.
        AssertionError: one of them has other tokens.
    """
    kinds, done = requests_of(len(wanted)), 0
    async with Runtime.connect(url) as runtime:
        runtime.discovery.begin()
        client = runtime.client(Engine, node="decode", wait=PATIENCE)
        control = runtime.client(Engine, node="hand_over", wait=PATIENCE)
        changing = anyio.Event()

        async def send(first: int) -> None:
            nonlocal done
            at = first
            while not changing.is_set() or at == first:
                tokens: list[int] = []
                async for item in client.generate(kinds[at % len(kinds)]):
                    tokens += item.token_ids
                assert tokens == wanted[at % len(kinds)]
                done += 1
                at += 4

        async def instance_that_decodes() -> Any:
            for one in runtime.discovery.view.instances("killed", "hand_over", monotonic()):
                with suppress(DynbusError):
                    here = with_options(control, instance=one.id)
                    if (await here.role()).serves == ["decode"]:
                        return here
            return None

        async with anyio.create_task_group() as tasks:
            for first in range(4):
                tasks.start_soon(send, first)
            watch = Stopwatch()
            while (here := await instance_that_decodes()) is None:
                watch.check(PATIENCE, "an instance decodes")
                await anyio.sleep(0.05)
            for role in changes:
                before = done
                state = await here.change_role(RoleChange(role))
                assert state.role == role
                watch = Stopwatch()
                # Requests are served with each role, and what was given up drains.
                while done < before + 4 or (await here.role()).draining:
                    watch.check(PATIENCE, f"requests are served while it is {role}")
                    await anyio.sleep(0.02)
            changing.set()
    return done


async def left_in(runtime: Runtime, seconds: float = 5.0) -> int:
    """Blocks and requests that instances still have when so many seconds are over, at the latest;
    0 as soon as there are none."""
    watch = Stopwatch()
    while True:
        left = 0
        for node in ("prefill", "decode"):
            client = runtime.client(Engine, node=node)
            for instance, _ in found(runtime, node):
                try:
                    load = await with_options(client, instance=instance).load_metrics()
                except DynbusError:
                    # It was killed; its record is there for a while.
                    continue
                left += load.kv_active_blocks + load.request_active_slots
        if not left or watch.seconds() > seconds:
            return left
        await anyio.sleep(0.05)
