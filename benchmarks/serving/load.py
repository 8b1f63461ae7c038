"""What asks a front end, or the bus alone: `python -m benchmarks.serving.load KIND SPEC`.

Each is a process of its own and answers with its figures; times are in seconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from statistics import fmean
from time import perf_counter
from typing import Any

import anyio
import msgspec
import psutil
import uvloop

from benchmarks.request_plane.cpu import cpu_seconds, cpu_used
from dynbus import Arrival, Relay, Runtime
from dynbus.llm.engine.interface import EngineLoad, Step, Stepper
from dynbus.llm.engine.stepping import stepper_of
from dynbus.llm.generation import Generated, GenerateRequest

from .clients import Connection, Failed, chat, close, connect, conversation, summary
from .engines import NAMESPACE, BenchWorker, EngineSettings
from .model import VOCABULARY, words
from .processes import allow_many_files, answer, memory_of
from .workload import Workload

SETTLE = 1.0
"""Seconds that streams run before they are measured."""

TURN_TOKENS = 250
"""Of each message of a long conversation."""

ENDLESS = 100_000
"""Tokens of a stream that is measured while it runs."""


class Spec(msgspec.Struct, frozen=True):
    """What a measurement wants.

    Attributes:
        url: of the front end, or of the bus.
        engine: for what needs no front end.
        pids: of the processes whose time is counted, by what they are.
        front: the process id of the front end.
        key: with which it is asked; with one, refusals are counted and are no error.
    """

    url: str = ""
    engine: EngineSettings | None = None
    seconds: float = 5.0
    streams: int = 1
    prompt_tokens: int = 64
    max_tokens: int = 64
    seed: int = 0
    pids: Mapping[str, int] = {}
    front: int = 0
    long_tokens: int = 0
    workload: Workload | None = None
    key: str = ""

    def length(self, number: int) -> int:
        """The tokens of the prompt of one of many streams: as many of them complete a block of the
        engine's cache at each step, whichever way they began."""
        return self.prompt_tokens + number % 16


# One stream ------------------------------------------------------------------------------------


async def served(spec: Spec) -> Any:
    """One stream after the other, through the front end."""
    (connection,) = await connect(spec.url, 1)
    told: list[dict[str, Any]] = []
    end = perf_counter() + spec.seconds
    while perf_counter() < end or not told:
        prompt = words(spec.prompt_tokens, spec.seed + len(told))
        connection.begin(chat(prompt, spec.max_tokens))
        await connection.ended()
        told.append(summary(connection))
    close([connection])
    return told


class _Listener:
    """Hears what an engine does, for one request at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.done = asyncio.Event()

    def on_step(self, step: Step, load: EngineLoad, began: float) -> None:
        now = perf_counter()
        for _, item in step.outputs:
            self.times += [now] * len(item.token_ids)
            if item.finish_reason is not None:
                self.done.set()

    def on_refused(self, request_id: str, error: Exception) -> None:
        raise error

    def on_idle(self, taken: int) -> None:
        pass


async def bare(spec: Spec) -> Any:
    """One stream after the other, of an engine in this process."""
    assert spec.engine is not None
    listener = _Listener()
    stepper = stepper_of(spec.engine.mock(), listener)
    stepping = asyncio.create_task(stepper.run())
    told: list[dict[str, Any]] = []
    end = perf_counter() + spec.seconds
    while perf_counter() < end or not told:
        request = GenerateRequest(
            _token_ids(spec.prompt_tokens, spec.seed + len(told)), max_tokens=spec.max_tokens
        )
        listener.times, listener.done = [], asyncio.Event()
        sent = perf_counter()
        stepper.add(str(len(told)), request)
        await listener.done.wait()
        times = listener.times
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        told.append({"ttft": times[0] - sent, "gaps": gaps})
    stepping.cancel()
    return told


def _token_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


# Many streams ----------------------------------------------------------------------------------


async def _window(spec: Spec, own: str, tokens: Callable[[], int]) -> dict[str, Any]:
    """The time on a core of processes while streams run, and how many tokens came.

    Args:
        own: what this process is.
    """
    await asyncio.sleep(SETTLE)
    pids = {**spec.pids, own: os.getpid()}
    before, first, begun = cpu_seconds(pids.values()), tokens(), perf_counter()
    await asyncio.sleep(spec.seconds)
    # A short time on a slow machine may bring none, and all is told of one.
    await _until(lambda: tokens() > first)
    made, took = tokens() - first, perf_counter() - begun
    used = cpu_used(before, cpu_seconds(pids.values()))
    return {
        "tokens": made,
        "seconds": took,
        "cpu": {name: used[pid] for name, pid in pids.items()},
    }


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the streams did not begin within two minutes")


async def many(spec: Spec) -> Any:
    """Many streams through the front end: time on a core, memory, and how even they are."""
    # The first requests of a process load what the others use.
    await _warm(spec)
    before = memory_of(spec.front)
    connections = await connect(spec.url, spec.streams)
    await _begin(connections, spec)
    figures = await _window(spec, "client", lambda: sum(each.tokens for each in connections))
    figures["memory"] = (memory_of(spec.front) - before) / spec.streams
    figures["gaps"] = [
        (each.events[-1] - each.events[0]) / (len(each.events) - 1)
        for each in connections
        if len(each.events) > 1
    ]
    close(connections)
    return figures


async def _begin(connections: list[Connection], spec: Spec) -> None:
    for number, connection in enumerate(connections):
        prompt = words(spec.length(number), spec.seed + number)
        connection.begin(chat(prompt, ENDLESS))
        if number % 64 == 63:
            await asyncio.sleep(0.02)
    await _until(lambda: all(len(each.events) > 1 for each in connections))


async def _warm(spec: Spec) -> None:
    connections = await connect(spec.url, min(32, spec.streams))
    for number, connection in enumerate(connections):
        connection.begin(chat(words(spec.prompt_tokens, ~number), 4))
    for connection in connections:
        await connection.ended()
    close(connections)
    await asyncio.sleep(SETTLE)


async def requests(spec: Spec) -> Any:
    """Answers of a few tokens, side by side: each connection asks again when it has one."""
    await _warm(spec)
    connections = await connect(spec.url, spec.streams)
    answers = 0

    async def ask(first: int, connection: Connection) -> None:
        nonlocal answers
        for number in count(first, spec.streams):
            prompt = words(spec.length(number), spec.seed + number)
            connection.begin(chat(prompt, spec.max_tokens))
            await connection.ended()
            if connection.usage("completion_tokens") != spec.max_tokens:
                raise RuntimeError(f"an answer has not the {spec.max_tokens} tokens it should have")
            answers += 1

    figures: dict[str, Any] = {}
    async with anyio.create_task_group() as asking:
        for number, connection in enumerate(connections):
            asking.start_soon(ask, number, connection)
        figures = await _window(spec, "client", lambda: answers * spec.max_tokens)
        asking.cancel_scope.cancel()
    close(connections)
    return figures


async def stepped(spec: Spec) -> Any:
    """Many streams of an engine in this process, which nobody reads."""
    assert spec.engine is not None
    listener = _Listener()
    stepper = stepper_of(spec.engine.mock(), listener)
    stepping = asyncio.create_task(stepper.run())
    for number in range(spec.streams):
        token_ids = _token_ids(spec.length(number), spec.seed + number)
        stepper.add(str(number), GenerateRequest(token_ids, max_tokens=ENDLESS))
    await _until(lambda: len(listener.times) > spec.streams)
    figures = await _window(spec, "engine", lambda: len(listener.times))
    stepping.cancel()
    return figures


class _AsksAgain(_Listener):
    """Asks an engine for as many tokens again when it has them."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._spec = spec
        self._asked = 0

    def begin(self, stepper: Stepper) -> None:
        self._stepper = stepper
        for _ in range(self._spec.streams):
            self._ask()

    def on_step(self, step: Step, load: EngineLoad, began: float) -> None:
        super().on_step(step, load, began)
        for _, item in step.outputs:
            if item.finish_reason is not None:
                self._ask()

    def _ask(self) -> None:
        spec, number = self._spec, self._asked
        self._asked += 1
        token_ids = _token_ids(spec.length(number), spec.seed + number)
        request = GenerateRequest(token_ids, max_tokens=spec.max_tokens)
        self._stepper.add(str(number), request)


async def stepped_requests(spec: Spec) -> Any:
    """Answers of a few tokens, side by side, of an engine in this process."""
    assert spec.engine is not None
    listener = _AsksAgain(spec)
    stepper = stepper_of(spec.engine.mock(), listener)
    stepping = asyncio.create_task(stepper.run())
    listener.begin(stepper)
    figures = await _window(spec, "engine", lambda: len(listener.times))
    stepping.cancel()
    return figures


async def bus(spec: Spec) -> Any:
    """Many streams of the engine over the bus alone, read by a relay that decodes their items."""
    decode = msgspec.json.Decoder(Generated).decode
    counts = [0] * spec.streams
    seen = 0

    def deliver(arrivals: list[Arrival[int, bytes]]) -> None:
        nonlocal seen
        for arrival in arrivals:
            if arrival.error is not None:
                raise arrival.error
            for item in arrival.items:
                made = len(decode(item).token_ids)
                counts[arrival.stream.key] += made
                seen += made

    async with Runtime.connect(spec.url, name="relay") as runtime:
        endpoint = runtime.namespace(NAMESPACE).component(BenchWorker.__name__)
        client = await endpoint.endpoint("generate").client()
        await client.wait_for_instances(timeout=15.0)
        with Relay(deliver) as relay:
            for number in range(spec.streams):
                token_ids = _token_ids(spec.length(number), spec.seed + number)
                request = GenerateRequest(token_ids, max_tokens=ENDLESS)
                await relay.open(client.generate(request).raw(), number)
            await _until(lambda: all(counts))
            return await _window(spec, "relay", lambda: seen)


# A long prompt beside others -------------------------------------------------------------------


async def beside(spec: Spec) -> Any:
    """The longest gap of each stream while a long prompt is answered, and while none is."""
    (asking,) = await connect(spec.url, 1)
    connections = await connect(spec.url, spec.streams)
    await _begin(connections, spec)
    # One that nobody looks at: it loads what the others use.
    asking.begin(chat(words(1000, spec.seed), 1))
    await asking.ended()
    end = perf_counter() + spec.seconds
    rounds: list[dict[str, float]] = []
    while perf_counter() < end or not rounds:
        request = chat(words(spec.long_tokens, spec.seed - 1 - len(rounds)), 1)
        # Making it took this process a while: what waited for that is not late.
        await asyncio.sleep(0.3)
        asking.begin(request)
        took, beside = await _longest_gap(connections, asking.ended())
        _, alone = await _longest_gap(connections, asyncio.sleep(took))
        rounds.append({"took": took, "beside": beside, "alone": alone})
    close([asking, *connections])
    return rounds


async def turns(spec: Spec) -> Any:
    """Processor time and time to the first token of long conversations, one after the other: of
    each that is new, and of its next turn."""
    (connection,) = await connect(spec.url, 1)
    connection.begin(chat(words(1000, ~spec.seed), 1))
    await connection.ended()
    seeds = count(spec.seed)

    def said(number: int) -> list[dict[str, str]]:
        roles = (("user", "assistant")[turn % 2] for turn in range(number))
        return [{"role": role, "content": words(TURN_TOKENS, next(seeds))} for role in roles]

    rounds: dict[str, list[dict[str, float]]] = {"new": [], "next": []}
    end = perf_counter() + spec.seconds
    while perf_counter() < end or not rounds["next"]:
        messages = said(spec.long_tokens // TURN_TOKENS - 1)
        messages += [{"role": "user", "content": words(TURN_TOKENS, next(seeds))}]
        longer = [*messages, *({**one, "role": "assistant"} for one in said(1)), *said(1)]
        for kind, conversed in (("new", messages), ("next", longer)):
            request = conversation(conversed, 1)
            started = psutil.Process(spec.front).children(recursive=True)
            pids = {**spec.pids, **{f"front end {one.pid}": one.pid for one in started}}
            # What the one before has left to do, such as the events of its blocks.
            await asyncio.sleep(0.5)
            before = cpu_seconds(pids.values())
            connection.begin(request)
            await connection.ended()
            # The events of its blocks, and what the front end does of them, come after the answer.
            await asyncio.sleep(0.5)
            used = cpu_used(before, cpu_seconds(pids.values()))
            rounds[kind].append(
                {
                    "front": sum(used[pid] for name, pid in pids.items() if "front" in name),
                    "engine": used[pids["engines"]],
                    "broker": used[pids["broker"]],
                    "ttft": connection.events[0] - connection.sent,
                    "tokens": float(connection.usage("prompt_tokens")),
                    "cached": float(connection.usage("cached_tokens")),
                }
            )
    close([connection])
    return rounds


async def _longest_gap(
    connections: list[Connection], doing: Awaitable[None]
) -> tuple[float, float]:
    """How long it takes, and the longest gap that a stream has meanwhile."""
    begun = perf_counter()
    first = [len(each.events) - 1 for each in connections]
    await doing
    took = perf_counter() - begun
    longest = 0.0
    for connection, place in zip(connections, first, strict=True):
        times = connection.events[place:]
        gaps = (after - before for before, after in zip(times, times[1:], strict=False))
        longest = max(longest, *gaps, perf_counter() - times[-1])
    return took, longest


# KV routing ------------------------------------------------------------------------------------


async def poisson(spec: Spec) -> Any:
    """The requests of a workload, each when it is due, whatever became of those before."""
    assert spec.workload is not None
    requests = spec.workload.requests()
    bodies = [chat(one.own, one.max_tokens, one.shared, key=spec.key) for one in requests]
    told: list[dict[str, Any]] = []
    refused = 0

    async def ask(body: bytes) -> None:
        nonlocal refused
        (connection,) = await connect(spec.url, 1)
        connection.begin(body)
        try:
            await connection.ended()
            told.append(summary(connection))
        except Failed:
            if not spec.key:
                raise
            refused += 1
        connection.leave()

    begun = perf_counter()
    async with asyncio.TaskGroup() as asking:
        for body, one in zip(bodies, requests, strict=True):
            await asyncio.sleep(max(0.0, begun + one.at - perf_counter()))
            asking.create_task(ask(body))
    return {
        "ttft": [one["ttft"] for one in told],
        "refused": refused,
        "hit_rate": sum(one["cached"] for one in told) / sum(one["prompt"] for one in told),
        "gap": fmean(gap for one in told for gap in one["gaps"]),
    }


KINDS: Mapping[str, Callable[[Spec], Awaitable[Any]]] = {
    each.__name__: each
    for each in (
        *(served, bare, many, requests, stepped, stepped_requests),
        *(bus, beside, turns, poisson),
    )
}


async def _main(kind: str, given: str) -> None:
    allow_many_files()
    answer(await KINDS[kind](msgspec.json.decode(given, type=Spec)))


if __name__ == "__main__":
    uvloop.run(_main(*sys.argv[1:3]))
